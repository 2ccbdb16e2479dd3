// Pinned memory of the host through which small copies reach the device without waiting for it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kvfuse::cuda {

// Throws Error (MemoryError when memory ran out) unless `status` is success; `what` is the call.
void Check(cudaError_t status, const char* what);

// Two halves: while the device still reads one, the other is filled.
class Staging {
 public:
  explicit Staging(cudaStream_t stream);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Queues a copy of any size; `from` may change once this is back.
  void Upload(char* to, const void* from, int64_t bytes);
  // Waits for all that was queued before, then for the copy.
  void Download(void* to, const char* from, int64_t bytes);

 private:
  static constexpr int64_t kHalf = 1 << 20;
  cudaStream_t stream_;
  char* memory_ = nullptr;
  cudaEvent_t left_[2] = {};  // recorded when a half is full and all its copies are queued
  int half_ = 0;
  int64_t used_ = 0;
};

}  // namespace kvfuse::cuda
