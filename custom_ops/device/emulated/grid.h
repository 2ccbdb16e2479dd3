// Runs a grid of threadgroups on the host: what a translated Metal program is, and how it is started.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "device/check.h"
#include "device/shim/vectors.h"

namespace kvfuse::emulated {

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxThreads = 1024;      // of a threadgroup
constexpr size_t kMaxSharedBytes = 32768;   // threadgroup memory
constexpr size_t kMaxSharedVariables = 32;  // a limit of the emulator only

// Where one GPU thread is.
class Position {
 public:
  Position(metal::uint3 groups, metal::uint3 group, uint32_t threads, uint32_t thread)
      : groups_(groups), group_(group), threads_(threads), thread_(thread) {}
  metal::uint3 group() const { return group_; }
  metal::uint3 groups() const { return groups_; }
  metal::uint3 threads() const { return {threads_, 1u, 1u}; }
  metal::uint3 thread_in_group() const { return {thread_, 0u, 0u}; }
  metal::uint3 thread_in_grid() const { return {group_.x * threads_ + thread_, group_.y, group_.z}; }
  metal::uint3 grid_threads() const { return {groups_.x * threads_, groups_.y, groups_.z}; }
  metal::uint3 thread() const { return thread_; }
  metal::uint3 lane() const { return thread_ % kSimdWidth; }
  metal::uint3 simdgroup() const { return thread_ / kSimdWidth; }
  metal::uint3 simdgroups() const { return threads_ / kSimdWidth; }
  metal::uint3 simd_width() const { return kSimdWidth; }

 private:
  metal::uint3 groups_, group_;
  uint32_t threads_, thread_;
};

struct Kernel {
  std::string name;
  void (*run)(void* const* arguments, const Position& at);
  std::vector<ArgumentShape> arguments;
  uint32_t max_threads;  // of a threadgroup
};

struct Program {
  std::vector<Kernel> kernels;
  std::vector<ConstantShape> constants;
  // Throws Error when there is none of that name.
  const Kernel& Find(const std::string& name) const;
};

// The order in which threads and groups run. A program without races gives the same result in every one.
struct Schedule {
  enum Order { kForward, kReverse, kSkewed, kRandom };
  Order order = kForward;
  uint64_t seed = 0;
  // "forward", "reverse", "skewed" (a simdgroup runs as far as it can) or "random:SEED". Throws Error for another.
  static Schedule FromText(const std::string& text);
  // Of KVFUSE_EMULATED_SCHEDULE; forward when it is not set.
  static Schedule FromEnvironment();
};

struct Grid {
  const Program* program = nullptr;
  const Kernel* kernel = nullptr;
  std::vector<std::pair<int, int32_t>> constants;
  std::vector<void*> arguments;  // one pointer for each argument of the kernel
  uint32_t groups[3] = {1, 1, 1};
  uint32_t threads = kSimdWidth;
};

// Runs all threads to their end. Throws Error for what a GPU would hang on or leave undefined: barriers and simd
// operations in divergent code, values from lanes that take no part, too much threadgroup memory, constants not set.
void Run(const Grid& grid, const Schedule& schedule);

}  // namespace kvfuse::emulated
