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

// cuda: kVariant 0 1, kQueries 4, kWide 0, blocks 4
// cuda: kVariant 0, kQueries 2, kWide 0
// cuda: kVariant 1, kQueries 1 2 8, kWide 0
// cuda: kVariant 1, kQueries 1 2 4 8, kWide 1
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

#include "numbers.h"
#include "places.h"
#include "append.h"
#include "softmax.h"
#include "attend_low.h"
#include "attend_exact.h"
#include "attend.h"
#include "merge.h"

// ---- for tests

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
