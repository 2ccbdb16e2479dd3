// Sentences about a run that a caller may want to show; the newest few are kept until somebody takes them.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "kvfuse/export.h"

namespace kvfuse {

class KVFUSE_EXPORT Warnings {
 public:
  static Warnings& Global();
  void Add(const std::string& sentence);
  // All that were not taken yet, oldest first. Costs next to nothing when there are none.
  std::vector<std::string> Take();

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::vector<std::string> sentences_;
};

}  // namespace kvfuse
