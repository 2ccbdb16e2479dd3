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
    const int channels = side.bits == 4 ? 8 : 4, within = channel % channels;
    return {KeyLine(side, token, channel) + token % 16 * 4 + within % 4, within / 4 * 4};
  }
  return {int64_t{token} * side.code_bytes() + channel / 32 * 16 + channel % 16, channel % 32 / 16 * 4};
}

}  // namespace

void StoreRow(const SideFormat& side, bool key, uint8_t* side_bytes, int token, const uint8_t* row) {
  if (!(key ? KeyFits(side) : ValueFits(side))) return reference::StoreRow(side, key, side_bytes, token, row);
  std::vector<int8_t> codes(side.dim);
  reference::UnpackCodes(side, row, codes.data());
  for (int i = 0; i < side.dim; ++i) {
    const Place place = PlaceOf(side, key, token, i);
    uint8_t& byte = side_bytes[place.byte];
    if (side.bits == 8)
      byte = static_cast<uint8_t>(codes[i] + 128);
    else
      byte = static_cast<uint8_t>((byte & ~(15 << place.shift)) | ((codes[i] + 8) << place.shift));
  }
  const int size = side.group_size == 0 ? 4 : 2;
  for (int g = 0; g < side.groups(); ++g)
    std::memcpy(side_bytes + ScaleOffset(side, g, token), row + side.code_bytes() + g * size, size);
}

void LoadRow(const SideFormat& side, bool key, const uint8_t* side_bytes, int token, uint8_t* row) {
  if (!(key ? KeyFits(side) : ValueFits(side))) return reference::LoadRow(side, key, side_bytes, token, row);
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
