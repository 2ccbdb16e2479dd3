// append: rows and queries rotated, quantized, packed; floats and sinks stored. A part of kernels.metal.
#pragma once

// The f16 mean of a block's keys, as floats, over the rows that are finite throughout, in token order.
inline void block_mean(constant Cache& cache, device const float* exact, device const int* table,
                       device const float* chunk, int kv_head, int block, threadgroup float* mean, int lane) {
  const int dim = cache.key.dim, from = block * cache.block, to = from + cache.block;
  ROLLED for (int i = lane; i < dim; i += kSimd) mean[i] = 0.0f;
  int count = 0;
  ROLLED for (int first = from; first < to; first += 32) {
    const int rows = min(32, to - first);
    uint bad = 0;
    ROLLED for (int r = 0; r < rows; ++r) {
      device const float* row = float_row(cache, true, exact, table, chunk, kv_head, first + r);
      ROLLED for (int i = lane; i < dim; i += kSimd) bad |= isfinite(row[i]) ? 0u : 1u << r;
    }
    bad = or_all(bad);
    ROLLED for (int r = 0; r < rows; ++r) {
      if (((bad >> r) & 1u) != 0u) continue;
      device const float* row = float_row(cache, true, exact, table, chunk, kv_head, first + r);
      ROLLED for (int i = lane; i < dim; i += kSimd) mean[i] += row[i];
    }
    count += rows - int(popcount(bad));
  }
  ROLLED for (int i = lane; i < dim; i += kSimd) mean[i] =
      from_half(to_half(count == 0 ? 0.0f : mean[i] / float(count)));
}

inline bool all_finite(threadgroup const float* row, int dim, int lane) {
  uint bad = 0;
  ROLLED for (int i = lane; i < dim; i += kSimd) bad |= isfinite(row[i]) ? 0u : 1u;
  return or_all(bad) == 0u;
}

// The scale of channels [from, to) as stored. The first of equal extremes counts, as in the reference.
inline float group_scale(constant Side& side, threadgroup const float* row, int from, int to, int lane) {
  uint best = 0;
  int at = to;
  ROLLED for (int i = from + lane; i < to; i += kSimd) {
    const uint magnitude = as_type<uint>(row[i]) & 0x7fffffffu;
    if (magnitude > best) {
      best = magnitude;
      at = i;
    }
  }
  for (int step = 16; step > 0; step /= 2) {
    const uint other = simd_shuffle_xor(best, ushort(step));
    const int other_at = simd_shuffle_xor(at, ushort(step));
    if (other > best || (other == best && other_at < at)) {
      best = other;
      at = other_at;
    }
  }
  const float extreme = best == 0u ? 0.0f : row[at], size = as_type<float>(best);
  float scale = side.bits == 8 ? size / 127.0f : side.full != 0 ? extreme / -8.0f : size / 7.0f;
  if (side.group_size != 0) scale = from_half(to_half(scale));
  return scale == 0.0f ? 1.0f : scale;
}

// clamp(rint(x / scale)), 0 beyond the row and for a row that is not finite.
inline int code_of(constant Side& side, threadgroup const float* row, threadgroup const float* scales, int channel,
                   bool finite) {
  if (!finite || channel >= side.dim) return 0;
  const float high = side.bits == 8 ? 127.0f : 7.0f, low = side.bits == 4 && side.full != 0 ? -8.0f : -high;
  const float scale = scales[side.group_size == 0 ? 0 : channel / side.group_size];
  return int(clamp(rint(row[channel] / scale), low, high));
}

inline uint half_at(constant Side& side, threadgroup const float* row, int channel) {
  return channel < side.dim ? uint(to_half(row[channel])) : 0u;
}

// 32 bits of a key row: eight, four or two channels.
inline uint key_word(constant Side& side, threadgroup const float* row, threadgroup const float* scales, int word,
                     bool finite) {
  if (side.bits == 16) return half_at(side, row, 2 * word) | half_at(side, row, 2 * word + 1) << 16;
  uint result = 0;
  ROLLED for (int i = 0; i < 4; ++i) {
    if (side.bits == 8) {
      result |= uint(code_of(side, row, scales, 4 * word + i, finite) & 255) << (8 * i);
    } else {
      result |= uint(code_of(side, row, scales, 8 * word + i, finite) + 8) << (8 * i);
      result |= uint(code_of(side, row, scales, 8 * word + 4 + i, finite) + 8) << (8 * i + 4);
    }
  }
  return result;
}

// Quantizes a row and puts it into the page of its token. The threadgroup owns the eight tokens whose value codes
// share words, and one lane always owns the same words, so changing them bit by bit is safe.
inline void store_codes(constant Side& side, bool key, threadgroup const float* row, threadgroup float* scales,
                        device uchar* page, int token, int lane) {
  const bool finite = all_finite(row, side.dim, lane);
  ROLLED for (int g = 0; g < side.groups; ++g) {
    const int from = side.group_size == 0 ? 0 : g * side.group_size;
    const int to = side.group_size == 0 ? side.dim : min(side.dim, from + side.group_size);
    const float scale = finite ? group_scale(side, row, from, to, lane) : as_type<float>(0x7fc00000u);
    if (lane != 0) continue;
    scales[g] = scale;
    if (side.group_size == 0)
      ((device float*)(page + side.scales))[token] = scale;
    else
      ((device ushort*)(page + side.scales))[g * kTile + token] = to_half(scale);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  device uint* words = (device uint*)(page + side.offset);
  if (key) {
    ROLLED for (int i = lane; i < 4 * side.chunks; i += kSimd) words[(i / 4 * kTile + token) * 4 + i % 4] =
        key_word(side, row, scales, i, finite);
    return;
  }
  const int tokens = 32 / side.bits, shift = token % tokens * side.bits;
  const uint mask = side.bits == 4 ? 15u : side.bits == 8 ? 255u : 65535u;
  ROLLED for (int channel = lane; channel < 4 * side.chunks; channel += kSimd) {
    const uint code = side.bits == 16 ? half_at(side, row, channel)
                                      : uint(code_of(side, row, scales, channel, finite) + (side.bits == 4 ? 8 : 128));
    device uint* word = words + token / tokens * side.chunks * 4 + channel;
    *word = (*word & ~(mask << shift)) | code << shift;
  }
}

// The int8 codes, their scale and their sums per group of keys, of one rotated query.
inline void store_query(constant AppendArgs& args, threadgroup const float* row, int index, device uint* codes,
                        device float* scales, device int* sums, int lane) {
  constant Side& side = args.cache.key;
  const bool finite = all_finite(row, side.dim, lane);
  float size = 0.0f;
  ROLLED for (int i = lane; i < side.dim; i += kSimd) size = largest(size, fabs(row[i]));
  size = largest_of_all(size);
  float scale = size == 0.0f ? 1.0f : size / 127.0f;
  if (scale == 0.0f) scale = 1.0f;  // a subnormal row may underflow
  if (lane == 0) scales[index] = finite ? scale : as_type<float>(0x7fc00000u);
  device uint* words = codes + index * args.query_chunks * 4;
  ROLLED for (int word = lane; word < 4 * args.query_chunks; word += kSimd) {
    uint bytes = 0;
    ROLLED for (int i = 0; i < 4; ++i) {
      const int channel = 4 * word + i;
      if (finite && channel < side.dim)
        bytes |= uint(int(clamp(rint(row[channel] / scale), -127.0f, 127.0f)) & 255) << (8 * i);
    }
    words[word] = bytes;
  }
  ROLLED for (int g = 0; g < side.groups; ++g) {
    const int from = side.group_size == 0 ? 0 : g * side.group_size;
    const int to = side.group_size == 0 ? side.dim : min(side.dim, from + side.group_size);
    int sum = 0;
    ROLLED for (int i = from + lane; finite && i < to; i += kSimd) sum +=
        int(clamp(rint(row[i] / scale), -127.0f, 127.0f));
    sum = simd_sum(sum);
    if (lane == 0) sums[index * side.groups + g] = sum;
  }
}

[[max_total_threads_per_threadgroup(32)]] kernel void append(
    constant AppendArgs& args [[buffer(kAppendArgs)]], device uchar* pages [[buffer(kAppendPages)]],
    device float* exact [[buffer(kAppendExact)]], device ushort* means [[buffer(kAppendMeans)]],
    device float* sinks [[buffer(kAppendSinks)]], device const int* table [[buffer(kAppendTable)]],
    device const float* new_key [[buffer(kAppendKey)]], device const float* new_value [[buffer(kAppendValue)]],
    device const float* query [[buffer(kAppendQuery)]], device uint* query_codes [[buffer(kAppendQueryCodes)]],
    device float* query_scales [[buffer(kAppendQueryScales)]], device int* query_sums [[buffer(kAppendQuerySums)]],
    uint group [[threadgroup_position_in_grid]], uint lane_index [[thread_index_in_simdgroup]]) {
  threadgroup float row[kMaxHeadDim];
  threadgroup float mean[kMaxHeadDim];
  threadgroup float scales[kMaxHeadDim / 32];
  constant Cache& cache = args.cache;
  const int lane = int(lane_index);
  int task = int(group);

  if (task < args.query_tasks) {
    device const float* from = query + long(task) * cache.key.pitch;
    ROLLED for (int i = lane; i < cache.key.dim; i += kSimd) row[i] = from[i];
    if (cache.key.rotate != 0) rotate_row(row, cache.key.dim, lane, kSimd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_query(args, row, task, query_codes, query_scales, query_sums, lane);
    return;
  }
  task -= args.query_tasks;

  if (task < args.encode_tasks) {
    const int eights = args.encode_tasks / (2 * cache.kv_heads);
    const bool key = task < cache.kv_heads * eights;
    const int kv_head = task / eights % cache.kv_heads;
    const int first = (args.encode_from / 8 + task % eights) * 8;
    const int from = max(first, args.encode_from), to = min(first + 8, args.encode_to);
    device const float* chunk = key ? new_key : new_value;
    int block = -1;
    ROLLED for (int j = from; j < to; ++j) {
      if (key && cache.centered != 0 && block != j / cache.block) {
        block = j / cache.block;
        const long at = (long(table[cache.mean_table + block]) * cache.kv_heads + kv_head) * cache.key.dim;
        // After a rollback beyond the slack the block's first rows exist as codes only: their mean stays.
        if (block * cache.block >= min(cache.past, cache.exact_begin)) {
          block_mean(cache, exact, table, chunk, kv_head, block, mean, lane);
          if (j == max(args.encode_from, block * cache.block))  // others need it too; one of them writes it
            ROLLED for (int i = lane; i < cache.key.dim; i += kSimd) means[at + i] = to_half(mean[i]);
        } else {
          ROLLED for (int i = lane; i < cache.key.dim; i += kSimd) mean[i] = from_half(means[at + i]);
        }
      }
      constant Side& side = key ? cache.key : cache.value;
      device const float* floats = float_row(cache, key, exact, table, chunk, kv_head, j);
      const bool center = key && cache.centered != 0;
      ROLLED for (int i = lane; i < side.dim; i += kSimd) row[i] = center ? floats[i] - mean[i] : floats[i];
      if (side.rotate != 0) rotate_row(row, side.dim, lane, kSimd);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const long page = table[cache.low_table + j / kTile];
      store_codes(side, key, row, scales, pages + (page * cache.kv_heads + kv_head) * cache.head_bytes, j % kTile,
                  lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    return;
  }
  task -= args.encode_tasks;

  const bool sink = task >= args.store_tasks;
  if (sink) task -= args.store_tasks;
  const int begin = sink ? cache.past : args.store_from, end = sink ? args.sink_to : cache.total;
  const int tokens = end - begin, kv_head = task / tokens % cache.kv_heads, j = begin + task % tokens;
  const bool key = task < cache.kv_heads * tokens;
  const int pitch = key ? cache.key.pitch : cache.value.pitch;
  device const float* from = float_row(cache, key, exact, table, key ? new_key : new_value, kv_head, j);
  device float* to =
      sink ? sinks + sink_offset(cache, key, kv_head, j) : exact + exact_offset(cache, key, table, kv_head, j);
  ROLLED for (int i = lane; i < pitch; i += kSimd) to[i] = from[i];
}
