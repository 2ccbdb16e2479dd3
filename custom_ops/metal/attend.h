// attend: the splits of the tokens, and their simdgroups brought together. A part of kernels.metal.
#pragma once

template <int N>
inline float4 over_parts(float4 sum, thread const ValueLanes& lanes) {
  for (int step = lanes.width; step < kSimd; step *= 2) {
    sum.x += simd_shuffle_xor(sum.x, ushort(step));
    sum.y += simd_shuffle_xor(sum.y, ushort(step));
    sum.z += simd_shuffle_xor(sum.z, ushort(step));
    sum.w += simd_shuffle_xor(sum.w, ushort(step));
  }
  return sum;
}

// Brings the simdgroups' parts of a split together and writes them.
template <int N>
inline void write_split(constant AttendArgs& args, thread const QueryRows<N>& rows, thread const ValueLanes& lanes,
                        int split, int slice, thread Softmax<N>& softmax, thread Sums<N>& sums,
                        threadgroup float* weights, threadgroup float* stats, int lane, int simdgroup, int simdgroups,
                        device float* partials, device float* split_stats) {
  const int width = kWide != 0 ? 256 : 128, count = args.tokens * args.heads;
  const int share = kWeightFloats / simdgroups;
  EACH_ROW(q) {
    softmax.sum[q] = add_all(softmax.sum[q]);
    if (lane == 0) {
      stats[(simdgroup * N + q) * 2] = softmax.maximum[q];
      stats[(simdgroup * N + q) * 2 + 1] = softmax.sum[q];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float4* mine = (threadgroup float4*)(weights + simdgroup * share);
  EACH_ROW(q) {
    float maximum = kNoScore;
    ROLLED for (int s = 0; s < simdgroups; ++s) maximum = largest(maximum, stats[(s * N + q) * 2]);
    // A simdgroup whose rows see nothing has sum 0; one with nothing but NaN has maximum -inf and sum NaN.
    const float factor = softmax.sum[q] == 0.0f ? 0.0f : exp(softmax.maximum[q] - maximum);
    const float4 first = over_parts<N>(sums.first[q], lanes) * factor;
    if (lanes.part == 0) mine[q * (width / 4) + lane] = first;
    if (kWide != 0) mine[q * (width / 4) + lane + kSimd] = sums.second[q] * factor;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int thread_index = simdgroup * kSimd + lane, threads = simdgroups * kSimd;
  EACH_ROW(q) {
    if (rows.end[q] == 0) continue;
    const long at = long(split) * count + rows.row[q] - args.first_token * args.heads;
    const int channels = min(width, lanes.quads * 4 - slice * width);
    ROLLED for (int c = thread_index; c < channels; c += threads) {
      float sum = 0.0f;
      ROLLED for (int s = 0; s < simdgroups; ++s) sum += weights[s * share + q * width + c];
      partials[at * args.cache.value.pitch + slice * width + c] = sum;
    }
    if (thread_index != 0 || slice != 0) continue;
    float maximum = kNoScore, sum = 0.0f;
    ROLLED for (int s = 0; s < simdgroups; ++s) maximum = largest(maximum, stats[(s * N + q) * 2]);
    ROLLED for (int s = 0; s < simdgroups; ++s) {
      const float part = stats[(s * N + q) * 2 + 1];
      if (part != 0.0f) sum += part * exp(stats[(s * N + q) * 2] - maximum);
    }
    split_stats[at * 2] = maximum;
    split_stats[at * 2 + 1] = sum;
  }
}

// A split's share [first, last) of tiles [0, count).
inline int share_begin(int count, int split, int splits) { return int(long(count) * split / splits); }

template <int N>
inline void attend_rows(constant AttendArgs& args, device const uchar* pages, device const float* exact,
                        device const ushort* means, device const float* sinks, device const int* table,
                        device const float* new_key, device const float* new_value, device const float* query,
                        device const uint4* query_codes, device const float* query_scales, device const int* query_sums,
                        device const uchar* padding, device const float* bias, device float* partials,
                        device float* split_stats, threadgroup float* weights, threadgroup float* stats, uint3 group,
                        int lane, int simdgroup, int simdgroups) {
  constant Cache& cache = args.cache;
  const int split = int(group.x), kv_head = int(group.z) / args.slices, slice = int(group.z) % args.slices;
  QueryRows<N> rows;
  find_rows<N>(args, kv_head, int(group.y), rows);
  const ValueLanes lanes = value_lanes(cache.value, slice, lane);
  Softmax<N> softmax;
  Sums<N> sums;
  start<N>(softmax, sums);
  threadgroup float* mine = weights + simdgroup * (kWeightFloats / simdgroups);

  int begin = kNever, end = 0, low_from = kNever, low_to = 0, exact_from = kNever;
  EACH_ROW(q) {
    if (rows.end[q] == 0) continue;
    begin = min(begin, rows.begin[q]);
    end = max(end, rows.end[q]);
    low_from = min(low_from, max(rows.begin[q], cache.n_sink));
    low_to = max(low_to, min(rows.end[q], rows.exact_from[q]));
    exact_from = min(exact_from, rows.exact_from[q]);
  }
  if (split < args.low_splits) {
    if (low_from < low_to) {
      const int first = low_from / kSimd, count = (low_to + kSimd - 1) / kSimd - first;
      attend_low<N>(args, pages, means, table, query, query_codes, query_scales, query_sums, padding, bias, rows, lanes,
                    kv_head, low_from, low_to, first + share_begin(count, split, args.low_splits) + simdgroup,
                    first + share_begin(count, split + 1, args.low_splits), simdgroups, mine, lane, softmax, sums);
    }
  } else {
    const int sink_tiles = begin < cache.n_sink ? (min(cache.n_sink, end) + kExactTile - 1) / kExactTile : 0;
    const int from = max(max(exact_from, begin), cache.n_sink), window = from / kExactTile;
    const int count = sink_tiles + (from < end ? (end + kExactTile - 1) / kExactTile - window : 0);
    const int part = split - args.low_splits;
    attend_exact<N>(args, exact, sinks, table, new_key, new_value, query, padding, bias, rows, lanes, kv_head,
                    sink_tiles, window, share_begin(count, part, args.exact_splits) + simdgroup,
                    share_begin(count, part + 1, args.exact_splits), simdgroups, mine, lane, softmax, sums);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  write_split<N>(args, rows, lanes, split, slice, softmax, sums, weights, stats, lane, simdgroup, simdgroups, partials,
                 split_stats);
}

[[max_total_threads_per_threadgroup(128)]] kernel void attend(
    constant AttendArgs& args [[buffer(kAttendArgs)]], device const uchar* pages [[buffer(kAttendPages)]],
    device const float* exact [[buffer(kAttendExact)]], device const ushort* means [[buffer(kAttendMeans)]],
    device const float* sinks [[buffer(kAttendSinks)]], device const int* table [[buffer(kAttendTable)]],
    device const float* new_key [[buffer(kAttendKey)]], device const float* new_value [[buffer(kAttendValue)]],
    device const float* query [[buffer(kAttendQuery)]], device const uint4* query_codes [[buffer(kAttendQueryCodes)]],
    device const float* query_scales [[buffer(kAttendQueryScales)]],
    device const int* query_sums [[buffer(kAttendQuerySums)]], device const uchar* padding [[buffer(kAttendPadding)]],
    device const float* bias [[buffer(kAttendBias)]], device float* partials [[buffer(kAttendPartials)]],
    device float* split_stats [[buffer(kAttendStats)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float weights[kWeightFloats];
  threadgroup float stats[kMaxSimdgroups * kMaxQueries * 2];
  if (kQueries == 1)
    attend_rows<1>(args, pages, exact, means, sinks, table, new_key, new_value, query, query_codes, query_scales,
                   query_sums, padding, bias, partials, split_stats, weights, stats, group, int(lane), int(simdgroup),
                   int(simdgroups));
  else if (kQueries == 2)
    attend_rows<2>(args, pages, exact, means, sinks, table, new_key, new_value, query, query_codes, query_scales,
                   query_sums, padding, bias, partials, split_stats, weights, stats, group, int(lane), int(simdgroup),
                   int(simdgroups));
  else if (kQueries == 4)
    attend_rows<4>(args, pages, exact, means, sinks, table, new_key, new_value, query, query_codes, query_scales,
                   query_sums, padding, bias, partials, split_stats, weights, stats, group, int(lane), int(simdgroup),
                   int(simdgroups));
  else
    attend_rows<8>(args, pages, exact, means, sinks, table, new_key, new_value, query, query_codes, query_scales,
                   query_sums, padding, bias, partials, split_stats, weights, stats, group, int(lane), int(simdgroup),
                   int(simdgroups));
}
