#include "profile.h"

#include <cstdlib>
#include <cstring>

namespace kvfuse::profile {
namespace {

constexpr const char* kNames[kStages] = {"call",
                                         "prepare",
                                         "encode",
                                         "query",
                                         "scores (low-bit)",
                                         "scores (exact)",
                                         "softmax",
                                         "weights to integers",
                                         "values (low-bit)",
                                         "values (exact)",
                                         "merge and output"};

bool Wanted() {
  const char* text = std::getenv("KVFUSE_PROFILE");
  return text != nullptr && *text != '\0' && std::strcmp(text, "0") != 0;
}

// Ticks per second, by the clock's own pace since the library was loaded.
const uint64_t first_ticks = Now();
const std::chrono::steady_clock::time_point first_time = std::chrono::steady_clock::now();

}  // namespace

const bool kEnabled = Wanted();
std::array<std::atomic<uint64_t>, kStages> ticks, counts;

std::vector<StageTime> Report() {
  std::vector<StageTime> report;
  if (!kEnabled) return report;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - first_time).count();
  const double rate = static_cast<double>(Now() - first_ticks) / seconds;
  for (int stage = 0; stage < kStages; ++stage)
    report.push_back(
        {kNames[stage], static_cast<double>(ticks[stage].load()) / rate, static_cast<int64_t>(counts[stage].load())});
  return report;
}

void Reset() {
  for (int stage = 0; stage < kStages; ++stage) ticks[stage] = counts[stage] = 0;
}

}  // namespace kvfuse::profile
