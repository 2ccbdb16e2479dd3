// The kernels as CUDA compiled them: once for each combination of function constants.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "device/check.h"

namespace kvfuse::cuda {

struct Kernel {
  std::string name;
  const void* function;
  std::vector<ArgumentShape> arguments;
  uint32_t max_threads;  // of a threadgroup
};

struct Combination {
  std::vector<std::pair<int, int32_t>> constants;  // index, value
  std::vector<Kernel> kernels;
};

struct Program {
  std::vector<std::pair<int, std::string>> constants;  // index, name
  std::vector<Combination> combinations;
};

const Program& BuiltinProgram();

}  // namespace kvfuse::cuda
