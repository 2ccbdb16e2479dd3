// attend, exact tokens: 16 at a time. A part of kernels.metal.
#pragma once

// A token's floats for `attend`: of the chunk, of the sinks, of the exact pages.
inline device const float* seen_row(constant Cache& cache, bool key, device const float* exact,
                                    device const float* sinks, device const int* table, device const float* chunk,
                                    int kv_head, int j) {
  if (j < cache.past && j < cache.n_sink) return sinks + sink_offset(cache, key, kv_head, j);
  return float_row(cache, key, exact, table, chunk, kv_head, j);
}

// Exact tiles of 16 tokens: first the sinks', then those of the window from `window` on.
template <int N>
inline void attend_exact(constant AttendArgs& args, device const float* exact, device const float* sinks,
                         device const int* table, device const float* new_key, device const float* new_value,
                         device const float* query, device const uchar* padding, device const float* bias,
                         thread const QueryRows<N>& rows, thread const ValueLanes& lanes, int kv_head, int sink_tiles,
                         int window, int first, int last, int step, threadgroup float* weights, int lane,
                         thread Softmax<N>& softmax, thread Sums<N>& sums) {
  constant Cache& cache = args.cache;
  const int quads = cache.key.pitch / 4, piece = lane % 8;
  ROLLED for (int tile = first; tile < last; tile += step) {
    const bool sink = tile < sink_tiles;
    const int base = (sink ? tile : window + tile - sink_tiles) * kExactTile;
    // Eight lanes a token, four tokens at a time: j, j + 4, j + 8, j + 12.
    const int j = base + lane / 8;
    float scores[N][4], dots[N][4];
    device const float4* keys[4];
    UNROLLED for (int n = 0; n < 4; ++n) {
      const int at = j + 4 * n;
      const bool attended = at < cache.total && (sink == (at < cache.n_sink)) && (args.padded == 0 || padding[at] != 0);
      bool any_seen = false;
      EACH_ROW(q) {
        const bool seen = attended && at >= rows.begin[q] && at < rows.end[q] && (sink || at >= rows.exact_from[q]);
        scores[q][n] = seen ? 0.0f : kNoScore;
        dots[q][n] = 0.0f;
        any_seen = any_seen || seen;
      }
      keys[n] = (device const float4*)new_key;  // some row, for a token that nobody sees
      if (any_seen) keys[n] = (device const float4*)seen_row(cache, true, exact, sinks, table, new_key, kv_head, at);
    }
    ROLLED for (int i = piece; i < quads; i += 8) {
      float4 k[4];
      UNROLLED for (int n = 0; n < 4; ++n) k[n] = keys[n][i];
      EACH_ROW(q) {
        const float4 x = ((device const float4*)(query + long(rows.row[q]) * cache.key.pitch))[i];
        UNROLLED for (int n = 0; n < 4; ++n) dots[q][n] =
            fma(k[n].w, x.w, fma(k[n].z, x.z, fma(k[n].y, x.y, fma(k[n].x, x.x, dots[q][n]))));
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    EACH_ROW(q) {
      float maximum = kNoScore;
      UNROLLED for (int n = 0; n < 4; ++n) {
        float dot = dots[q][n];
        for (int s = 4; s > 0; s /= 2) dot += simd_shuffle_xor(dot, ushort(s));
        if (scores[q][n] != kNoScore) scores[q][n] = finish_score(args, bias, rows.row[q], j + 4 * n, args.scale * dot);
        maximum = largest(maximum, scores[q][n]);
      }
      raise<N>(softmax, sums, q, maximum);
      UNROLLED for (int n = 0; n < 4; ++n) {
        const bool seen = scores[q][n] != kNoScore;
        const float weight = seen ? exp(scores[q][n] - softmax.maximum[q]) : -1.0f;
        if (piece == 0) {
          weights[q * kExactTile + 4 * n + lane / 8] = weight;
          softmax.sum[q] += seen ? weight : 0.0f;
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    // Two tokens of this lane's part at a time.
    ROLLED for (int t = lanes.part; t < kExactTile; t += 2 * lanes.parts) {
      device const float4* values[2];
      bool any_seen[2];
      UNROLLED for (int n = 0; n < 2; ++n) {
        const int at = t + n * lanes.parts;
        any_seen[n] = false;
        EACH_ROW(q) any_seen[n] = any_seen[n] || (at < kExactTile && !(weights[q * kExactTile + at] < 0.0f));
        values[n] = (device const float4*)new_value;
        if (any_seen[n])
          values[n] = (device const float4*)seen_row(cache, false, exact, sinks, table, new_value, kv_head, base + at);
      }
      UNROLLED for (int half_index = 0; half_index < 2; ++half_index) {
        const int quad = lanes.quad + half_index * kSimd;
        if ((half_index == 1 && kWide == 0) || quad >= lanes.quads) break;
        float4 v[2];
        UNROLLED for (int n = 0; n < 2; ++n) v[n] = values[n][quad];
        UNROLLED for (int n = 0; n < 2; ++n) {
          if (!any_seen[n]) continue;
          EACH_ROW(q) {
            const float weight = weights[q * kExactTile + t + n * lanes.parts];
            if (!(weight < 0.0f)) {
              if (half_index == 0)
                sums.first[q] = sums.first[q] + v[n] * weight;
              else
                sums.second[q] = sums.second[q] + v[n] * weight;
            }
          }
        }
      }
    }
  }
}
