// The specification, first half: rotate, then quantize. Scalar code; everything faster must give these bits.
#include <limits>

#include "reference.h"

namespace kvfuse::reference {
namespace {

// The largest power of two that fits: 80 -> 64, then 16.
int HadamardBlock(int dim) {
  int block = 1;
  while (block * 2 <= dim) block *= 2;
  return block;
}

// The element of largest size, the first of equals.
float Extreme(const float* x, int count) {
  float extreme = 0.0f;
  for (int i = 0; i < count; ++i)
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  return extreme;
}

}  // namespace

// Normalized fast Walsh-Hadamard transform, natural order, stages 1, 2, 4, …, one multiplication at the end;
// block-diagonal over the binary decomposition of dim. (QuaRot, arXiv:2404.00456, uses it for the KV cache.)
void Rotate(float* row, int dim) {
  while (dim > 1) {
    const int block = HadamardBlock(dim);
    for (int half = 1; half < block; half *= 2)
      for (int start = 0; start < block; start += 2 * half)
        for (int i = start; i < start + half; ++i) {
          const float a = row[i], b = row[i + half];
          row[i] = a + b;
          row[i + half] = a - b;
        }
    const float norm = 1.0f / std::sqrt(static_cast<float>(block));
    for (int i = 0; i < block; ++i) row[i] *= norm;
    row += block;
    dim -= block;
  }
}

void QuantizeRow(const SideFormat& side, const float* row, uint8_t* codes, uint8_t* scales) {
  if (!side.scaled()) {
    for (int i = 0; i < side.dim; ++i) {
      const uint16_t half = FloatToHalfSaturated(row[i]);
      std::memcpy(codes + 2 * i, &half, sizeof half);
    }
    return;
  }
  std::memset(codes, 0, side.code_bytes());
  const bool finite = AllFinite(row, side.dim);
  const float high = side.bits == 8 ? 127.0f : 7.0f;
  const float low = side.bits == 4 && side.full ? -8.0f : -high;
  for (int g = 0; g < side.groups(); ++g) {
    const int first = g * side.group_width(), last = std::min(side.dim, first + side.group_width());
    const float scale =
        finite ? ScaleFrom(side, Extreme(row + first, last - first)) : std::numeric_limits<float>::quiet_NaN();
    StoreScale(side, scale, g, scales);
    for (int i = first; finite && i < last; ++i) {
      const int code = Code(row[i], scale, low, high);
      if (side.bits == 8)
        codes[i] = static_cast<uint8_t>(code);
      else
        codes[i / 2] |= static_cast<uint8_t>((code & 15) << (i % 2 * 4));
    }
  }
}

// Row after row, as they come.
void StoreRow(const SideFormat& side, bool, uint8_t* side_bytes, int token, const uint8_t* row) {
  std::memcpy(side_bytes + int64_t{token} * side.row_bytes(), row, side.row_bytes());
}

void LoadRow(const SideFormat& side, bool, const uint8_t* side_bytes, int token, uint8_t* row) {
  std::memcpy(row, side_bytes + int64_t{token} * side.row_bytes(), side.row_bytes());
}

void EncodeRow(const SideFormat& side, bool key, float* row, uint8_t* side_bytes, int token) {
  std::vector<uint8_t> stored(side.row_bytes());
  if (side.rotated()) Rotate(row, side.dim);
  QuantizeRow(side, row, stored.data(), stored.data() + side.code_bytes());
  StoreRow(side, key, side_bytes, token, stored.data());
}

}  // namespace kvfuse::reference
