// attend, low-bit tokens: 32 at a time, a lane scores one and then sums four channels of all. A part of kernels.metal.
#pragma once

// Receives the int32 dot of each group of channels of this lane's token: s_k * dot, added up in f32.
template <int N>
struct ScoreGroups {
  float scores[N];
};

template <int N>
inline void take_group(thread ScoreGroups<N>& groups, thread const QueryRows<N>&, int, int, float scale,
                       thread int (&dots)[N]) {
  EACH_ROW(q) groups.scores[q] = fma(scale, float(dots[q]), groups.scores[q]);
}

// For the test kernel `scores`: the dots themselves.
template <int N>
struct StoreGroups {
  device int* out;  // [rows of one kv head][total][groups]
  int first, last;  // row of q = 0, rows there are
  int token, total;
};

template <int N>
inline void take_group(thread StoreGroups<N>& groups, thread const QueryRows<N>&, int group, int group_count, float,
                       thread int (&dots)[N]) {
  EACH_ROW(q) {
    if (groups.first + q < groups.last && groups.token < groups.total)
      groups.out[(long(groups.first + q) * groups.total + groups.token) * group_count + group] = dots[q];
  }
}

// One 16-byte chunk of a token against N queries.
template <int N, int kBits>
inline void add_chunk(uint4 key, device const uint4* query_codes, int query_chunks, thread const QueryRows<N>& rows,
                      int chunk, thread int (&dots)[N]) {
  EACH_ROW(q) {
    device const uint4* query = query_codes + rows.row[q] * query_chunks;
    if (kBits == 4) {
      const uint4 x = query[2 * chunk], y = query[2 * chunk + 1];
      dots[q] = dot_nibbles(key.x, x.x, x.y, dots[q]);
      dots[q] = dot_nibbles(key.y, x.z, x.w, dots[q]);
      dots[q] = dot_nibbles(key.z, y.x, y.y, dots[q]);
      dots[q] = dot_nibbles(key.w, y.z, y.w, dots[q]);
    } else {
      const uint4 x = query[chunk];
      dots[q] = dot_bytes(key.x, x.x, dots[q]);
      dots[q] = dot_bytes(key.y, x.y, dots[q]);
      dots[q] = dot_bytes(key.z, x.z, dots[q]);
      dots[q] = dot_bytes(key.w, x.w, dots[q]);
    }
  }
}

// The integer dots of token `token` of a page with N queries, handed on group by group. Four chunks and their scales
// are asked for at once, so that their loads overlap.
template <int N, int kBits, typename Groups>
inline void key_dots(constant Side& side, device const uchar* page, device const uint4* query_codes,
                     device const int* query_sums, int query_chunks, thread const QueryRows<N>& rows, int token,
                     thread Groups& groups) {
  device const uint4* codes = (device const uint4*)(page + side.offset) + token;
  const int group_chunks = side.group_size == 0 ? side.chunks : side.group_size * kBits / 128;
  int dots[N];
  EACH_ROW(q) dots[q] = 0;
  int group = 0, left = group_chunks;
  ROLLED for (int first = 0; first < side.chunks; first += 4) {
    uint4 keys[4];
    float scales[4];
    UNROLLED for (int i = 0; i < 4; ++i) keys[i] = codes[min(first + i, side.chunks - 1) * kTile];
    scales[0] = scale_of(side, page, group, token);
    UNROLLED for (int i = 1; i < 4; ++i) {
      scales[i] = scales[0];
      if (side.group_size != 0) scales[i] = scale_of(side, page, min(first + i, side.chunks - 1) / group_chunks, token);
    }
    UNROLLED for (int i = 0; i < 4; ++i) {
      if (first + i < side.chunks) {
        add_chunk<N, kBits>(keys[i], query_codes, query_chunks, rows, first + i, dots);
        left -= 1;
        if (left == 0 || first + i + 1 == side.chunks) {
          if (kBits == 4) {  // codes are stored + 8
            EACH_ROW(q) dots[q] -= 8 * query_sums[rows.row[q] * side.groups + group];
          }
          take_group<N>(groups, rows, group, side.groups, scales[i], dots);
          EACH_ROW(q) dots[q] = 0;
          group += 1;
          left = group_chunks;
        }
      }
    }
  }
}

// The same for keys stored as halves, against the query as given.
template <int N>
inline void half_scores(constant Side& side, device const uchar* page, device const float* query,
                        thread const QueryRows<N>& rows, int token, thread float (&scores)[N]) {
  device const uint4* codes = (device const uint4*)(page + side.offset) + token;
  ROLLED for (int chunk = 0; chunk < side.chunks; ++chunk) {
    const uint4 key = codes[chunk * kTile];
    EACH_ROW(q) {
      device const float4* x = (device const float4*)(query + long(rows.row[q]) * side.pitch) + 2 * chunk;
      const float4 low = x[0], high = x[1];
      scores[q] = dot_halves(key.x, low.x, low.y, scores[q]);
      scores[q] = dot_halves(key.y, low.z, low.w, scores[q]);
      scores[q] = dot_halves(key.z, high.x, high.y, scores[q]);
      scores[q] = dot_halves(key.w, high.z, high.w, scores[q]);
    }
  }
}

// Adds q . mean of the block of each token j; [from, to): those of the simdgroup's 32 tokens that some row sees.
template <int N>
inline void add_means(constant Cache& cache, device const ushort* means, device const int* table,
                      device const float* query, thread const QueryRows<N>& rows, int kv_head, int from, int to, int j,
                      int lane, float scale, thread float (&scores)[N]) {
  ROLLED for (int block = from / cache.block; block <= (to - 1) / cache.block; ++block) {
    device const ushort* mean =
        means + (long(table[cache.mean_table + block]) * cache.kv_heads + kv_head) * cache.key.dim;
    float dots[N];
    EACH_ROW(q) dots[q] = 0.0f;
    ROLLED for (int i = lane; i < cache.key.dim; i += kSimd) {
      const float x = from_half(mean[i]);
      EACH_ROW(q) dots[q] = fma(query[long(rows.row[q]) * cache.key.pitch + i], x, dots[q]);
    }
    const bool inside = j >= block * cache.block && j < (block + 1) * cache.block;
    EACH_ROW(q) {
      const float dot = add_all(dots[q]);
      if (inside) scores[q] += scale * dot;
    }
  }
}

// 16^-k, or 256^-k: what value_of leaves to the weight of the k-th token of a word.
inline float place_of(int bits, int token) {
  if (bits == 4) return as_type<float>(0x3f800000u - (uint(token & 3) << 25));
  return bits == 8 && (token & 1) != 0 ? 0.00390625f : 1.0f;
}

// A code where it stands in the low 16 bits of a word, as a float: in the mantissa of 2^23, then without the 2^23 and
// without the offset of the code. Times 16^k or 256^k for the k-th; exact. Two instructions, no conversion.
inline float4 nibble_values(uint word) {
  return float4(as_type<float>((word & 0x000fu) | 0x4b000000u) - 8388616.0f,
                as_type<float>((word & 0x00f0u) | 0x4b000000u) - 8388736.0f,
                as_type<float>((word & 0x0f00u) | 0x4b000000u) - 8390656.0f,
                as_type<float>((word & 0xf000u) | 0x4b000000u) - 8421376.0f);
}
inline float2 byte_values(uint word) {
  return float2(as_type<float>((word & 0x00ffu) | 0x4b000000u) - 8388736.0f,
                as_type<float>((word & 0xff00u) | 0x4b000000u) - 8421376.0f);
}

inline float weighted4(float4 weights, float4 values, float sum) {
  return fma(weights.w, values.w, fma(weights.z, values.z, fma(weights.y, values.y, fma(weights.x, values.x, sum))));
}
inline float weighted2(float2 weights, float2 values, float sum) {
  return fma(weights.y, values.y, fma(weights.x, values.x, sum));
}
// Halves may be infinite or NaN, so a token that is not seen (weight -1) must not be multiplied.
inline float weighted_seen(float weight, float value, float sum) {
  return weight < 0.0f ? sum : fma(weight, value, sum);
}

// Adds 16 bytes of values: the tokens that `weights` [N][stride] begins with, of four channels.
template <int N, int kBits>
inline void add_words(uint4 words, threadgroup const float* weights, int stride, thread float4 (&sums)[N]) {
  if (kBits == 4) {
    // Four tokens at a time: that many values live in registers.
    UNROLLED for (int side = 0; side < 2; ++side) {
      const float4 x = nibble_values(words.x >> (16 * side)), y = nibble_values(words.y >> (16 * side));
      const float4 z = nibble_values(words.z >> (16 * side)), w = nibble_values(words.w >> (16 * side));
      EACH_ROW(q) {
        const float4 weight = ((threadgroup const float4*)(weights + q * stride))[side];
        sums[q].x = weighted4(weight, x, sums[q].x);
        sums[q].y = weighted4(weight, y, sums[q].y);
        sums[q].z = weighted4(weight, z, sums[q].z);
        sums[q].w = weighted4(weight, w, sums[q].w);
      }
    }
  } else if (kBits == 8) {
    const float2 x0 = byte_values(words.x), x1 = byte_values(words.x >> 16);
    const float2 y0 = byte_values(words.y), y1 = byte_values(words.y >> 16);
    const float2 z0 = byte_values(words.z), z1 = byte_values(words.z >> 16);
    const float2 w0 = byte_values(words.w), w1 = byte_values(words.w >> 16);
    EACH_ROW(q) {
      threadgroup const float2* weight = (threadgroup const float2*)(weights + q * stride);
      const float2 a = weight[0], b = weight[1];
      sums[q].x = weighted2(b, x1, weighted2(a, x0, sums[q].x));
      sums[q].y = weighted2(b, y1, weighted2(a, y0, sums[q].y));
      sums[q].z = weighted2(b, z1, weighted2(a, z0, sums[q].z));
      sums[q].w = weighted2(b, w1, weighted2(a, w0, sums[q].w));
    }
  } else {
    const half2 x = as_type<half2>(words.x), y = as_type<half2>(words.y);
    const half2 z = as_type<half2>(words.z), w = as_type<half2>(words.w);
    EACH_ROW(q) {
      const float a = weights[q * stride], b = weights[q * stride + 1];
      sums[q].x = weighted_seen(b, float(x.y), weighted_seen(a, float(x.x), sums[q].x));
      sums[q].y = weighted_seen(b, float(y.y), weighted_seen(a, float(y.x), sums[q].y));
      sums[q].z = weighted_seen(b, float(z.y), weighted_seen(a, float(z.x), sums[q].z));
      sums[q].w = weighted_seen(b, float(w.y), weighted_seen(a, float(w.x), sums[q].w));
    }
  }
}

// Four pieces of values of this lane, asked for at once so that their loads overlap: every parts-th from `first` on.
struct FourWords {
  uint4 words[4];
};

inline void load_words(device const uint4* codes, thread const ValueLanes& lanes, int quad, int first, int steps,
                       thread FourWords& four) {
  const int within = min(quad, lanes.quads - 1);
  UNROLLED for (int i = 0; i < 4; ++i) four.words[i] =
      codes[min(first + i * lanes.parts, steps - 1) * lanes.quads + within];
}

// Adds 32 tokens' values of one quad of channels under their weights [N][stride]; the first four pieces are there.
template <int N, int kBits>
inline void add_values(device const uint4* codes, thread const ValueLanes& lanes, int quad,
                       threadgroup const float* weights, int stride, thread FourWords& four, thread float4 (&sums)[N]) {
  ROLLED for (int first = lanes.part; first < kBits; first += 4 * lanes.parts) {
    if (first != lanes.part) load_words(codes, lanes, quad, first, kBits, four);
    UNROLLED for (int i = 0; i < 4; ++i) {
      const int at = first + i * lanes.parts;
      if (at < kBits) add_words<N, kBits>(four.words[i], weights + at * (32 / kBits), stride, sums);
    }
  }
}

template <int N>
inline void add_tokens(int bits, device const uint4* codes, thread const ValueLanes& lanes, int quad,
                       threadgroup const float* weights, int stride, thread FourWords& four, thread float4 (&sums)[N]) {
  if (bits == 4)
    add_values<N, 4>(codes, lanes, quad, weights, stride, four, sums);
  else if (bits == 8)
    add_values<N, 8>(codes, lanes, quad, weights, stride, four, sums);
  else
    add_values<N, 16>(codes, lanes, quad, weights, stride, four, sums);
}

// The low-bit tokens of the half pages first, first + step, … before last; a lane scores one token of each.
template <int N>
inline void attend_low(constant AttendArgs& args, device const uchar* pages, device const ushort* means,
                       device const int* table, device const float* query, device const uint4* query_codes,
                       device const float* query_scales, device const int* query_sums, device const uchar* padding,
                       device const float* bias, thread const QueryRows<N>& rows, thread const ValueLanes& lanes,
                       int kv_head, int low_from, int low_to, int first, int last, int step, threadgroup float* weights,
                       int lane, thread Softmax<N>& softmax, thread Sums<N>& sums) {
  constant Cache& cache = args.cache;
  const int group_size = cache.value.bits == 16 ? 0 : cache.value.group_size;
  const int slice_groups = group_size == 0 ? 1 : 128 / group_size, stride = slice_groups * kSimd;
  ROLLED for (int piece = first; piece < last; piece += step) {
    device const uchar* page = low_page(cache, pages, table, piece / 2, kv_head);
    const int token = piece % 2 * kSimd + lane, j = piece * kSimd + lane;  // in the page, and of all
    // Values and their scales are asked for before the scores are made.
    device const uint4* values =
        (device const uint4*)(page + cache.value.offset) + piece % 2 * cache.value.bits * lanes.quads;
    FourWords four;
    load_words(values, lanes, lanes.quad, lanes.part, cache.value.bits, four);
    const int first_group = group_size == 0 ? 0 : (lanes.quad - lanes.quad % kSimd) * 4 / group_size;
    float value_scales[kSliceGroups];
    if (cache.value.bits != 16) {
      value_scales[0] = scale_of(cache.value, page, first_group, token);
      if (group_size != 0) {
        UNROLLED for (int g = 1; g < kSliceGroups; ++g) value_scales[g] =
            scale_of(cache.value, page, min(first_group + g, cache.value.groups - 1), token);
      }
    }

    ScoreGroups<N> groups;
    EACH_ROW(q) groups.scores[q] = 0.0f;
    if (cache.key.bits == 16) {
      half_scores<N>(cache.key, page, query, rows, token, groups.scores);
      EACH_ROW(q) groups.scores[q] *= args.scale;
    } else {
      if (cache.key.bits == 4)
        key_dots<N, 4, ScoreGroups<N>>(cache.key, page, query_codes, query_sums, args.query_chunks, rows, token,
                                       groups);
      else
        key_dots<N, 8, ScoreGroups<N>>(cache.key, page, query_codes, query_sums, args.query_chunks, rows, token,
                                       groups);
      EACH_ROW(q) groups.scores[q] = args.scale * (query_scales[rows.row[q]] * groups.scores[q]);
      if (cache.centered != 0)
        add_means<N>(cache, means, table, query, rows, kv_head, max(low_from, piece * kSimd),
                     min(low_to, (piece + 1) * kSimd), j, lane, args.scale, groups.scores);
    }

    // Scores become weights, -1 where a token is not seen.
    const bool attended = j < low_to && (args.padded == 0 || padding[j] != 0);
    EACH_ROW(q) {
      const bool seen =
          attended && j >= rows.begin[q] && j >= cache.n_sink && j < rows.end[q] && j < rows.exact_from[q];
      const float score = seen ? finish_score(args, bias, rows.row[q], j, groups.scores[q]) : kNoScore;
      raise<N>(softmax, sums, q, score);
      const bool counts = score != kNoScore;
      const float weight = counts ? exp(score - softmax.maximum[q]) : -1.0f;
      softmax.sum[q] += counts ? weight : 0.0f;
      groups.scores[q] = weight;
    }

    // 128 channels at a time: weight times scale for each of their groups, then the values.
    const float place = place_of(cache.value.bits, token);
    UNROLLED for (int half_index = 0; half_index < 2; ++half_index) {
      if (half_index == 1 && kWide == 0) break;
      const int quad = lanes.quad + half_index * kSimd;
      if (half_index == 1) {
        load_words(values, lanes, quad, lanes.part, cache.value.bits, four);
        if (group_size != 0) {
          UNROLLED for (int g = 0; g < kSliceGroups; ++g) value_scales[g] =
              scale_of(cache.value, page, min(first_group + slice_groups + g, cache.value.groups - 1), token);
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (cache.value.bits == 16) {
        EACH_ROW(q) weights[q * stride + lane] = groups.scores[q];
      } else {
        UNROLLED for (int g = 0; g < kSliceGroups; ++g) {
          if (g < slice_groups) {
            const float scale = value_scales[g] * place;
            EACH_ROW(q)
            weights[q * stride + g * kSimd + lane] = groups.scores[q] < 0.0f ? 0.0f : groups.scores[q] * scale;
          }
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      const int group = group_size == 0 ? 0 : lanes.quad % kSimd * 4 / group_size;
      if (quad < lanes.quads)
        add_tokens<N>(cache.value.bits, values, lanes, quad, weights + group * kSimd, stride, four,
                      half_index == 0 ? sums.first : sums.second);
    }
  }
}
