// The functions that one instruction set or device provides. Numerics, written once:
//   * rounding is to nearest, ties to even; codes and int32 scores are identical on every path;
//   * no contraction of a*b+c, f32 accumulators, key order 0, 1, 2, … in the softmax of the reference;
//   * a rotated row with a non-finite element has codes 0 and NaN scales: it poisons the queries that see it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvfuse/export.h"
#include "kvfuse/format.h"
#include "kvfuse/layer_cache.h"

namespace kvfuse {

// What attention reads of one layer of one sequence while a chunk is being added.
struct CacheView {
  const CacheFormat* format = nullptr;
  const uint8_t* const* pages = nullptr;            // from page_begin on
  const float* const* exact_key_pages = nullptr;    // [kv_num_heads][kExactPageTokens][key dim] each
  const float* const* exact_value_pages = nullptr;  // [kv_num_heads][kExactPageTokens][value dim] each
  const float* sink_key = nullptr;                  // [tokens][kv_num_heads][key dim]
  const float* sink_value = nullptr;                // [tokens][kv_num_heads][value dim]
  const uint16_t* const* block_means = nullptr;     // [kv_num_heads][key dim] halves each, from mean_begin on
  int64_t page_begin = 0, mean_begin = 0;           // numbers of the first page and the first mean
  int64_t exact_page_begin = 0;                     // number of the first exact page
  int64_t exact_begin = 0;                          // exact rows are held from here on
  int64_t encoded_end = 0;                          // low-bit rows are held up to here
  int64_t past = 0, total = 0;                      // tokens before this chunk, and with it
  Rows key, value;                                  // the chunk: positions past .. total - 1, token index 0 first
};

// A part of a step: all query heads of one kv head, query tokens [query_begin, query_end), keys [key_begin, key_end).
struct AttendArgs {
  StepArgs step;
  CacheView cache;
  int kv_head = 0;
  int64_t query_begin = 0, query_end = 0;
  int64_t key_begin = 0, key_end = INT64_MAX;  // multiples of 256, or beyond all keys
  float* partials = nullptr;  // where the softmax over those keys goes, query by query; null: into the output
};

struct KernelTable {
  const char* name;
  // Block-diagonal normalized Walsh-Hadamard transform of one row, in place.
  void (*rotate)(float* row, int dim);
  // Quantizes one row (already centred and rotated where the format says so) to codes and scales.
  void (*quantize_row)(const SideFormat& side, const float* row, uint8_t* codes, uint8_t* scales);
  // Puts a row (codes, then scales, as quantize_row gives them) into the page bytes of its side, and takes it out.
  void (*store_row)(const SideFormat& side, bool key, uint8_t* side_bytes, int token, const uint8_t* row);
  void (*load_row)(const SideFormat& side, bool key, const uint8_t* side_bytes, int token, uint8_t* row);
  // Rotates, quantizes and stores one row at once; `row` is overwritten.
  void (*encode_row)(const SideFormat& side, bool key, float* row, uint8_t* side_bytes, int token);
  // Scores, softmax and weighted sum for one kv head, a range of queries and a range of keys.
  void (*attend)(const AttendArgs& args);
  bool splits;  // whether `attend` takes less than all keys
};

struct KernelChoice {
  std::string name;
  std::string reason;  // empty: usable here; else why not
};

// The table in use: the best that this machine runs, or the one that KVFUSE_KERNEL names.
// Throws Error when KVFUSE_KERNEL names none.
KVFUSE_EXPORT const KernelTable& Kernels();
KVFUSE_EXPORT std::vector<KernelChoice> KernelChoices();
// The table of that name; null when there is none or this machine cannot run it.
KVFUSE_EXPORT const KernelTable* FindKernel(const std::string& name);

// Whether softmax weights multiply low-bit values in f32 rather than as 16-bit integers: KVFUSE_WEIGHTS=exact, or as
// set here. Slower; see tile_attend.h for what the integers cost in accuracy.
KVFUSE_EXPORT bool ExactWeights();
KVFUSE_EXPORT void SetExactWeights(bool exact);

namespace reference {
void Rotate(float* row, int dim);
void QuantizeRow(const SideFormat& side, const float* row, uint8_t* codes, uint8_t* scales);
void StoreRow(const SideFormat& side, bool key, uint8_t* side_bytes, int token, const uint8_t* row);
void LoadRow(const SideFormat& side, bool key, const uint8_t* side_bytes, int token, uint8_t* row);
void EncodeRow(const SideFormat& side, bool key, float* row, uint8_t* side_bytes, int token);
void Attend(const AttendArgs& args);
}  // namespace reference

}  // namespace kvfuse
