// A softmax over some of the keys of one query, and how several become one (flash-decoding, arXiv:2311.01282 and
// Milakov and Gimelshein, arXiv:1805.02867): output = sum exp(s - maximum) v / sum exp(s - maximum).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace kvfuse {

struct Partial {
  float *maximum, *sum;
  float *rotated, *exact;  // [dim] weighted values in the two bases, side by side
  int64_t floats;          // of both, with what pads them

  void Clear() {
    *maximum = -std::numeric_limits<float>::infinity();
    *sum = 0.0f;
    std::fill(rotated, rotated + floats, 0.0f);
  }
  void Scale(float factor) const {
    *sum *= factor;
    for (int64_t i = 0; i < floats; ++i) rotated[i] *= factor;
  }
  // Makes `score` the maximum when it is larger; what was summed so far shrinks.
  void Raise(float score) const {
    if (!(score > *maximum)) return;
    if (*sum != 0.0f) Scale(std::exp(*maximum - score));
    *maximum = score;
  }
  void Add(const Partial& other) {
    if (*other.sum == 0.0f) return;
    Raise(*other.maximum);
    const float factor = std::exp(*other.maximum - *maximum);
    *sum += factor * *other.sum;
    for (int64_t i = 0; i < floats; ++i) rotated[i] += factor * other.rotated[i];
  }
};

// A partial in memory: 16 floats with maximum and sum, then the two sums, each in whole lines.
inline int64_t PaddedDim(int dim) { return (int64_t{dim} + 15) / 16 * 16; }
inline int64_t PartialFloats(int dim) { return 16 + 2 * PaddedDim(dim); }
inline Partial PartialAt(float* at, int dim) {
  return {at, at + 1, at + 16, at + 16 + PaddedDim(dim), 2 * PaddedDim(dim)};
}

}  // namespace kvfuse
