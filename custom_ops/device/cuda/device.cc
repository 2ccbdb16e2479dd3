// The first NVIDIA GPU that the driver shows: plain device memory, one stream.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/backends.h"
#include "device/check.h"
#include "device/cuda/program.h"
#include "device/cuda/staging.h"
#include "kvfuse/error.h"

namespace kvfuse::cuda {
namespace {

class CudaBuffer : public DeviceBuffer {
 public:
  explicit CudaBuffer(int64_t bytes) : size_(bytes) {
    void* memory = nullptr;
    if (bytes != 0) Check(cudaMalloc(&memory, static_cast<size_t>(bytes)), "cudaMalloc");
    data_ = static_cast<char*>(memory);
  }
  ~CudaBuffer() override { cudaFree(data_); }  // waits for the kernels that still use it
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;
  int64_t size() const override { return size_; }
  char* at(int64_t offset) { return data_ + offset; }

 private:
  int64_t size_;
  char* data_;
};

char* At(DeviceBuffer& buffer, int64_t offset) {
  auto* own = dynamic_cast<CudaBuffer*>(&buffer);
  if (own == nullptr) Fail("[cuda] expected a buffer of this device; found one of another");
  return own->at(offset);
}

cudaStream_t NewStream() {
  cudaStream_t stream;
  Check(cudaSetDevice(0), "cudaSetDevice");
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}

class CudaDevice : public Device {
 public:
  CudaDevice() : stream_(NewStream()), staging_(stream_) {}
  const std::string& name() const override { return name_; }

  std::shared_ptr<DeviceBuffer> Allocate(int64_t bytes) override {
    CheckSize("cuda", bytes);
    Lock lock(*this);
    auto buffer = std::make_shared<CudaBuffer>(bytes);
    if (bytes != 0) Check(cudaMemsetAsync(buffer->at(0), 0, static_cast<size_t>(bytes), stream_), "cudaMemsetAsync");
    return buffer;
  }
  void Upload(DeviceBuffer& to, int64_t offset, const void* from, int64_t bytes) override {
    CheckRange("cuda", to, offset, bytes);
    Lock lock(*this);
    staging_.Upload(At(to, offset), from, bytes);
  }
  void Copy(DeviceBuffer& to, int64_t to_offset, DeviceBuffer& from, int64_t from_offset, int64_t bytes) override {
    CheckRange("cuda", to, to_offset, bytes);
    CheckRange("cuda", from, from_offset, bytes);
    Lock lock(*this);
    if (bytes == 0) return;
    Check(cudaMemcpyAsync(At(to, to_offset), At(from, from_offset), static_cast<size_t>(bytes),
                          cudaMemcpyDeviceToDevice, stream_),
          "cudaMemcpyAsync");
  }
  void Download(void* to, DeviceBuffer& from, int64_t offset, int64_t bytes) override {
    CheckRange("cuda", from, offset, bytes);
    Lock lock(*this);
    if (bytes != 0) staging_.Download(to, At(from, offset), bytes);
  }
  void Wait() override {
    Lock lock(*this);
    Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  void Launch(const Dispatch& dispatch) override {
    const Kernel& kernel = Find(dispatch);
    CheckDispatch("cuda", dispatch, kernel.arguments, kernel.max_threads, BuiltinProgram().constants);
    if (dispatch.groups[1] > 65535 || dispatch.groups[2] > 65535)
      Fail("[cuda] expected at most 65535 groups in y and z of kernel ", dispatch.kernel, "; found ",
           dispatch.groups[1], " and ", dispatch.groups[2]);
    const size_t count = dispatch.arguments.size();
    std::vector<char*> pointers(count);
    std::vector<void*> arguments(count);
    for (size_t i = 0; i < count; ++i) {
      const Dispatch::Argument& argument = dispatch.arguments[i];
      if (argument.buffer != nullptr) pointers[i] = At(*argument.buffer, argument.offset);
      arguments[i] = argument.buffer != nullptr ? &pointers[i] : const_cast<void*>(argument.bytes);
    }
    Lock lock(*this);
    if (kernel.constants.empty() && !dispatch.constants.empty()) SetConstants(dispatch);
    Check(cudaLaunchKernel(kernel.function, dim3(dispatch.groups[0], dispatch.groups[1], dispatch.groups[2]),
                           dim3(dispatch.threads), arguments.data(), 0, stream_),
          "cudaLaunchKernel");
  }

 private:
  // One queue; and CUDA keeps the chosen device for each thread of the host.
  struct Lock {
    explicit Lock(CudaDevice& device) : guard(device.mutex_) { Check(cudaSetDevice(0), "cudaSetDevice"); }
    std::lock_guard<std::mutex> guard;
  };

  // The kernel that is compiled for the dispatch's constants; else the general one, which reads them from memory.
  static const Kernel& Find(const Dispatch& dispatch) {
    for (const auto& [name, indices] : BuiltinProgram().constants_of) {
      if (name != dispatch.kernel) continue;
      for (const int index : indices)
        if (Value(dispatch, index) == nullptr)
          Fail("[cuda] expected the dispatch of kernel ", name, " to set function constant ", index, "; found none");
    }
    for (const Kernel& kernel : BuiltinProgram().kernels) {
      bool fits = kernel.name == dispatch.kernel;
      for (const auto& compiled : kernel.constants) fits = fits && *Value(dispatch, compiled.first) == compiled.second;
      if (fits) return kernel;
    }
    Fail("[cuda] expected the name of a kernel; found '", dispatch.kernel, "'");
  }

  static const int32_t* Value(const Dispatch& dispatch, int index) {
    for (const auto& given : dispatch.constants)
      if (given.first == index) return &given.second;
    return nullptr;
  }

  // Copies the function constants to where general kernels read them, unless they are there.
  void SetConstants(const Dispatch& dispatch) {
    int32_t values[kMaxConstants] = {};
    for (const auto& given : dispatch.constants) values[given.first] = given.second;
    if (std::equal(values, values + kMaxConstants, in_memory_)) return;
    Check(cudaMemcpyToSymbolAsync(BuiltinProgram().constant_memory, values, sizeof values, 0, cudaMemcpyHostToDevice,
                                  stream_),
          "cudaMemcpyToSymbolAsync");
    std::copy(values, values + kMaxConstants, in_memory_);
  }

  const std::string name_ = "cuda";
  std::mutex mutex_;
  cudaStream_t stream_;
  Staging staging_;
  int32_t in_memory_[kMaxConstants] = {};  // what SetConstants copied last; the device begins with zeros
};

}  // namespace
}  // namespace kvfuse::cuda

namespace kvfuse {

std::string cuda_backend::Reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (driver == 0) return "no NVIDIA driver";
    return "the NVIDIA driver supports CUDA " + std::to_string(driver / 1000) + "." +
           std::to_string(driver % 1000 / 10) + ", kvfuse is built with " + std::to_string(CUDART_VERSION / 1000) +
           "." + std::to_string(CUDART_VERSION % 1000 / 10);
  }
  if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0)) return "no NVIDIA GPU";
  if (status != cudaSuccess) return std::string("CUDA does not start: ") + cudaGetErrorString(status);
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  if (major < 8)
    return "the NVIDIA GPU has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
           ", 8.0 or newer is needed";
  return {};
}

std::unique_ptr<Device> cuda_backend::Make() { return std::make_unique<cuda::CudaDevice>(); }

}  // namespace kvfuse
