// Rotating and quantizing rows with an Isa's Rotate, Finite, Extreme and Codes: bit for bit what the reference gives.
#pragma once

#include <cstring>
#include <limits>

#include "reference.h"
#include "tile_attend.h"
#include "tiles.h"
#include "workspace.h"

namespace kvfuse::tiles {

// Scales (NaN throughout for a row that is not finite) and codes, the latter with `offset` added.
template <typename Isa>
void Quantize(const SideFormat& side, const float* row, int offset, uint8_t* codes, float* scales) {
  const bool finite = Isa::Finite(row, side.dim);
  const int high = side.bits == 8 ? 127 : 7, low = side.bits == 4 && side.full ? -8 : -high;
  if (!finite) std::memset(codes, offset, side.dim);
  for (int g = 0; g < side.groups(); ++g) {
    const int first = g * side.group_width(), count = std::min(side.dim, first + side.group_width()) - first;
    scales[g] = std::numeric_limits<float>::quiet_NaN();
    if (!finite) continue;
    scales[g] = reference::ScaleFrom(side, Isa::Extreme(row + first, count));
    Isa::Codes(row + first, count, scales[g], low, high, offset, codes + first);
  }
}

template <typename Isa>
void EncodeRow(const SideFormat& side, bool key, float* row, uint8_t* side_bytes, int token) {
  if (!Fits(side)) return reference::EncodeRow(side, key, row, side_bytes, token);
  Workspace::Scope scope;
  uint8_t* codes = Workspace::OfThread().Take<uint8_t>(side.dim);
  float* scales = Workspace::OfThread().Take<float>(side.groups());
  if (side.rotated()) Isa::Rotate(row, side.dim);
  Quantize<Isa>(side, row, side.bits == 4 ? 8 : 128, codes, scales);
  StoreCodes(side, key, side_bytes, token, codes, scales);
}

template <typename Isa>
void QuantizeRow(const SideFormat& side, const float* row, uint8_t* codes, uint8_t* scales) {
  if (!side.scaled()) return reference::QuantizeRow(side, row, codes, scales);
  Workspace::Scope scope;
  uint8_t* bytes = Workspace::OfThread().Take<uint8_t>(side.dim);
  float* values = Workspace::OfThread().Take<float>(side.groups());
  Quantize<Isa>(side, row, 0, bytes, values);
  std::memset(codes, 0, side.code_bytes());
  for (int i = 0; i < side.dim; ++i) {
    if (side.bits == 8)
      codes[i] = bytes[i];
    else
      codes[i / 2] |= static_cast<uint8_t>((bytes[i] & 15) << (i % 2 * 4));
  }
  for (int g = 0; g < side.groups(); ++g) reference::StoreScale(side, values[g], g, scales);
}

template <typename Isa>
KernelTable Table(const char* name) {
  const auto attend = [](const AttendArgs& args) { TileAttention<Isa>(args).Run(); };
  return {name, Isa::Rotate, QuantizeRow<Isa>, StoreRow, LoadRow, EncodeRow<Isa>, attend, true};
}

}  // namespace kvfuse::tiles
