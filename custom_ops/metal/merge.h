// merge: the splits of a query row brought together, and rotated back. A part of kernels.metal.
#pragma once

// output = (low-bit sum, rotated back, + exact sum) / sum of weights; a query that sees nothing gives zeros.
[[max_total_threads_per_threadgroup(512)]] kernel void merge(
    constant MergeArgs& args [[buffer(kMergeArgs)]], device const float* partials [[buffer(kMergePartials)]],
    device const float* split_stats [[buffer(kMergeStats)]], device const float* head_sink [[buffer(kMergeHeadSink)]],
    device float* output [[buffer(kMergeOutput)]], uint group [[threadgroup_position_in_grid]],
    uint lane_index [[thread_index_in_simdgroup]], uint index [[thread_index_in_threadgroup]],
    uint thread_count [[threads_per_threadgroup]]) {
  threadgroup float factors[kMaxSplits];
  threadgroup float4 pieces[2 * kMergeThreads];
  threadgroup float low[kMaxHeadDim];
  threadgroup float exact[kMaxHeadDim];
  const int row = int(group), lane = int(lane_index), thread_index = int(index), threads = int(thread_count);
  const int splits = args.low_splits + args.exact_splits;

  float maximum = kNoScore;
  for (int s = lane; s < splits; s += kSimd) maximum = largest(maximum, split_stats[(long(s) * args.rows + row) * 2]);
  maximum = largest_of_all(maximum);
  const float sink = args.sink != 0 ? head_sink[row % args.heads] : kNoScore;
  if (sink > maximum || isnan(sink)) maximum = sink;
  float sum = 0.0f;
  for (int s = lane; s < splits; s += kSimd) {
    const long stat = (long(s) * args.rows + row) * 2;
    const float part = split_stats[stat + 1];
    const float factor = part == 0.0f ? 0.0f : exp(split_stats[stat] - maximum);
    if (part != 0.0f) sum += part * factor;
    if (thread_index < kSimd) factors[s] = factor;
  }
  sum = add_all(sum);
  if (sink != kNoScore) sum += exp(sink - maximum);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // A thread has four channels of every parts-th split.
  const int quads = (args.dim + 3) / 4, width = (quads + kSimd - 1) / kSimd * kSimd, parts = threads / width;
  const int quad = thread_index % width, part = thread_index / width;
  float4 low_sum = float4(0.0f), exact_sum = float4(0.0f);
  if (quad < quads && part < parts) {
    device const float4* sums = (device const float4*)partials + long(row) * (args.pitch / 4) + quad;
    const long split_quads = long(args.rows) * (args.pitch / 4);
    for (int s = part; s < args.low_splits; s += parts) low_sum = low_sum + sums[s * split_quads] * factors[s];
    for (int s = args.low_splits + part; s < splits; s += parts)
      exact_sum = exact_sum + sums[s * split_quads] * factors[s];
    pieces[part * 2 * width + quad] = low_sum;
    pieces[(part * 2 + 1) * width + quad] = exact_sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float4* low_quads = (threadgroup float4*)low;
  threadgroup float4* exact_quads = (threadgroup float4*)exact;
  for (int i = thread_index; i < quads; i += threads) {
    low_sum = exact_sum = float4(0.0f);
    for (int p = 0; p < parts; ++p) {
      low_sum = low_sum + pieces[p * 2 * width + i];
      exact_sum = exact_sum + pieces[(p * 2 + 1) * width + i];
    }
    low_quads[i] = low_sum;
    exact_quads[i] = exact_sum;
  }
  if (args.rotate != 0) rotate_row(low, args.dim, thread_index, threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const long at = long(row % args.heads) * args.output_head + long(row / args.heads) * args.output_token;
  ROLLED for (int c = thread_index; c < args.dim; c += threads) output[at + c] =
      sum == 0.0f ? 0.0f : (low[c] + exact[c]) / sum;
}
