#include "kvfuse/warnings.h"

#include <utility>

namespace kvfuse {
namespace {

constexpr size_t kMost = 256;  // a process that takes none must not grow

}  // namespace

Warnings& Warnings::Global() {
  static Warnings warnings;
  return warnings;
}

void Warnings::Add(const std::string& sentence) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (sentences_.size() == kMost) sentences_.erase(sentences_.begin());
  sentences_.push_back(sentence);
  any_ = true;
}

std::vector<std::string> Warnings::Take() {
  if (!any_) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  any_ = false;
  return std::exchange(sentences_, {});
}

}  // namespace kvfuse
