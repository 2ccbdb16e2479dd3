// Sentences about a session's runs that its owner may want to show; kept until the owner takes them.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "kvfuse/export.h"

namespace kvfuse {

class KVFUSE_EXPORT Warnings {
 public:
  static Warnings& Global();
  // `session` is the token in its options ("kvfuse.session"); without one nobody could take the sentence.
  void Add(const std::string& session, const std::string& sentence);
  // All that were not taken yet, oldest first. Costs next to nothing when there are none at all.
  std::vector<std::string> Take(const std::string& session);

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::map<std::string, std::vector<std::string>> sentences_;
};

}  // namespace kvfuse
