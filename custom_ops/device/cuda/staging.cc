#include "device/cuda/staging.h"

#include <algorithm>
#include <cstring>

#include "kvfuse/error.h"

namespace kvfuse::cuda {

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // this one is over with the call
    FailMemory("[cuda] expected memory for ", what, "; found too little");
  }
  Fail("[cuda] expected ", what, " to succeed; found ", cudaGetErrorName(status), ", ", cudaGetErrorString(status));
}

Staging::Staging(cudaStream_t stream) : stream_(stream) {
  void* memory = nullptr;
  Check(cudaMallocHost(&memory, 2 * kHalf), "cudaMallocHost");
  memory_ = static_cast<char*>(memory);
  for (cudaEvent_t& event : left_) Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
}

Staging::~Staging() {
  for (cudaEvent_t event : left_) cudaEventDestroy(event);
  cudaFreeHost(memory_);
}

void Staging::Upload(char* to, const void* from, int64_t bytes) {
  const char* source = static_cast<const char*>(from);
  while (bytes > 0) {
    if (used_ == kHalf) {
      Check(cudaEventRecord(left_[half_], stream_), "cudaEventRecord");
      half_ ^= 1;
      used_ = 0;
      Check(cudaEventSynchronize(left_[half_]), "cudaEventSynchronize");  // at once, if never recorded
    }
    const int64_t part = std::min(bytes, kHalf - used_);
    char* place = memory_ + half_ * kHalf + used_;
    std::memcpy(place, source, static_cast<size_t>(part));
    Check(cudaMemcpyAsync(to, place, static_cast<size_t>(part), cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
    used_ = std::min(kHalf, (used_ + part + 63) / 64 * 64);
    to += part, source += part, bytes -= part;
  }
}

void Staging::Download(void* to, const char* from, int64_t bytes) {
  if (bytes > kHalf) {
    Check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
    Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return;
  }
  if (bytes > kHalf - used_) Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"), used_ = 0;
  char* place = memory_ + half_ * kHalf + used_;
  Check(cudaMemcpyAsync(place, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
  Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  std::memcpy(to, place, static_cast<size_t>(bytes));
  used_ = 0;  // nothing is on its way any more
}

}  // namespace kvfuse::cuda
