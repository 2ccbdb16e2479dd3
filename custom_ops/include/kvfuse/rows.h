#pragma once

#include <cstddef>
#include <cstdint>

namespace kvfuse {

// f32 rows [heads][tokens][dim] of one batch row, any order of heads and tokens in memory.
struct Rows {
  const float* data = nullptr;
  ptrdiff_t head_stride = 0, token_stride = 0;
  const float* at(int64_t head, int64_t token) const { return data + head * head_stride + token * token_stride; }
};

}  // namespace kvfuse
