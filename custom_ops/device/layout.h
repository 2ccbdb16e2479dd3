// How a layer's cache lies in device memory: metal/abi.h's layouts for one format, and single rows in and out of them.
#pragma once

#include <cstdint>

#include "kvfuse/format.h"
#include "metal/abi.h"

namespace kvfuse {

static_assert(kvfuse_abi::kTile == kPageTokens && kvfuse_abi::kExactTile == kExactPageTokens);

struct DeviceLayout {
  kvfuse_abi::Side key{}, value{};
  int head_bytes = 0;      // of one kv head in a low-bit page
  int exact_floats = 0;    // of an exact page
  int query_chunks = 0;    // 16-byte pieces of a quantized query
  int64_t page_bytes = 0;  // of a low-bit page
  int64_t mean_bytes = 0;  // of a block's means

  // Throws Error for a head size that the kernels do not take.
  explicit DeviceLayout(const CacheFormat& format);

  // A canonical row (codes, then scales) from the bytes of one kv head of a page, and into them.
  void LoadRow(const SideFormat& side, bool key, const uint8_t* head, int token, uint8_t* row) const;
  void StoreRow(const SideFormat& side, bool key, uint8_t* head, int token, const uint8_t* row) const;

  // Floats from the beginning of an exact page, and of sinks with room for `capacity` tokens.
  int64_t ExactRow(int kv_heads, bool is_key, int head, int64_t position) const;
  int64_t SinkRow(int kv_heads, int64_t capacity, bool is_key, int head, int64_t position) const;
};

}  // namespace kvfuse
