// The page layout of the SIMD kernels: 64 tokens a tile, made so that integer dots need no horizontal sums.
//
//   key, 4 bits   16 tokens x 8 channels to a 64-byte line: byte 4t + c has channel c in the low and channel 4 + c in
//                 the high nibble, as code + 8 (unsigned, for u8 x s8 dot instructions)
//   key, 8 bits   16 tokens x 4 channels to a line: byte 4t + c is channel c, as code + 128
//   value, 4 bits token after token, 32 channels to 16 bytes: byte i has channel i low and channel 16 + i high, + 8
//   scales        [groups][64 tokens], behind the codes
//
// A side whose head size does not fit keeps the reference's layout, row after row.
#pragma once

#include "kvfuse/kernels.h"

namespace kvfuse::tiles {

inline bool KeyFits(const SideFormat& side) {
  return (side.bits == 4 && side.dim % 8 == 0) || (side.bits == 8 && side.dim % 4 == 0);
}
inline bool ValueFits(const SideFormat& side) { return side.bits == 4 && side.dim % 32 == 0; }

// Lines of 16 tokens; `channels` 8 or 4 to a line.
inline int64_t KeyLine(const SideFormat& side, int token, int channel) {
  const int channels = side.bits == 4 ? 8 : 4;
  return (int64_t{token / 16} * (side.dim / channels) + channel / channels) * 64;
}

inline int64_t ScaleOffset(const SideFormat& side, int group, int token) {
  const int size = side.group_size == 0 ? 4 : 2;
  return int64_t{kPageTokens} * side.code_bytes() + (int64_t{group} * kPageTokens + token) * size;
}

void StoreRow(const SideFormat& side, bool key, uint8_t* side_bytes, int token, const uint8_t* row);
void LoadRow(const SideFormat& side, bool key, const uint8_t* side_bytes, int token, uint8_t* row);

}  // namespace kvfuse::tiles
