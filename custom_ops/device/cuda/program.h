// The kernels as nvcc compiled them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "device/check.h"

namespace kvfuse::cuda {

constexpr int kMaxConstants = 32;  // indices of function constants are below

// One kernel, compiled for certain values of the function constants that it reads; for none: it reads them from memory.
struct Kernel {
  std::string name;
  const void* function;
  std::vector<ArgumentShape> arguments;
  uint32_t max_threads;                            // of a threadgroup
  std::vector<std::pair<int, int32_t>> constants;  // index, value
};

struct Program {
  std::vector<ConstantShape> constants;
  std::vector<Kernel> kernels;                                         // of one name: the general one last
  std::vector<std::pair<std::string, std::vector<int>>> constants_of;  // kernel: indices of what it reads
  const void* constant_memory;                                         // int[kMaxConstants] on the device
};

const Program& BuiltinProgram();

}  // namespace kvfuse::cuda
