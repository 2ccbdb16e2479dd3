#include "execution.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <unordered_map>

#include "choice.h"
#include "kvfuse/error.h"

namespace kvfuse {
namespace {

std::mutex g_mutex;
std::unordered_map<const void*, std::weak_ptr<Execution>>& Executions() {
  static auto* executions = new std::unordered_map<const void*, std::weak_ptr<Execution>>;
  return *executions;
}

int64_t ParseLength(const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const int64_t length = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || length < 0)
    Fail("[kvcache_rewind] expected a number of tokens, 0 or more; found '", text, "'");
  return length;
}

}  // namespace

Execution::Execution(const std::string& device, const std::string& variant, bool emulate)
    : caches_(ChooseDevice(device, variant, emulate)) {}

void Execution::Own(const std::shared_ptr<Sequence>& sequence) {
  std::lock_guard<std::mutex> lock(mutex_);
  own_.erase(std::remove_if(own_.begin(), own_.end(), [](const auto& held) { return held.expired(); }), own_.end());
  for (const std::weak_ptr<Sequence>& held : own_)
    if (held.lock() == sequence) return;
  own_.push_back(sequence);
}

void Execution::Rewind(const std::string& text) {
  const int64_t length = ParseLength(text);
  std::vector<std::shared_ptr<Sequence>> sequences;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const std::weak_ptr<Sequence>& held : own_)
      if (auto sequence = held.lock()) sequences.push_back(std::move(sequence));
  }
  int64_t longest = 0;
  for (const auto& sequence : sequences) longest = std::max(longest, sequence->Length());
  if (length > longest)
    Fail("[kvcache_rewind] expected a length from 0 to ", longest, ", as the session's own sequences have; found ",
         length);
  for (const auto& sequence : sequences)
    if (sequence->Length() > length) sequence->CheckTruncate(length);
  for (const auto& sequence : sequences)
    if (sequence->Length() > length) sequence->Truncate(length);
}

void Publish(const void* session_logger, const std::shared_ptr<Execution>& execution) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto& executions = Executions();
  for (auto it = executions.begin(); it != executions.end();)
    it = it->second.expired() ? executions.erase(it) : std::next(it);
  executions[session_logger] = execution;
}

std::shared_ptr<Execution> FindExecution(const void* session_logger) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = Executions().find(session_logger);
  return found == Executions().end() ? nullptr : found->second.lock();
}

}  // namespace kvfuse
