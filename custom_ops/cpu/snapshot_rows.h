// Rows of a LayerSnapshot: how many there are, in and out of their canonical bytes, and back to floats.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "kvfuse/half.h"
#include "kvfuse/kernels.h"
#include "kvfuse/layer_cache.h"
#include "reference.h"

namespace kvfuse {

struct SnapshotSizes {
  int64_t heads, encoded, exact, sinks, blocks;
  explicit SnapshotSizes(const LayerSnapshot& s)
      : heads(s.format.kv_num_heads),
        encoded(s.encoded_end - s.begin),
        exact(s.length - s.exact_begin),
        sinks(std::min(s.format.n_sink, s.length)),
        blocks((s.encoded_end + s.format.block - 1) / s.format.block - s.begin / s.format.block) {}
};

// Row `index` of a snapshot's side: codes, then scales in the precision that the format keeps.
inline std::vector<uint8_t> CanonicalRow(const SideFormat& side, const std::vector<uint8_t>& codes,
                                         const std::vector<float>& scales, int64_t index) {
  std::vector<uint8_t> row(side.row_bytes());
  std::memcpy(row.data(), codes.data() + index * side.code_bytes(), side.code_bytes());
  for (int g = 0; g < side.groups(); ++g) {
    const float scale = scales[index * side.groups() + g];
    const uint16_t half = FloatToHalf(scale);
    if (side.group_size == 0)
      std::memcpy(row.data() + side.code_bytes() + 4 * g, &scale, 4);
    else
      std::memcpy(row.data() + side.code_bytes() + 2 * g, &half, 2);
  }
  return row;
}

// The inverse of quantizing: codes times scales, rotated back, the block's mean (null: none) added.
inline void DecodeRow(const SideFormat& side, const uint8_t* row, const uint16_t* mean, float* out) {
  if (!side.scaled()) {
    for (int i = 0; i < side.dim; ++i) {
      uint16_t half;
      std::memcpy(&half, row + 2 * i, sizeof half);
      out[i] = HalfToFloat(half);
    }
    return;
  }
  std::vector<int8_t> codes(side.dim);
  reference::UnpackCodes(side, row, codes.data());
  for (int i = 0; i < side.dim; ++i)
    out[i] = reference::ScaleOf(side, row + side.code_bytes(), i / side.group_width()) * static_cast<float>(codes[i]);
  if (side.rotated()) Kernels().rotate(out, side.dim);
  if (mean != nullptr)
    for (int i = 0; i < side.dim; ++i) out[i] += HalfToFloat(mean[i]);
}

}  // namespace kvfuse
