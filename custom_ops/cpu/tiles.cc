#include "tiles.h"

#include <cstring>
#include <vector>

#include "reference.h"

namespace kvfuse::tiles {
namespace {

// Where the code of one channel lies: its byte, and the shift of its nibble (8-bit sides: 0).
struct Place {
  int64_t byte;
  int shift;
};

Place PlaceOf(const SideFormat& side, bool key, int token, int channel) {
  if (key) {
    const int within = channel % KeyChannels(side);
    return {KeyLine(side, token, channel) + token % 16 * 4 + within % 4, within / 4 * 4};
  }
  const ValueChunk chunk = ValueChunkAt(side, channel);
  const int within = channel - chunk.begin;
  return {chunk.offset + int64_t{token / 4} * 4 * chunk.lanes + within % chunk.lanes * 4 + token % 4,
          within / chunk.lanes * 4};
}

}  // namespace

void StoreCodes(const SideFormat& side, bool key, uint8_t* side_bytes, int token, const uint8_t* codes,
                const float* scales) {
  if (key) {
    uint8_t* at = side_bytes + KeyLine(side, token, 0) + token % 16 * 4;
    for (int c = 0; c < side.dim; c += KeyChannels(side), at += KeyLine(side, 0, KeyChannels(side))) {
      uint32_t word, high = 0;
      std::memcpy(&word, codes + c, sizeof word);
      if (side.bits == 4) std::memcpy(&high, codes + c + 4, sizeof high);
      word |= high << 4;
      std::memcpy(at, &word, sizeof word);
    }
  } else {
    for (int c = 0; c < side.dim;) {
      const ValueChunk chunk = ValueChunkAt(side, c);
      uint8_t* at = side_bytes + chunk.offset + int64_t{token / 4} * 4 * chunk.lanes + token % 4;
      const uint8_t *low = codes + c, *high = low + chunk.lanes;
      for (int i = 0; i < chunk.lanes; ++i)
        at[4 * i] = side.bits == 4 ? static_cast<uint8_t>(low[i] | high[i] << 4) : low[i];
      c += chunk.width;
    }
  }
  for (int g = 0; g < side.groups(); ++g) {
    uint8_t* at = side_bytes + ScaleOffset(side, g, token);
    const uint16_t half = side.group_size == 0 ? 0 : FloatToHalf(scales[g]);
    if (side.group_size == 0)
      std::memcpy(at, scales + g, 4);
    else
      std::memcpy(at, &half, 2);
  }
}

void StoreRow(const SideFormat& side, bool key, uint8_t* side_bytes, int token, const uint8_t* row) {
  if (!Fits(side)) return reference::StoreRow(side, key, side_bytes, token, row);
  std::vector<int8_t> codes(side.dim);
  std::vector<uint8_t> offset(side.dim);
  std::vector<float> scales(side.groups());
  reference::UnpackCodes(side, row, codes.data());
  for (int i = 0; i < side.dim; ++i) offset[i] = static_cast<uint8_t>(codes[i] + (side.bits == 4 ? 8 : 128));
  for (int g = 0; g < side.groups(); ++g) scales[g] = reference::ScaleOf(side, row + side.code_bytes(), g);
  StoreCodes(side, key, side_bytes, token, offset.data(), scales.data());
}

void LoadRow(const SideFormat& side, bool key, const uint8_t* side_bytes, int token, uint8_t* row) {
  if (!Fits(side)) return reference::LoadRow(side, key, side_bytes, token, row);
  std::memset(row, 0, side.code_bytes());
  for (int i = 0; i < side.dim; ++i) {
    const Place place = PlaceOf(side, key, token, i);
    const int stored = side_bytes[place.byte];
    if (side.bits == 8)
      row[i] = static_cast<uint8_t>(stored - 128);
    else
      row[i / 2] |= static_cast<uint8_t>(((((stored >> place.shift) & 15) - 8) & 15) << (i % 2 * 4));
  }
  const int size = side.group_size == 0 ? 4 : 2;
  for (int g = 0; g < side.groups(); ++g)
    std::memcpy(row + side.code_bytes() + g * size, side_bytes + ScaleOffset(side, g, token), size);
}

}  // namespace kvfuse::tiles
