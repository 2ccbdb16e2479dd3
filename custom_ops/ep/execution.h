// What one session's execution provider gives the kernels that run on it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kvfuse/layer_cache.h"
#include "kvfuse/sequence.h"

namespace kvfuse {

constexpr const char* kProviderName = "KvfuseExecutionProvider";

// One device in one variant of its kernels, chosen when a session is made; and the session's own sequences.
class Execution {
 public:
  // Empty words take the default. Throws Error when a word is unknown or the device is not usable here.
  Execution(const std::string& device, const std::string& variant, bool emulate);

  CacheDevice& caches() const { return caches_; }

  // Counts `sequence` to the session's own.
  void Own(const std::shared_ptr<Sequence>& sequence);
  // Drops the tokens of the session's own sequences from `length` on, a number as text. Throws Error, and changes
  // nothing, when it is no number or lies beyond the longest sequence.
  void Rewind(const std::string& length);

 private:
  CacheDevice& caches_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Sequence>> own_;
};

// The executions of the sessions under way, by the address of the session's logger: the one thing that onnxruntime
// shows to a provider and to the kernels of every provider of the same session.
void Publish(const void* session_logger, const std::shared_ptr<Execution>& execution);
// Null when that session has no provider of ours.
std::shared_ptr<Execution> FindExecution(const void* session_logger);

}  // namespace kvfuse
