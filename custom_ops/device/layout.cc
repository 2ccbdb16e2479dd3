#include "device/layout.h"

#include <algorithm>
#include <cstring>

#include "kvfuse/error.h"
#include "kvfuse/layer_span.h"

namespace kvfuse {
namespace {

constexpr int kChunkBytes = 16;

kvfuse_abi::Side MakeSide(const SideFormat& format, bool key, int offset) {
  kvfuse_abi::Side side{};
  side.dim = format.dim;
  side.bits = format.bits;
  side.group_size = format.group_size;
  side.full = format.full && format.bits == 4;
  side.rotate = format.rotated();
  side.groups = format.groups();
  side.chunks = static_cast<int>(CeilDiv(format.dim, key ? 128 / format.bits : 4));
  side.offset = offset;
  const int steps = key ? side.chunks * kPageTokens : side.chunks * kPageTokens * format.bits / 32;
  side.scales = offset + steps * kChunkBytes;
  side.pitch = static_cast<int>(CeilDiv(format.dim, 8) * 8);
  return side;
}

int ScaleBytes(const SideFormat& side) { return kPageTokens * side.groups() * (side.group_size == 0 ? 4 : 2); }

// Where a channel's code lies: the byte, and the shift within it.
struct Place {
  int64_t byte;
  int shift;
};

Place PlaceOf(const kvfuse_abi::Side& side, bool key, int token, int channel) {
  if (key) {
    const int channels = 128 / side.bits, within = channel % channels;
    const int64_t chunk = side.offset + (int64_t{channel / channels} * kPageTokens + token) * kChunkBytes;
    if (side.bits == 4) return {chunk + within / 8 * 4 + within % 4, within % 8 / 4 * 4};
    return {chunk + within * side.bits / 8, 0};
  }
  const int tokens = 32 / side.bits;
  const int64_t word = side.offset + (int64_t{token / tokens} * side.chunks * 4 + channel) * 4;
  return {word + token % tokens * side.bits / 8, side.bits == 4 ? token % 2 * 4 : 0};
}

}  // namespace

DeviceLayout::DeviceLayout(const CacheFormat& format) {
  for (const SideFormat* side : {&format.key, &format.value})
    if (side->dim > kvfuse_abi::kMaxHeadDim)
      Fail("[device] expected head sizes up to ", static_cast<int>(kvfuse_abi::kMaxHeadDim), "; found ", side->dim);
  key = MakeSide(format.key, true, 0);
  value = MakeSide(format.value, false, static_cast<int>(CeilDiv(key.scales + ScaleBytes(format.key), 16) * 16));
  head_bytes = static_cast<int>(CeilDiv(value.scales + ScaleBytes(format.value), 16) * 16);
  exact_floats = format.kv_num_heads * kExactPageTokens * (key.pitch + value.pitch);
  query_chunks = format.key.bits == 4 ? 2 * key.chunks : format.key.bits == 8 ? key.chunks : 0;
  page_bytes = int64_t{format.kv_num_heads} * head_bytes;
  mean_bytes = int64_t{format.kv_num_heads} * format.key.dim * 2;
}

void DeviceLayout::LoadRow(const SideFormat& format, bool is_key, const uint8_t* head, int token, uint8_t* row) const {
  const kvfuse_abi::Side& side = is_key ? key : value;
  std::memset(row, 0, format.code_bytes());
  for (int i = 0; i < side.dim; ++i) {
    const Place place = PlaceOf(side, is_key, token, i);
    const uint8_t* at = head + place.byte;
    if (side.bits == 16)
      std::memcpy(row + 2 * i, at, 2);
    else if (side.bits == 8)
      row[i] = static_cast<uint8_t>(is_key ? *at : *at - 128);
    else
      row[i / 2] |= static_cast<uint8_t>((((*at >> place.shift) & 15) ^ 8) << (i % 2 * 4));
  }
  const int size = format.group_size == 0 ? 4 : 2;
  for (int g = 0; g < format.groups(); ++g)
    std::memcpy(row + format.code_bytes() + g * size, head + side.scales + (g * kPageTokens + token) * size, size);
}

void DeviceLayout::StoreRow(const SideFormat& format, bool is_key, uint8_t* head, int token, const uint8_t* row) const {
  const kvfuse_abi::Side& side = is_key ? key : value;
  const int padded = side.chunks * (is_key ? 128 / side.bits : 4);
  for (int i = 0; i < padded; ++i) {
    const Place place = PlaceOf(side, is_key, token, i);
    uint8_t* at = head + place.byte;
    const bool there = i < side.dim;
    if (side.bits == 16) {
      if (there)
        std::memcpy(at, row + 2 * i, 2);
      else
        std::memset(at, 0, 2);
    } else if (side.bits == 8) {
      const int code = there ? row[i] : 0;
      *at = static_cast<uint8_t>(is_key ? code : code + 128);
    } else {
      const int code = there ? (row[i / 2] >> (i % 2 * 4)) & 15 : 0;
      *at = static_cast<uint8_t>((*at & ~(15 << place.shift)) | ((code ^ 8) << place.shift));
    }
  }
  const int size = format.group_size == 0 ? 4 : 2;
  for (int g = 0; g < format.groups(); ++g)
    std::memcpy(head + side.scales + (g * kPageTokens + token) * size, row + format.code_bytes() + g * size, size);
}

int64_t DeviceLayout::ExactRow(int kv_heads, bool is_key, int head, int64_t position) const {
  const int64_t row = int64_t{head} * kExactPageTokens + position % kExactPageTokens;
  return is_key ? row * key.pitch : int64_t{kv_heads} * kExactPageTokens * key.pitch + row * value.pitch;
}

int64_t DeviceLayout::SinkRow(int kv_heads, int64_t capacity, bool is_key, int head, int64_t position) const {
  const int64_t row = position * kv_heads + head;
  return is_key ? row * key.pitch : capacity * kv_heads * key.pitch + row * value.pitch;
}

}  // namespace kvfuse
