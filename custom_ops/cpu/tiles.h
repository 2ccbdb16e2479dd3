// The page layout of the SIMD kernels: 64 tokens a tile, made so that integer dots need no horizontal sums.
//
//   key, 4 bits    16 tokens x 8 channels to a 64-byte line: byte 4t + c has channel c in the low and channel 4 + c in
//                  the high nibble, as code + 8 (unsigned, for u8 x s8 dot instructions)
//   key, 8 bits    16 tokens x 4 channels to a line: byte 4t + c is channel c, as code + 128
//                  (lines of the same channels side by side: four lines are the tile's 64 tokens)
//   value, 4 bits  4 tokens x 32 channels to a line: byte 4c + t has channel c in the low and channel 16 + c in the
//                  high nibble, + 8; sixteen lines are the tile's 64 tokens. A head size that is no multiple of 32 ends
//                  in lines half and a quarter as wide (16, then 8 channels)
//   value, 8 bits  4 tokens x 16 channels to a line, + 128; then 8, then 4 channels
//   16 bits        row after row
//   scales         [groups][64 tokens], behind the codes
//
// A side whose head size does not fit keeps the reference's layout, row after row. One token's row is written in
// whole bytes: nothing that was stored before is read or rewritten.
#pragma once

#include "kvfuse/kernels.h"

namespace kvfuse::tiles {

// Multiples of 8 channels (4 bits) or 4 (8 bits).
inline bool Fits(const SideFormat& side) {
  return (side.bits == 4 && side.dim % 8 == 0) || (side.bits == 8 && side.dim % 4 == 0);
}

// Key lines: byte offset of the line with `channel` of the 16 tokens from `token` on.
inline int KeyChannels(const SideFormat& side) { return side.bits == 4 ? 8 : 4; }
inline int64_t KeyLine(const SideFormat& side, int token, int channel) {
  return (int64_t{channel / KeyChannels(side)} * (kPageTokens / 16) + token / 16) * 64;
}

// Value lines: the channels [begin, begin + width) that lie in lines of 4 * lanes bytes.
struct ValueChunk {
  int begin, width, lanes;
  int64_t offset;  // of the first of its 16 lines
};
inline ValueChunk ValueChunkAt(const SideFormat& side, int channel) {
  int begin = 0, width = side.bits == 4 ? 32 : 16;
  while (width > side.dim - begin || begin + width <= channel) {
    if (width > side.dim - begin)
      width /= 2;
    else
      begin += width;
  }
  return {begin, width, side.bits == 4 ? width / 2 : width, int64_t{kPageTokens} * begin * side.bits / 8};
}

inline int64_t ScaleOffset(const SideFormat& side, int group, int token) {
  const int size = side.group_size == 0 ? 4 : 2;
  return int64_t{kPageTokens} * side.code_bytes() + (int64_t{group} * kPageTokens + token) * size;
}

// Puts the codes of one row, [dim] with the offset added, and its scales where they belong.
void StoreCodes(const SideFormat& side, bool key, uint8_t* side_bytes, int token, const uint8_t* codes,
                const float* scales);
void StoreRow(const SideFormat& side, bool key, uint8_t* side_bytes, int token, const uint8_t* row);
void LoadRow(const SideFormat& side, bool key, const uint8_t* side_bytes, int token, uint8_t* row);

}  // namespace kvfuse::tiles
