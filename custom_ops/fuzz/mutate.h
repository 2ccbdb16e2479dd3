// Mutations that get past a container's checksum and lengths, to the checks behind them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "safetensors.h"

namespace fuzz {

// A mutation of `input` of at most `most` bytes: raw bytes, the header's text, the tensors' bytes, or the fields of
// the layers with tensors of the sizes that they then claim. Most are given a right header length and checksum.
std::string Mutate(std::string_view input, size_t most, unsigned seed);

// The input being used, so that the harness knows its layers.
inline std::string& Current() {
  static std::string bytes;
  return bytes;
}
inline std::string_view View(const std::string& bytes) { return bytes; }

}  // namespace fuzz
