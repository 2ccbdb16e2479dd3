// The kernels of the low-bit KV cache for Apple GPUs: append, attend, merge. The same text runs as C++ (emulated) and
// as CUDA. Layouts and arguments: abi.h. What is computed: include/kvfuse/kernels.h and cpu/reference_*.cc.
//
// Compile without fast math. Equal to the reference bit for bit: rotation, block means, scales, codes, int32 scores:
// they use one fixed order of additions, division as IEEE rounds it, and no product that is added to anything. The
// other float stages (scores in f32, softmax, weighted sums) add in another order than the reference.
#include <metal_stdlib>

#include "abi.h"

using namespace metal;
using namespace kvfuse_abi;

// cuda: kVariant 1, kQueries 1 2 4 8, kWide 0 1
// cuda: kVariant 0, kQueries 2 4, kWide 0
constant int kVariant [[function_constant(kConstantVariant)]];  // values: 0, 1
constant int kQueries [[function_constant(kConstantQueries)]];  // values: 1, 2, 4, 8
constant int kWide [[function_constant(kConstantWide)]];        // values: 0, 1

// Loops over arrays that must live in registers.
#define UNROLLED _Pragma("unroll")
#define EACH_ROW(q) UNROLLED for (int q = 0; q < N; ++q)

constant constexpr float kNoScore = -INFINITY;
constant constexpr int kNever = 0x7fffffff;

// ---- across a simdgroup: fixed xor trees, so that every device adds in the same order ------------------------------

inline float add_all(float x) {
  for (int step = 16; step > 0; step /= 2) x += simd_shuffle_xor(x, ushort(step));
  return x;
}

// The largest; NaN never is.
inline float largest(float x, float other) { return other > x ? other : x; }
inline float largest_of_all(float x) {
  for (int step = 16; step > 0; step /= 2) x = largest(x, simd_shuffle_xor(x, ushort(step)));
  return x;
}

inline uint or_all(uint x) {
  for (int step = 16; step > 0; step /= 2) x |= simd_shuffle_xor(x, ushort(step));
  return x;
}

// ---- halves: in integers, as kvfuse/half.h, so that no device's conversion matters ---------------------------------

inline float from_half(ushort bits) { return float(as_type<half>(bits)); }

// To nearest even; finite values beyond the range become 65504.
inline ushort to_half(float value) {
  const uint bits = as_type<uint>(value), magnitude = bits & 0x7fffffffu;
  const uint sign = (bits >> 16) & 0x8000u;
  if (magnitude > 0x7f800000u) return ushort(sign | 0x7e00u);
  if (magnitude == 0x7f800000u) return ushort(sign | 0x7c00u);
  if (magnitude >= 0x477ff000u) return ushort(sign | 0x7bffu);
  if (magnitude < 0x33000000u) return ushort(sign);
  const bool normal = magnitude >= 0x38800000u;
  const uint base = normal ? ((magnitude >> 23) - 112u) << 10 : 0u;
  const uint mantissa = normal ? magnitude & 0x7fffffu : (magnitude & 0x7fffffu) | 0x800000u;
  const uint shift = normal ? 13u : 126u - (magnitude >> 23);
  const uint rest = mantissa & ((1u << shift) - 1u), tie = 1u << (shift - 1u), kept = mantissa >> shift;
  const uint up = rest > tie || (rest == tie && (kept & 1u) != 0u) ? 1u : 0u;
  return ushort(sign | (base + kept + up));
}

// ---- integer dots --------------------------------------------------------------------------------------------------

// sum + the products of four signed bytes. Apple GPUs have no such instruction: 16-bit products, which they do at full
// rate and which hold 128 * 127, then 32-bit sums. A shim that has one (CUDA: __dp4a) defines it and KVFUSE_HAS_DOT4.
#ifndef KVFUSE_HAS_DOT4
inline int dot4(int a, int b, int sum) {
  const short4 products = short4(as_type<char4>(a)) * short4(as_type<char4>(b));
  return sum + (int(products.x) + int(products.y)) + (int(products.z) + int(products.w));
}
#endif

inline int byte_of(uint word, int index) { return int(word << (24 - 8 * index)) >> 24; }

// Eight codes + 8 of a word (channels 0..3 in the low nibbles, 4..7 in the high ones) times eight query codes.
inline int dot_nibbles(uint word, uint low, uint high, int sum) {
  if (kVariant == 0) {
    for (int i = 0; i < 4; ++i) {
      sum += int((word >> (8 * i)) & 15u) * byte_of(low, i);
      sum += int((word >> (8 * i + 4)) & 15u) * byte_of(high, i);
    }
    return sum;
  }
  return dot4(int((word >> 4) & 0x0f0f0f0fu), int(high), dot4(int(word & 0x0f0f0f0fu), int(low), sum));
}

inline int dot_bytes(uint word, uint query, int sum) {
  if (kVariant == 0) {
    for (int i = 0; i < 4; ++i) sum += byte_of(word, i) * byte_of(query, i);
    return sum;
  }
  return dot4(int(word), int(query), sum);
}

inline float dot_halves(uint word, float x, float y, float sum) {
  const half2 pair = as_type<half2>(word);
  return fma(float(pair.y), y, fma(float(pair.x), x, sum));
}

// ---- where things are ----------------------------------------------------------------------------------------------

// The kv head's part of the low-bit page of a token's tile.
inline device const uchar* low_page(constant Cache& cache, device const uchar* pages, device const int* table,
                                    int tile, int kv_head) {
  const long page = table[cache.low_table + tile];
  return pages + (page * cache.kv_heads + kv_head) * cache.head_bytes;
}

inline device const float* chunk_row(constant Cache& cache, constant Side& side, device const float* chunk, int kv_head,
                                     int j) {
  return chunk + (long(kv_head) * (cache.total - cache.past) + (j - cache.past)) * side.pitch;
}

inline long exact_offset(constant Cache& cache, bool key, device const int* table, int kv_head, int j) {
  const long page = table[cache.exact_table + j / kExactTile];
  const int row = kv_head * kExactTile + j % kExactTile;
  const int within = key ? row * cache.key.pitch : cache.kv_heads * kExactTile * cache.key.pitch + row * cache.value.pitch;
  return page * cache.exact_floats + within;
}

inline long sink_offset(constant Cache& cache, bool key, int kv_head, int j) {
  const long row = long(j) * cache.kv_heads + kv_head;
  return key ? row * cache.key.pitch : long(cache.sink_rows) * cache.kv_heads * cache.key.pitch + row * cache.value.pitch;
}

// A token's floats for `append`: of the chunk, else of the exact pages.
inline device const float* float_row(constant Cache& cache, bool key, device const float* exact,
                                     device const int* table, device const float* chunk, int kv_head, int j) {
  if (j >= cache.past) return key ? chunk_row(cache, cache.key, chunk, kv_head, j)
                                  : chunk_row(cache, cache.value, chunk, kv_head, j);
  return exact + exact_offset(cache, key, table, kv_head, j);
}

inline float scale_of(constant Side& side, device const uchar* page, int group, int token) {
  device const uchar* scales = page + side.scales;
  if (side.group_size == 0) return ((device const float*)scales)[token];
  return from_half(((device const ushort*)scales)[group * kTile + token]);
}

// ---- rotation ------------------------------------------------------------------------------------------------------

// 1 / sqrt(block), as the reference's division and square root round it: an even power of two is exact, an odd one is
// that of 2 times one.
inline float rotation_norm(int block) {
  float norm = 1.0f;
  for (; block >= 4; block /= 4) norm *= 0.5f;
  return block == 2 ? norm * as_type<float>(0x3f3504f3u) : norm;
}

// Walsh-Hadamard in place, block-diagonal over the binary decomposition of dim. Begins and ends with a barrier.
inline void rotate_row(threadgroup float* row, int dim, int thread_index, int threads) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int start = 0;
  while (dim - start > 1) {
    int block = 1;
    while (2 * block <= dim - start) block *= 2;
    for (int width = 1; width < block; width *= 2) {
      for (int pair = thread_index; pair < block / 2; pair += threads) {
        const int low = start + ((pair & ~(width - 1)) << 1) + (pair & (width - 1));
        const float a = row[low], b = row[low + width];
        row[low] = a + b;
        row[low + width] = a - b;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const float norm = rotation_norm(block);
    for (int i = thread_index; i < block; i += threads) row[start + i] *= norm;
    start += block;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// ---- append --------------------------------------------------------------------------------------------------------

// The f16 mean of a block's keys, as floats, over the rows that are finite throughout, in token order.
inline void block_mean(constant Cache& cache, device const float* exact, device const int* table,
                       device const float* chunk, int kv_head, int block, threadgroup float* mean, int lane) {
  const int dim = cache.key.dim, from = block * cache.block, to = from + cache.block;
  for (int i = lane; i < dim; i += kSimd) mean[i] = 0.0f;
  int count = 0;
  for (int first = from; first < to; first += 32) {
    const int rows = min(32, to - first);
    uint bad = 0;
    for (int r = 0; r < rows; ++r) {
      device const float* row = float_row(cache, true, exact, table, chunk, kv_head, first + r);
      for (int i = lane; i < dim; i += kSimd) bad |= isfinite(row[i]) ? 0u : 1u << r;
    }
    bad = or_all(bad);
    for (int r = 0; r < rows; ++r) {
      if (((bad >> r) & 1u) != 0u) continue;
      device const float* row = float_row(cache, true, exact, table, chunk, kv_head, first + r);
      for (int i = lane; i < dim; i += kSimd) mean[i] += row[i];
    }
    count += rows - int(popcount(bad));
  }
  for (int i = lane; i < dim; i += kSimd) mean[i] = from_half(to_half(count == 0 ? 0.0f : mean[i] / float(count)));
}

inline bool all_finite(threadgroup const float* row, int dim, int lane) {
  uint bad = 0;
  for (int i = lane; i < dim; i += kSimd) bad |= isfinite(row[i]) ? 0u : 1u;
  return or_all(bad) == 0u;
}

// The scale of channels [from, to) as stored. The first of equal extremes counts, as in the reference.
inline float group_scale(constant Side& side, threadgroup const float* row, int from, int to, int lane) {
  uint best = 0;
  int at = to;
  for (int i = from + lane; i < to; i += kSimd) {
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
  for (int i = 0; i < 4; ++i) {
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
  for (int g = 0; g < side.groups; ++g) {
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
    for (int i = lane; i < 4 * side.chunks; i += kSimd)
      words[(i / 4 * kTile + token) * 4 + i % 4] = key_word(side, row, scales, i, finite);
    return;
  }
  const int tokens = 32 / side.bits, shift = token % tokens * side.bits;
  const uint mask = side.bits == 4 ? 15u : side.bits == 8 ? 255u : 65535u;
  for (int channel = lane; channel < 4 * side.chunks; channel += kSimd) {
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
  for (int i = lane; i < side.dim; i += kSimd) size = largest(size, fabs(row[i]));
  size = largest_of_all(size);
  float scale = size == 0.0f ? 1.0f : size / 127.0f;
  if (scale == 0.0f) scale = 1.0f;  // a subnormal row may underflow
  if (lane == 0) scales[index] = finite ? scale : as_type<float>(0x7fc00000u);
  device uint* words = codes + index * args.query_chunks * 4;
  for (int word = lane; word < 4 * args.query_chunks; word += kSimd) {
    uint bytes = 0;
    for (int i = 0; i < 4; ++i) {
      const int channel = 4 * word + i;
      if (finite && channel < side.dim)
        bytes |= uint(int(clamp(rint(row[channel] / scale), -127.0f, 127.0f)) & 255) << (8 * i);
    }
    words[word] = bytes;
  }
  for (int g = 0; g < side.groups; ++g) {
    const int from = side.group_size == 0 ? 0 : g * side.group_size;
    const int to = side.group_size == 0 ? side.dim : min(side.dim, from + side.group_size);
    int sum = 0;
    for (int i = from + lane; finite && i < to; i += kSimd) sum += int(clamp(rint(row[i] / scale), -127.0f, 127.0f));
    sum = simd_sum(sum);
    if (lane == 0) sums[index * side.groups + g] = sum;
  }
}

[[max_total_threads_per_threadgroup(32)]] kernel void append(constant AppendArgs& args [[buffer(kAppendArgs)]],
                   device uchar* pages [[buffer(kAppendPages)]],
                   device float* exact [[buffer(kAppendExact)]],
                   device ushort* means [[buffer(kAppendMeans)]],
                   device float* sinks [[buffer(kAppendSinks)]],
                   device const int* table [[buffer(kAppendTable)]],
                   device const float* new_key [[buffer(kAppendKey)]],
                   device const float* new_value [[buffer(kAppendValue)]],
                   device const float* query [[buffer(kAppendQuery)]],
                   device uint* query_codes [[buffer(kAppendQueryCodes)]],
                   device float* query_scales [[buffer(kAppendQueryScales)]],
                   device int* query_sums [[buffer(kAppendQuerySums)]],
                   uint group [[threadgroup_position_in_grid]],
                   uint lane_index [[thread_index_in_simdgroup]]) {
  threadgroup float row[kMaxHeadDim];
  threadgroup float mean[kMaxHeadDim];
  threadgroup float scales[kMaxHeadDim / 32];
  constant Cache& cache = args.cache;
  const int lane = int(lane_index);
  int task = int(group);

  if (task < args.query_tasks) {
    device const float* from = query + long(task) * cache.key.pitch;
    for (int i = lane; i < cache.key.dim; i += kSimd) row[i] = from[i];
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
    for (int j = from; j < to; ++j) {
      if (key && cache.centered != 0 && block != j / cache.block) {
        block = j / cache.block;
        const long at = (long(table[cache.mean_table + block]) * cache.kv_heads + kv_head) * cache.key.dim;
        // After a rollback beyond the slack the block's first rows exist as codes only: their mean stays.
        if (block * cache.block >= min(cache.past, cache.exact_begin)) {
          block_mean(cache, exact, table, chunk, kv_head, block, mean, lane);
          if (j == max(args.encode_from, block * cache.block))  // others need it too; one of them writes it
            for (int i = lane; i < cache.key.dim; i += kSimd) means[at + i] = to_half(mean[i]);
        } else {
          for (int i = lane; i < cache.key.dim; i += kSimd) mean[i] = from_half(means[at + i]);
        }
      }
      constant Side& side = key ? cache.key : cache.value;
      device const float* floats = float_row(cache, key, exact, table, chunk, kv_head, j);
      const bool center = key && cache.centered != 0;
      for (int i = lane; i < side.dim; i += kSimd) row[i] = center ? floats[i] - mean[i] : floats[i];
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
  device float* to = sink ? sinks + sink_offset(cache, key, kv_head, j)
                          : exact + exact_offset(cache, key, table, kv_head, j);
  for (int i = lane; i < pitch; i += kSimd) to[i] = from[i];
}

// ---- attend --------------------------------------------------------------------------------------------------------

// N query rows of one kv head, and what each sees: positions [begin, end), from exact_from on (and sinks) as floats.
template <int N>
struct QueryRows {
  int row[N];  // token * heads + head
  int begin[N];
  int end[N];  // 0 for a row that is not there
  int exact_from[N];
};

template <int N>
inline void find_rows(constant AttendArgs& args, int kv_head, int tile, thread QueryRows<N>& rows) {
  constant Cache& cache = args.cache;
  const int share = args.heads / cache.kv_heads;
  EACH_ROW(q) {
    const int index = tile * N + q, token = args.first_token + min(index / share, args.tokens - 1);
    const int position = cache.past + token;
    rows.row[q] = token * args.heads + kv_head * share + index % share;
    rows.begin[q] = cache.window_left < 0 ? 0 : max(0, position - cache.window_left);
    rows.end[q] = index / share >= args.tokens ? 0 : args.causal != 0 ? position + 1 : cache.total;
    const int limit = position - cache.n_recent + 1;
    const int window = cache.exact_window == 0 ? kNever : limit <= 0 ? 0 : limit / cache.block * cache.block;
    rows.exact_from[q] = max(cache.exact_begin, window);
  }
}

// The running softmax of N rows: the maximum is the same in all lanes, the sum is this lane's share.
template <int N>
struct Softmax {
  float maximum[N];
  float sum[N];
};

// Weighted values: this lane's quads of channels, and the second ones when it has two.
template <int N>
struct Sums {
  float4 first[N];
  float4 second[N];
};

template <int N>
inline void start(thread Softmax<N>& softmax, thread Sums<N>& sums) {
  EACH_ROW(q) {
    softmax.maximum[q] = kNoScore;
    softmax.sum[q] = 0.0f;
    sums.first[q] = float4(0.0f);
    sums.second[q] = float4(0.0f);
  }
}

// Takes the maximum of a tile into account: what was summed so far shrinks.
template <int N>
inline void raise(thread Softmax<N>& softmax, thread Sums<N>& sums, int q, float maximum) {
  if (!(maximum > softmax.maximum[q])) return;
  const float shrink = exp(softmax.maximum[q] - maximum);
  softmax.maximum[q] = maximum;
  softmax.sum[q] *= shrink;
  sums.first[q] = sums.first[q] * shrink;
  if (kWide != 0) sums.second[q] = sums.second[q] * shrink;
}

// Which value channels a lane sums: lanes [0, width) have one quad each, and 32 / width parts share the tokens.
struct ValueLanes {
  int width, part, parts;
  int quad, quads;  // of the first quad; the second is 32 further
};

inline ValueLanes value_lanes(constant Side& side, int slice, int lane) {
  ValueLanes lanes;
  const int first = slice * (kWide != 0 ? 2 * kSimd : kSimd);
  lanes.width = 1;
  while (lanes.width < kSimd && lanes.width < side.chunks - first) lanes.width *= 2;
  lanes.part = lane / lanes.width;
  lanes.parts = kSimd / lanes.width;
  lanes.quad = first + lane % lanes.width;
  lanes.quads = side.chunks;
  return lanes;
}

// scale * q.k -> soft cap -> bias: in this order.
inline float finish_score(constant AttendArgs& args, device const float* bias, int row, int j, float score) {
  if (args.softcap > 0.0f) score = args.softcap * tanh(score / args.softcap);
  if (args.biased != 0) {
    const long token = row / args.heads, head = row % args.heads;
    score += bias[head * args.bias_head + token * args.bias_query + long(j) * args.bias_key];
  }
  return score;
}

// Receives the int32 dots of each group of channels, for two tokens of a lane: s_k * dot added up in f32.
template <int N>
struct ScoreGroups {
  device const uchar* page;
  device const int* query_sums;  // of the first row
  int token;
  float scores[N][2];
};

template <int N>
inline void take_group(thread ScoreGroups<N>& groups, constant Side& side, thread const QueryRows<N>& rows, int group,
                       thread int (&dots)[N][2]) {
  const float a = scale_of(side, groups.page, group, groups.token);
  const float b = scale_of(side, groups.page, group, groups.token + kSimd);
  EACH_ROW(q) {
    const int offset = side.bits == 4 ? 8 * groups.query_sums[rows.row[q] * side.groups + group] : 0;
    groups.scores[q][0] = fma(a, float(dots[q][0] - offset), groups.scores[q][0]);
    groups.scores[q][1] = fma(b, float(dots[q][1] - offset), groups.scores[q][1]);
  }
}

// For the test kernel `scores`: the dots themselves.
template <int N>
struct StoreGroups {
  device int* out;  // [rows of one kv head][total][groups]
  device const int* query_sums;
  int first, total, token;  // first row, row length, position
  int last;                 // rows there are
};

template <int N>
inline void take_group(thread StoreGroups<N>& groups, constant Side& side, thread const QueryRows<N>& rows, int group,
                       thread int (&dots)[N][2]) {
  EACH_ROW(q) {
    const int offset = side.bits == 4 ? 8 * groups.query_sums[rows.row[q] * side.groups + group] : 0;
    UNROLLED for (int u = 0; u < 2; ++u) {
      const int j = groups.token + u * kSimd;
      if (groups.first + q < groups.last && j < groups.total)
        groups.out[(long(groups.first + q) * groups.total + j) * side.groups + group] = dots[q][u] - offset;
    }
  }
}

// One 16-byte chunk of two tokens against N queries.
template <int N, int kBits>
inline void add_chunk(uint4 a, uint4 b, device const uint4* query_codes, int query_chunks,
                      thread const QueryRows<N>& rows, int chunk, thread int (&dots)[N][2]) {
  EACH_ROW(q) {
    device const uint4* query = query_codes + rows.row[q] * query_chunks;
    if (kBits == 4) {
      const uint4 x = query[2 * chunk], y = query[2 * chunk + 1];
      dots[q][0] = dot_nibbles(a.x, x.x, x.y, dots[q][0]);
      dots[q][1] = dot_nibbles(b.x, x.x, x.y, dots[q][1]);
      dots[q][0] = dot_nibbles(a.y, x.z, x.w, dots[q][0]);
      dots[q][1] = dot_nibbles(b.y, x.z, x.w, dots[q][1]);
      dots[q][0] = dot_nibbles(a.z, y.x, y.y, dots[q][0]);
      dots[q][1] = dot_nibbles(b.z, y.x, y.y, dots[q][1]);
      dots[q][0] = dot_nibbles(a.w, y.z, y.w, dots[q][0]);
      dots[q][1] = dot_nibbles(b.w, y.z, y.w, dots[q][1]);
    } else {
      const uint4 x = query[chunk];
      dots[q][0] = dot_bytes(a.x, x.x, dots[q][0]);
      dots[q][1] = dot_bytes(b.x, x.x, dots[q][1]);
      dots[q][0] = dot_bytes(a.y, x.y, dots[q][0]);
      dots[q][1] = dot_bytes(b.y, x.y, dots[q][1]);
      dots[q][0] = dot_bytes(a.z, x.z, dots[q][0]);
      dots[q][1] = dot_bytes(b.z, x.z, dots[q][1]);
      dots[q][0] = dot_bytes(a.w, x.w, dots[q][0]);
      dots[q][1] = dot_bytes(b.w, x.w, dots[q][1]);
    }
  }
}

// The integer dots of tokens lane and lane + 32 of a page with N queries, handed on group by group. Four chunks are
// asked for at once, so that their loads overlap.
template <int N, int kBits, typename Groups>
inline void key_dots(constant Side& side, device const uchar* page, device const uint4* query_codes, int query_chunks,
                     thread const QueryRows<N>& rows, int lane, thread Groups& groups) {
  device const uint4* codes = (device const uint4*)(page + side.offset) + lane;
  const int group_chunks = side.group_size == 0 ? side.chunks : side.group_size * kBits / 128;
  int dots[N][2];
  EACH_ROW(q) dots[q][0] = dots[q][1] = 0;
  int group = 0, left = group_chunks;
  for (int first = 0; first < side.chunks; first += 4) {
    uint4 a[4], b[4];
UNROLLED for (int i = 0; i < 4; ++i) {
      const int chunk = min(first + i, side.chunks - 1);
      a[i] = codes[chunk * kTile];
      b[i] = codes[chunk * kTile + kSimd];
    }
UNROLLED for (int i = 0; i < 4; ++i) {
      if (first + i < side.chunks) {
        add_chunk<N, kBits>(a[i], b[i], query_codes, query_chunks, rows, first + i, dots);
        left -= 1;
        if (left == 0 || first + i + 1 == side.chunks) {
          take_group<N>(groups, side, rows, group, dots);
          EACH_ROW(q) dots[q][0] = dots[q][1] = 0;
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
                        thread const QueryRows<N>& rows, int lane, thread float (&scores)[N][2]) {
  device const uint4* codes = (device const uint4*)(page + side.offset) + lane;
  for (int chunk = 0; chunk < side.chunks; ++chunk) {
    const uint4 a = codes[chunk * kTile], b = codes[chunk * kTile + kSimd];
    EACH_ROW(q) {
      device const float4* x = (device const float4*)(query + long(rows.row[q]) * side.pitch) + 2 * chunk;
      const float4 low = x[0], high = x[1];
      scores[q][0] = dot_halves(a.w, high.z, high.w, dot_halves(a.z, high.x, high.y,
                     dot_halves(a.y, low.z, low.w, dot_halves(a.x, low.x, low.y, scores[q][0]))));
      scores[q][1] = dot_halves(b.w, high.z, high.w, dot_halves(b.z, high.x, high.y,
                     dot_halves(b.y, low.z, low.w, dot_halves(b.x, low.x, low.y, scores[q][1]))));
    }
  }
}

// Adds q . mean of each token's block. [from, to): tokens of the tile that are seen.
template <int N>
inline void add_means(constant Cache& cache, device const ushort* means, device const int* table,
                      device const float* query, thread const QueryRows<N>& rows, int kv_head, int from, int to,
                      int token, int lane, float scale, thread float (&scores)[N][2]) {
  for (int block = from / cache.block; block <= (to - 1) / cache.block; ++block) {
    device const ushort* mean =
        means + (long(table[cache.mean_table + block]) * cache.kv_heads + kv_head) * cache.key.dim;
    float dots[N];
    EACH_ROW(q) dots[q] = 0.0f;
    for (int i = lane; i < cache.key.dim; i += kSimd) {
      const float x = from_half(mean[i]);
      EACH_ROW(q) dots[q] = fma(query[long(rows.row[q]) * cache.key.pitch + i], x, dots[q]);
    }
    const int first = block * cache.block, last = first + cache.block;
    EACH_ROW(q) {
      const float dot = scale * add_all(dots[q]);
      if (token >= first && token < last) scores[q][0] += dot;
      if (token + kSimd >= first && token + kSimd < last) scores[q][1] += dot;
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
inline float weighted_seen(float weight, float value, float sum) { return weight < 0.0f ? sum : fma(weight, value, sum); }

// Adds 16 bytes of values: the tokens that `weights` [N][stride] begins with, of four channels.
template <int N, int kBits>
inline void add_words(uint4 words, threadgroup const float* weights, int stride, thread float4 (&sums)[N]) {
  if (kBits == 4) {
    const float4 x0 = nibble_values(words.x), x1 = nibble_values(words.x >> 16);
    const float4 y0 = nibble_values(words.y), y1 = nibble_values(words.y >> 16);
    const float4 z0 = nibble_values(words.z), z1 = nibble_values(words.z >> 16);
    const float4 w0 = nibble_values(words.w), w1 = nibble_values(words.w >> 16);
    EACH_ROW(q) {
      threadgroup const float4* weight = (threadgroup const float4*)(weights + q * stride);
      const float4 a = weight[0], b = weight[1];
      sums[q].x = weighted4(b, x1, weighted4(a, x0, sums[q].x));
      sums[q].y = weighted4(b, y1, weighted4(a, y0, sums[q].y));
      sums[q].z = weighted4(b, z1, weighted4(a, z0, sums[q].z));
      sums[q].w = weighted4(b, w1, weighted4(a, w0, sums[q].w));
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

// Adds a page's values of one quad of channels under the weights [N][stride] of its 64 tokens.
template <int N, int kBits>
inline void add_values(device const uint4* codes, thread const ValueLanes& lanes, int quad,
                       threadgroup const float* weights, int stride, thread float4 (&sums)[N]) {
  const int steps = kTile * kBits / 32;
  for (int first = lanes.part; first < steps; first += 4 * lanes.parts) {
    uint4 words[4];
    UNROLLED for (int i = 0; i < 4; ++i)
      words[i] = codes[min(first + i * lanes.parts, steps - 1) * lanes.quads + quad];
    UNROLLED for (int i = 0; i < 4; ++i) {
      const int at = first + i * lanes.parts;
      if (at < steps) add_words<N, kBits>(words[i], weights + at * (32 / kBits), stride, sums);
    }
  }
}

template <int N>
inline void add_page(int bits, device const uint4* codes, thread const ValueLanes& lanes, int quad,
                     threadgroup const float* weights, int stride, thread float4 (&sums)[N]) {
  if (bits == 4)
    add_values<N, 4>(codes, lanes, quad, weights, stride, sums);
  else if (bits == 8)
    add_values<N, 8>(codes, lanes, quad, weights, stride, sums);
  else
    add_values<N, 16>(codes, lanes, quad, weights, stride, sums);
}

// The low-bit tokens of tiles first, first + step, … before last.
template <int N>
inline void attend_low(constant AttendArgs& args, device const uchar* pages, device const ushort* means,
                       device const int* table, device const float* query, device const uint4* query_codes,
                       device const float* query_scales, device const int* query_sums, device const uchar* padding,
                       device const float* bias, thread const QueryRows<N>& rows, thread const ValueLanes& lanes,
                       int kv_head, int first, int last, int step, threadgroup float* weights, int lane,
                       thread Softmax<N>& softmax, thread Sums<N>& sums) {
  constant Cache& cache = args.cache;
  for (int tile = first; tile < last; tile += step) {
    device const uchar* page = low_page(cache, pages, table, tile, kv_head);
    const int token = tile * kTile + lane;

    float scores[N][2];
    if (cache.key.bits == 16) {
      EACH_ROW(q) scores[q][0] = scores[q][1] = 0.0f;
      half_scores<N>(cache.key, page, query, rows, lane, scores);
      EACH_ROW(q) {
        scores[q][0] *= args.scale;
        scores[q][1] *= args.scale;
      }
    } else {
      ScoreGroups<N> groups;
      groups.page = page;
      groups.query_sums = query_sums;
      groups.token = lane;
      EACH_ROW(q) groups.scores[q][0] = groups.scores[q][1] = 0.0f;
      if (cache.key.bits == 4)
        key_dots<N, 4, ScoreGroups<N>>(cache.key, page, query_codes, args.query_chunks, rows, lane, groups);
      else
        key_dots<N, 8, ScoreGroups<N>>(cache.key, page, query_codes, args.query_chunks, rows, lane, groups);
      EACH_ROW(q) {
        const float query_scale = query_scales[rows.row[q]];
        scores[q][0] = args.scale * (query_scale * groups.scores[q][0]);
        scores[q][1] = args.scale * (query_scale * groups.scores[q][1]);
      }
      if (cache.centered != 0) {
        int from = kNever, to = 0;
        EACH_ROW(q) {
          from = min(from, max(rows.begin[q], cache.n_sink));
          to = max(to, min(rows.end[q], rows.exact_from[q]));
        }
        add_means<N>(cache, means, table, query, rows, kv_head, max(from, tile * kTile), min(to, (tile + 1) * kTile),
                     token, lane, args.scale, scores);
      }
    }

    // Scores become weights: in registers, -1 where a token is not seen.
    UNROLLED for (int u = 0; u < 2; ++u) {
      const int j = token + u * kSimd;
      const bool attended = j < cache.total && (args.padded == 0 || padding[j] != 0);
      EACH_ROW(q) {
        const bool seen = attended && j >= rows.begin[q] && j >= cache.n_sink && j < rows.end[q] &&
                          j < rows.exact_from[q];
        scores[q][u] = seen ? finish_score(args, bias, rows.row[q], j, scores[q][u]) : kNoScore;
      }
    }
    EACH_ROW(q) {
      raise<N>(softmax, sums, q,
               largest_of_all(largest(largest(kNoScore, scores[q][0]), scores[q][1])));
      UNROLLED for (int u = 0; u < 2; ++u) {
        const bool seen = scores[q][u] != kNoScore;
        scores[q][u] = seen ? exp(scores[q][u] - softmax.maximum[q]) : -1.0f;
        softmax.sum[q] += seen ? scores[q][u] : 0.0f;
      }
    }

    // 128 channels at a time: weight times scale for each of their groups, then the values.
    const int group_size = cache.value.group_size;
    UNROLLED for (int half_index = 0; half_index < 2; ++half_index) {
      if (half_index == 1 && kWide == 0) break;
      const int quad = lanes.quad + half_index * kSimd;
      const int channel = (quad - lanes.quad % kSimd) * 4;
      const int first_group = group_size == 0 ? 0 : channel / group_size;
      const int groups = group_size == 0 ? 1 : min(128 / group_size, cache.value.groups - first_group);
      const int stride = (group_size == 0 || cache.value.bits == 16 ? 1 : 128 / group_size) * kTile;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      UNROLLED for (int u = 0; u < 2; ++u) {
        const int t = lane + u * kSimd;
        const float place = place_of(cache.value.bits, t);
        if (cache.value.bits == 16) {
          EACH_ROW(q) weights[q * stride + t] = scores[q][u];
        } else {
          for (int g = 0; g < groups; ++g) {
            const float scale = scale_of(cache.value, page, first_group + g, t);
            EACH_ROW(q)
              weights[q * stride + g * kTile + t] = scores[q][u] < 0.0f ? 0.0f : scores[q][u] * scale * place;
          }
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (quad >= lanes.quads) continue;
      const int group = group_size == 0 || cache.value.bits == 16 ? 0 : quad * 4 / group_size - first_group;
      device const uint4* codes = (device const uint4*)(page + cache.value.offset);
      add_page<N>(cache.value.bits, codes, lanes, quad, weights + group * kTile, stride,
                  half_index == 0 ? sums.first : sums.second);
    }
  }
}

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
  for (int tile = first; tile < last; tile += step) {
    const bool sink = tile < sink_tiles;
    const int base = (sink ? tile : window + tile - sink_tiles) * kExactTile;
    // Eight lanes a token, four tokens at a time.
    float scores[N][4];
    UNROLLED for (int n = 0; n < 4; ++n) {
      const int j = base + 4 * n + lane / 8;
      const bool attended = j < cache.total && (sink == (j < cache.n_sink)) && (args.padded == 0 || padding[j] != 0);
      bool any_seen = false;
      EACH_ROW(q) {
        const bool seen = attended && j >= rows.begin[q] && j < rows.end[q] && (sink || j >= rows.exact_from[q]);
        scores[q][n] = seen ? 0.0f : kNoScore;
        any_seen = any_seen || seen;
      }
      float dots[N];
      EACH_ROW(q) dots[q] = 0.0f;
      if (any_seen) {
        device const float4* key =
            (device const float4*)seen_row(cache, true, exact, sinks, table, new_key, kv_head, j);
        for (int i = piece; i < quads; i += 8) {
          const float4 k = key[i];
          EACH_ROW(q) {
            const float4 x = ((device const float4*)(query + long(rows.row[q]) * cache.key.pitch))[i];
            dots[q] = fma(k.w, x.w, fma(k.z, x.z, fma(k.y, x.y, fma(k.x, x.x, dots[q]))));
          }
        }
      }
      EACH_ROW(q) {
        float dot = dots[q];
        for (int s = 4; s > 0; s /= 2) dot += simd_shuffle_xor(dot, ushort(s));
        if (scores[q][n] != kNoScore) scores[q][n] = finish_score(args, bias, rows.row[q], j, args.scale * dot);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    EACH_ROW(q) {
      float maximum = kNoScore;
      UNROLLED for (int n = 0; n < 4; ++n) maximum = largest(maximum, scores[q][n]);
      raise<N>(softmax, sums, q, largest_of_all(maximum));
      UNROLLED for (int n = 0; n < 4; ++n) {
        if (piece != 0) continue;
        const bool seen = scores[q][n] != kNoScore;
        const float weight = seen ? exp(scores[q][n] - softmax.maximum[q]) : -1.0f;
        weights[q * kExactTile + 4 * n + lane / 8] = weight;
        softmax.sum[q] += seen ? weight : 0.0f;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int t = lanes.part; t < kExactTile; t += lanes.parts) {
      bool any_seen = false;
      EACH_ROW(q) any_seen = any_seen || !(weights[q * kExactTile + t] < 0.0f);
      if (!any_seen) continue;
      device const float4* value =
          (device const float4*)seen_row(cache, false, exact, sinks, table, new_value, kv_head, base + t);
      UNROLLED for (int half_index = 0; half_index < 2; ++half_index) {
        const int quad = lanes.quad + half_index * kSimd;
        if ((half_index == 1 && kWide == 0) || quad >= lanes.quads) break;
        const float4 v = value[quad];
        EACH_ROW(q) {
          const float weight = weights[q * kExactTile + t];
          if (weight < 0.0f) continue;
          if (half_index == 0)
            sums.first[q] = sums.first[q] + v * weight;
          else
            sums.second[q] = sums.second[q] + v * weight;
        }
      }
    }
  }
}

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
    for (int s = 0; s < simdgroups; ++s) maximum = largest(maximum, stats[(s * N + q) * 2]);
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
    for (int c = thread_index; c < channels; c += threads) {
      float sum = 0.0f;
      for (int s = 0; s < simdgroups; ++s) sum += weights[s * share + q * width + c];
      partials[at * args.cache.value.pitch + slice * width + c] = sum;
    }
    if (thread_index != 0 || slice != 0) continue;
    float maximum = kNoScore, sum = 0.0f;
    for (int s = 0; s < simdgroups; ++s) maximum = largest(maximum, stats[(s * N + q) * 2]);
    for (int s = 0; s < simdgroups; ++s) {
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
                        device const uint4* query_codes, device const float* query_scales,
                        device const int* query_sums, device const uchar* padding, device const float* bias,
                        device float* partials, device float* split_stats, threadgroup float* weights,
                        threadgroup float* stats, uint3 group, int lane, int simdgroup, int simdgroups) {
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
      const int first = low_from / kTile, count = (low_to + kTile - 1) / kTile - first;
      attend_low<N>(args, pages, means, table, query, query_codes, query_scales, query_sums, padding, bias, rows, lanes,
                    kv_head, first + share_begin(count, split, args.low_splits) + simdgroup,
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

[[max_total_threads_per_threadgroup(128)]] kernel void attend(constant AttendArgs& args [[buffer(kAttendArgs)]],
                   device const uchar* pages [[buffer(kAttendPages)]],
                   device const float* exact [[buffer(kAttendExact)]],
                   device const ushort* means [[buffer(kAttendMeans)]],
                   device const float* sinks [[buffer(kAttendSinks)]],
                   device const int* table [[buffer(kAttendTable)]],
                   device const float* new_key [[buffer(kAttendKey)]],
                   device const float* new_value [[buffer(kAttendValue)]],
                   device const float* query [[buffer(kAttendQuery)]],
                   device const uint4* query_codes [[buffer(kAttendQueryCodes)]],
                   device const float* query_scales [[buffer(kAttendQueryScales)]],
                   device const int* query_sums [[buffer(kAttendQuerySums)]],
                   device const uchar* padding [[buffer(kAttendPadding)]],
                   device const float* bias [[buffer(kAttendBias)]],
                   device float* partials [[buffer(kAttendPartials)]],
                   device float* split_stats [[buffer(kAttendStats)]],
                   uint3 group [[threadgroup_position_in_grid]],
                   uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]],
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

// ---- merge ---------------------------------------------------------------------------------------------------------

// output = (low-bit sum, rotated back, + exact sum) / sum of weights; a query that sees nothing gives zeros.
[[max_total_threads_per_threadgroup(512)]] kernel void merge(constant MergeArgs& args [[buffer(kMergeArgs)]],
                  device const float* partials [[buffer(kMergePartials)]],
                  device const float* split_stats [[buffer(kMergeStats)]],
                  device const float* head_sink [[buffer(kMergeHeadSink)]],
                  device float* output [[buffer(kMergeOutput)]],
                  uint group [[threadgroup_position_in_grid]],
                  uint lane_index [[thread_index_in_simdgroup]],
                  uint index [[thread_index_in_threadgroup]],
                  uint thread_count [[threads_per_threadgroup]]) {
  threadgroup float factors[kMaxSplits];
  threadgroup float pieces[2 * kMergeThreads];
  threadgroup float low[kMaxHeadDim];
  threadgroup float exact[kMaxHeadDim];
  const int row = int(group), lane = int(lane_index), thread_index = int(index), threads = int(thread_count);
  const int splits = args.low_splits + args.exact_splits;

  float maximum = kNoScore;
  for (int s = lane; s < splits; s += kSimd)
    maximum = largest(maximum, split_stats[(long(s) * args.rows + row) * 2]);
  maximum = largest_of_all(maximum);
  const float sink = args.sink != 0 ? head_sink[row % args.heads] : kNoScore;
  if (sink > maximum || isnan(sink)) maximum = sink;
  float sum = 0.0f;
  for (int s = lane; s < splits; s += kSimd) {
    const long at = (long(s) * args.rows + row) * 2;
    const float part = split_stats[at + 1];
    const float factor = part == 0.0f ? 0.0f : exp(split_stats[at] - maximum);
    if (part != 0.0f) sum += part * factor;
    if (thread_index < kSimd) factors[s] = factor;
  }
  sum = add_all(sum);
  if (sink != kNoScore) sum += exp(sink - maximum);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Threads beyond the row's channels take part of the splits.
  const int width = (args.dim + kSimd - 1) / kSimd * kSimd, parts = max(1, threads / width);
  for (int c = thread_index; c < width * parts; c += threads) {
    const int channel = c % width, part = c / width;
    float low_sum = 0.0f, exact_sum = 0.0f;
    if (channel < args.dim)
      for (int s = part; s < splits; s += parts) {
        // A split that sees nothing has sums of 0.
        const float x = factors[s] * partials[(long(s) * args.rows + row) * args.pitch + channel];
        if (s < args.low_splits)
          low_sum += x;
        else
          exact_sum += x;
      }
    if (parts > 1) {
      pieces[c] = low_sum;
      pieces[kMergeThreads + c] = exact_sum;
    } else if (channel < args.dim) {
      low[channel] = low_sum;
      exact[channel] = exact_sum;
    }
  }
  if (parts > 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < args.dim) {
      float low_sum = 0.0f, exact_sum = 0.0f;
      for (int part = 0; part < parts; ++part) {
        low_sum += pieces[part * width + thread_index];
        exact_sum += pieces[kMergeThreads + part * width + thread_index];
      }
      low[thread_index] = low_sum;
      exact[thread_index] = exact_sum;
    }
  }
  if (args.rotate != 0) rotate_row(low, args.dim, thread_index, threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int c = thread_index; c < args.dim; c += threads)
    output[long(row) * args.dim + c] = sum == 0.0f ? 0.0f : (low[c] + exact[c]) / sum;
}

// ---- for tests -----------------------------------------------------------------------------------------------------

// The int32 dots that attend works with. Threadgroups of one simdgroup: x = tile, y = tile of query rows, z = kv head.
[[max_total_threads_per_threadgroup(32)]] kernel void scores(constant AttendArgs& args [[buffer(kScoresArgs)]],
                   device const uchar* pages [[buffer(kScoresPages)]],
                   device const int* table [[buffer(kScoresTable)]],
                   device const uint4* query_codes [[buffer(kScoresQueryCodes)]],
                   device const int* query_sums [[buffer(kScoresQuerySums)]],
                   device int* output [[buffer(kScoresOutput)]],
                   uint3 group [[threadgroup_position_in_grid]],
                   uint lane [[thread_index_in_simdgroup]]) {
  constant Cache& cache = args.cache;
  const int kv_head = int(group.z), tile = int(group.x), rows_of_head = args.tokens * (args.heads / cache.kv_heads);
  device const uchar* page = low_page(cache, pages, table, tile, kv_head);
  QueryRows<2> rows;
  find_rows<2>(args, kv_head, int(group.y), rows);
  StoreGroups<2> groups;
  groups.out = output + long(kv_head) * rows_of_head * cache.total * cache.key.groups;
  groups.query_sums = query_sums;
  groups.first = int(group.y) * 2;
  groups.total = cache.total;
  groups.token = tile * kTile + int(lane);
  groups.last = rows_of_head;
  if (cache.key.bits == 4)
    key_dots<2, 4, StoreGroups<2>>(cache.key, page, query_codes, args.query_chunks, rows, int(lane), groups);
  else
    key_dots<2, 8, StoreGroups<2>>(cache.key, page, query_codes, args.query_chunks, rows, int(lane), groups);
}
