// Where the time of a step goes: KVFUSE_PROFILE=1 counts the ticks of each stage, over all threads. Off, a stage costs
// one predicted branch.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "kvfuse/export.h"

namespace kvfuse::profile {

// `call`: the whole of the op's Compute, on the thread that onnxruntime calls; it contains all others.
enum Stage {
  kCall,
  kPrepare,
  kEncode,
  kQuery,
  kScores,
  kExactKeys,
  kSoftmax,
  kSplit,
  kValues,
  kExactValues,
  kMerge,
  kStages
};

extern const bool kEnabled;
extern std::array<std::atomic<uint64_t>, kStages> ticks, counts;

inline uint64_t Now() {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return std::chrono::steady_clock::now().time_since_epoch().count();
#endif
}

// Counts from here to the end of the scope as one stage.
class Timed {
 public:
  explicit Timed(Stage stage) : stage_(stage), start_(kEnabled ? Now() : 0) {}
  ~Timed() {
    if (!kEnabled) return;
    ticks[stage_].fetch_add(Now() - start_, std::memory_order_relaxed);
    counts[stage_].fetch_add(1, std::memory_order_relaxed);
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  const Stage stage_;
  const uint64_t start_;
};

struct StageTime {
  std::string name;
  double seconds;
  int64_t count;
};
// What has been counted since the process started or Reset; empty when off.
KVFUSE_EXPORT std::vector<StageTime> Report();
KVFUSE_EXPORT void Reset();

}  // namespace kvfuse::profile
