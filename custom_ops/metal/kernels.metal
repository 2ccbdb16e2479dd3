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

// Loops over arrays that must live in registers; and loops that stay small, since a short step waits for its
// instructions longer than for its data.
#define UNROLLED _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
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
    ROLLED for (int width = 1; width < block; width *= 2) {
      ROLLED for (int pair = thread_index; pair < block / 2; pair += threads) {
        const int low = start + ((pair & ~(width - 1)) << 1) + (pair & (width - 1));
        const float a = row[low], b = row[low + width];
        row[low] = a + b;
        row[low + width] = a - b;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const float norm = rotation_norm(block);
    ROLLED for (int i = thread_index; i < block; i += threads) row[start + i] *= norm;
    start += block;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// ---- append --------------------------------------------------------------------------------------------------------

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
  ROLLED for (int i = lane; i < dim; i += kSimd) mean[i] = from_half(to_half(count == 0 ? 0.0f : mean[i] / float(count)));
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
    ROLLED for (int i = lane; i < 4 * side.chunks; i += kSimd)
      words[(i / 4 * kTile + token) * 4 + i % 4] = key_word(side, row, scales, i, finite);
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
    ROLLED for (int i = from + lane; finite && i < to; i += kSimd) sum += int(clamp(rint(row[i] / scale), -127.0f, 127.0f));
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
  device float* to = sink ? sinks + sink_offset(cache, key, kv_head, j)
                          : exact + exact_offset(cache, key, table, kv_head, j);
  ROLLED for (int i = lane; i < pitch; i += kSimd) to[i] = from[i];
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

// Takes every lane's score into account: where one is a new maximum, what was summed so far shrinks.
template <int N>
inline void raise(thread Softmax<N>& softmax, thread Sums<N>& sums, int q, float score) {
  if (!simd_any(score > softmax.maximum[q])) return;
  const float maximum = largest_of_all(largest(softmax.maximum[q], score));
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

// Four pieces of values of this lane, asked for at once so that their loads overlap: every parts-th from `first` on.
struct FourWords {
  uint4 words[4];
};

inline void load_words(device const uint4* codes, thread const ValueLanes& lanes, int quad, int first, int steps,
                       thread FourWords& four) {
  const int within = min(quad, lanes.quads - 1);
  UNROLLED for (int i = 0; i < 4; ++i)
    four.words[i] = codes[min(first + i * lanes.parts, steps - 1) * lanes.quads + within];
}

// Adds 32 tokens' values of one quad of channels under their weights [N][stride]; the first four pieces are there.
template <int N, int kBits>
inline void add_values(device const uint4* codes, thread const ValueLanes& lanes, int quad,
                       threadgroup const float* weights, int stride, thread FourWords& four,
                       thread float4 (&sums)[N]) {
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
                       threadgroup const float* weights, int stride, thread FourWords& four,
                       thread float4 (&sums)[N]) {
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
                       int kv_head, int low_from, int low_to, int first, int last, int step,
                       threadgroup float* weights, int lane, thread Softmax<N>& softmax, thread Sums<N>& sums) {
  constant Cache& cache = args.cache;
  const int group_size = cache.value.bits == 16 ? 0 : cache.value.group_size;
  const int slice_groups = group_size == 0 ? 1 : 128 / group_size, stride = slice_groups * kSimd;
  ROLLED for (int piece = first; piece < last; piece += step) {
    device const uchar* page = low_page(cache, pages, table, piece / 2, kv_head);
    const int token = piece % 2 * kSimd + lane, j = piece * kSimd + lane;  // in the page, and of all
    // Values and their scales are asked for before the scores are made.
    device const uint4* values = (device const uint4*)(page + cache.value.offset) +
                                 piece % 2 * cache.value.bits * lanes.quads;
    FourWords four;
    load_words(values, lanes, lanes.quad, lanes.part, cache.value.bits, four);
    const int first_group = group_size == 0 ? 0 : (lanes.quad - lanes.quad % kSimd) * 4 / group_size;
    float value_scales[kSliceGroups];
    if (cache.value.bits != 16) {
      value_scales[0] = scale_of(cache.value, page, first_group, token);
      if (group_size != 0) {
        UNROLLED for (int g = 1; g < kSliceGroups; ++g)
          value_scales[g] = scale_of(cache.value, page, min(first_group + g, cache.value.groups - 1), token);
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
          UNROLLED for (int g = 0; g < kSliceGroups; ++g)
            value_scales[g] = scale_of(cache.value, page,
                                       min(first_group + slice_groups + g, cache.value.groups - 1), token);
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
      const bool attended =
          at < cache.total && (sink == (at < cache.n_sink)) && (args.padded == 0 || padding[at] != 0);
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
        UNROLLED for (int n = 0; n < 4; ++n)
          dots[q][n] = fma(k[n].w, x.w, fma(k[n].z, x.z, fma(k[n].y, x.y, fma(k[n].x, x.x, dots[q][n]))));
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    EACH_ROW(q) {
      float maximum = kNoScore;
      UNROLLED for (int n = 0; n < 4; ++n) {
        float dot = dots[q][n];
        for (int s = 4; s > 0; s /= 2) dot += simd_shuffle_xor(dot, ushort(s));
        if (scores[q][n] != kNoScore)
          scores[q][n] = finish_score(args, bias, rows.row[q], j + 4 * n, args.scale * dot);
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
  threadgroup float4 pieces[2 * kMergeThreads];
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
  ROLLED for (int c = thread_index; c < args.dim; c += threads)
    output[at + c] = sum == 0.0f ? 0.0f : (low[c] + exact[c]) / sum;
}

// ---- for tests -----------------------------------------------------------------------------------------------------

// The int32 dots that attend works with. Threadgroups of one simdgroup: x = 32 tokens, y = two query rows, z = kv head.
[[max_total_threads_per_threadgroup(32)]] kernel void scores(
                   constant AttendArgs& args [[buffer(kScoresArgs)]],
                   device const uchar* pages [[buffer(kScoresPages)]],
                   device const int* table [[buffer(kScoresTable)]],
                   device const uint4* query_codes [[buffer(kScoresQueryCodes)]],
                   device const int* query_sums [[buffer(kScoresQuerySums)]],
                   device int* output [[buffer(kScoresOutput)]],
                   uint3 group [[threadgroup_position_in_grid]],
                   uint lane [[thread_index_in_simdgroup]]) {
  constant Cache& cache = args.cache;
  const int kv_head = int(group.z), piece = int(group.x), rows_of_head = args.tokens * (args.heads / cache.kv_heads);
  device const uchar* page = low_page(cache, pages, table, piece / 2, kv_head);
  QueryRows<2> rows;
  find_rows<2>(args, kv_head, int(group.y), rows);
  StoreGroups<2> groups;
  groups.out = output + long(kv_head) * rows_of_head * cache.total * cache.key.groups;
  groups.first = int(group.y) * 2;
  groups.last = rows_of_head;
  groups.token = piece * kSimd + int(lane);
  groups.total = cache.total;
  const int token = piece % 2 * kSimd + int(lane);
  if (cache.key.bits == 4)
    key_dots<2, 4, StoreGroups<2>>(cache.key, page, query_codes, query_sums, args.query_chunks, rows, token, groups);
  else
    key_dots<2, 8, StoreGroups<2>>(cache.key, page, query_codes, query_sums, args.query_chunks, rows, token, groups);
}
