#include "kvfuse/warnings.h"

#include <utility>

namespace kvfuse {

Warnings& Warnings::Global() {
  static Warnings warnings;
  return warnings;
}

void Warnings::Add(const std::string& session, const std::string& sentence) {
  if (session.empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  sentences_[session].push_back(sentence);
  any_ = true;
}

std::vector<std::string> Warnings::Take(const std::string& session) {
  if (!any_) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sentences_.find(session);
  if (found == sentences_.end()) return {};
  std::vector<std::string> taken = std::move(found->second);
  sentences_.erase(found);
  any_ = !sentences_.empty();
  return taken;
}

}  // namespace kvfuse
