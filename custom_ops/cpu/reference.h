// Small pieces that both halves of the scalar reference use.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kvfuse/half.h"
#include "kvfuse/kernels.h"

namespace kvfuse::reference {

inline bool AllFinite(const float* row, int dim) {
  return std::all_of(row, row + dim, [](float x) { return std::isfinite(x); });
}

// code = clamp(rint(x / scale), low, high)
inline int Code(float x, float scale, float low, float high) {
  return static_cast<int>(std::clamp(std::nearbyintf(x / scale), low, high));
}

// The scale of one group, as stored: from max |x|, or for full 4-bit codes from the extreme with its sign.
inline float ScaleFrom(const SideFormat& side, float extreme) {
  float scale = side.bits == 8 ? std::fabs(extreme) / 127.0f : side.full ? extreme / -8.0f : std::fabs(extreme) / 7.0f;
  if (side.group_size != 0) scale = HalfToFloat(FloatToHalfSaturated(scale));
  return scale == 0.0f ? 1.0f : scale;
}

inline void StoreScale(const SideFormat& side, float scale, int group, uint8_t* scales) {
  if (side.group_size == 0) {
    std::memcpy(scales + 4 * group, &scale, sizeof scale);
  } else {
    const uint16_t half = FloatToHalf(scale);
    std::memcpy(scales + 2 * group, &half, sizeof half);
  }
}

// Bytes, or two's complement nibbles with the even channel low.
inline void UnpackCodes(const SideFormat& side, const uint8_t* row, int8_t* codes) {
  if (side.bits == 8) {
    std::memcpy(codes, row, side.dim);
    return;
  }
  for (int i = 0; i + 1 < side.dim; i += 2) {
    codes[i] = static_cast<int8_t>(static_cast<int8_t>(row[i / 2] << 4) >> 4);
    codes[i + 1] = static_cast<int8_t>(static_cast<int8_t>(row[i / 2]) >> 4);
  }
  if (side.dim % 2 == 1) codes[side.dim - 1] = static_cast<int8_t>(static_cast<int8_t>(row[side.dim / 2] << 4) >> 4);
}

// The stored scale of one group.
inline float ScaleOf(const SideFormat& side, const uint8_t* scales, int group) {
  if (side.group_size == 0) {
    float scale;
    std::memcpy(&scale, scales, sizeof scale);
    return scale;
  }
  uint16_t half;
  std::memcpy(&half, scales + 2 * group, sizeof half);
  return HalfToFloat(half);
}

}  // namespace kvfuse::reference
