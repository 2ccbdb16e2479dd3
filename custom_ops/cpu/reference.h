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

// Two's complement nibbles, even channel low.
inline int Nibble(const uint8_t* codes, int channel) {
  const int nibble = (codes[channel / 2] >> (channel % 2 * 4)) & 15;
  return nibble - ((nibble & 8) << 1);
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
