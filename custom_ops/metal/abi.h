// What kernels.metal and its host code agree on: layouts, argument structs, argument and function-constant indices.
// Included by both, so only what C++ and the Metal Shading Language share: enumerators, int, float.
#pragma once

namespace kvfuse_abi {

enum Sizes {
  kTile = 64,            // tokens of one low-bit page; a simdgroup takes half of one at a time
  kExactTile = 16,       // tokens of one page of exact rows
  kSimd = 32,            // threads of a simdgroup
  kMaxHeadDim = 1024,    // channels of a row that fit the threadgroup memory of `append` and `merge`
  kMaxQueries = 8,       // query rows that share each unpacked key and value
  kWeightFloats = 4096,  // of threadgroup memory in `attend`, for all its simdgroups
  kMaxSimdgroups = 4,    // of `attend`
  kMaxSplits = 512,      // parts of the tokens that `merge` brings together
  kMergeThreads = 512,   // at most
  kSliceGroups = 4       // scale groups in 128 value channels
};

enum FunctionConstants {
  kConstantVariant = 1,  // 0: one code at a time; 1: four codes a word (dot4)
  kConstantQueries = 2,  // query rows of a simdgroup: 1, 2, 4 or 8
  kConstantWide = 3      // 1: a lane has two quads of value channels instead of one
};

// One side of the low-bit store. Within a page, `offset` bytes from the beginning of a kv head:
//   key    [chunks][64 tokens][16 bytes], a chunk being 128 / bits channels of one token. 4 bits: byte b of word w has
//          channel 8w + b in its low and 8w + 4 + b in its high nibble, as code + 8. 8 bits: signed bytes. 16: halves.
//   value  [64 / tokens][quads][16 bytes], 32 / bits tokens of four channels. Word c is channel c: the tokens from its
//          lowest bits on, as code + 8 or code + 128, or halves.
//   scales [groups][64 tokens] f32 when a row has one (group_size 0), else f16; `scales` bytes from the same beginning.
struct Side {
  int dim, bits, group_size, full, rotate;
  int groups;  // 0 for 16 bits
  int chunks;  // key: 16-byte pieces of a token; value: quads of channels
  int offset;  // of the codes
  int scales;  // of the scales
  int pitch;   // floats from one exact row to the next: dim rounded up to 8
};

// Where the tokens of one layer of one sequence are; the same for every kernel of a step.
//   low-bit page   [kv heads][head_bytes]: keys, then values, as above
//   exact page     [kv heads][16 tokens][key pitch], then likewise values, f32
//   block mean     [kv heads][key dim], f16
//   sinks          [sink_rows][kv heads][key pitch], then likewise values, f32
// The number of page p is table[low_table + p]; a table's entries before the first page are not there, and its offset
// accounts for that.
struct Cache {
  Side key, value;
  int kv_heads;
  int past, total;   // tokens before this chunk, and with it
  int exact_begin;   // exact pages hold the tokens from here to past
  int head_bytes;    // of a low-bit page
  int exact_floats;  // of an exact page
  int low_table, exact_table, mean_table;
  int block, n_recent, n_sink, window_left, exact_window, centered;
  int sink_rows;  // that the buffer of sinks has room for
};

// `append`, one simdgroup a threadgroup: the tasks one after another, in this order.
struct AppendArgs {
  Cache cache;
  int query_tasks;   // rotate and quantize one query row each: [tokens][heads]
  int encode_tasks;  // [key, value][kv heads][groups of 8 tokens]
  int store_tasks;   // [key, value][kv heads][tokens from store_from to total]
  int sink_tasks;    // [key, value][kv heads][tokens from past to sink_to]
  int query_chunks;  // uint4 of one quantized query
  int encode_from, encode_to, store_from, sink_to;
};

enum AppendArgument {
  kAppendArgs,
  kAppendPages,
  kAppendExact,
  kAppendMeans,
  kAppendSinks,
  kAppendTable,
  kAppendKey,  // the chunk: [kv heads][tokens][pitch] f32
  kAppendValue,
  kAppendQuery,  // [tokens][heads][key pitch] f32
  kAppendQueryCodes,
  kAppendQueryScales,
  kAppendQuerySums
};

// `attend`, simdgroups of one threadgroup share the tokens of one split. Threadgroups: x = split, y = tile of query
// rows, z = kv head and slice of value channels. Splits from `low_splits` on are for exact tokens.
struct AttendArgs {
  Cache cache;
  int heads, tokens;  // of the query: tokens [first_token, first_token + tokens)
  int first_token;
  int low_splits, exact_splits;
  int query_chunks, slices;
  int causal;
  int padded, biased;
  int bias_head, bias_query, bias_key;  // strides of the bias in floats
  float scale, softcap;
};

enum AttendArgument {
  kAttendArgs,
  kAttendPages,
  kAttendExact,
  kAttendMeans,
  kAttendSinks,
  kAttendTable,
  kAttendKey,
  kAttendValue,
  kAttendQuery,
  kAttendQueryCodes,
  kAttendQueryScales,
  kAttendQuerySums,
  kAttendPadding,
  kAttendBias,
  kAttendPartials,  // [splits][rows][value pitch] weighted sums
  kAttendStats      // [splits][rows][2]: maximum, sum of weights
};

// `merge`, one threadgroup a query row.
struct MergeArgs {
  int dim, pitch, rows, heads;
  int low_splits, exact_splits;
  int rotate;                     // the sums of low-bit values are rotated back
  int sink;                       // head_sink is given
  int output_head, output_token;  // strides of the output in floats
};

enum MergeArgument { kMergeArgs, kMergePartials, kMergeStats, kMergeHeadSink, kMergeOutput };

// `scores`, for tests: the int32 dots of attend, [rows of one kv head][tokens][groups].
enum ScoresArgument { kScoresArgs, kScoresPages, kScoresTable, kScoresQueryCodes, kScoresQuerySums, kScoresOutput };

}  // namespace kvfuse_abi
