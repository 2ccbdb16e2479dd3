#include "device/emulated/device.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>

#include "device/backends.h"
#include "device/check.h"
#include "kvfuse/error.h"

namespace kvfuse::emulated {
namespace {

// Exactly as long as asked for, so that AddressSanitizer sees every byte beyond.
class HostBuffer : public DeviceBuffer {
 public:
  explicit HostBuffer(int64_t bytes) : size_(bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, static_cast<size_t>(bytes)) != 0 || (memory == nullptr && bytes != 0))
      FailMemory("[emulated] expected ", bytes, " bytes of memory; found less");
    data_ = static_cast<char*>(memory);
    std::memset(data_, 0, static_cast<size_t>(bytes));
  }
  ~HostBuffer() override { std::free(data_); }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  int64_t size() const override { return size_; }
  char* at(int64_t offset) { return data_ + offset; }

 private:
  int64_t size_;
  char* data_;
};

HostBuffer& Own(DeviceBuffer& buffer) {
  auto* own = dynamic_cast<HostBuffer*>(&buffer);
  if (own == nullptr) Fail("[emulated] expected a buffer of this device; found one of another");
  return *own;
}

class EmulatedDevice : public Device {
 public:
  explicit EmulatedDevice(const Program& program) : program_(program), schedule_(Schedule::FromEnvironment()) {}
  const std::string& name() const override { return name_; }

  std::shared_ptr<DeviceBuffer> Allocate(int64_t bytes) override {
    CheckSize("emulated", bytes);
    return std::make_shared<HostBuffer>(bytes);
  }
  void Upload(DeviceBuffer& to, int64_t offset, const void* from, int64_t bytes) override {
    CheckRange("emulated", to, offset, bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (bytes != 0) std::memcpy(Own(to).at(offset), from, static_cast<size_t>(bytes));
  }
  void Copy(DeviceBuffer& to, int64_t to_offset, DeviceBuffer& from, int64_t from_offset, int64_t bytes) override {
    CheckRange("emulated", to, to_offset, bytes);
    CheckRange("emulated", from, from_offset, bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (bytes != 0) std::memmove(Own(to).at(to_offset), Own(from).at(from_offset), static_cast<size_t>(bytes));
  }
  void Download(void* to, DeviceBuffer& from, int64_t offset, int64_t bytes) override {
    CheckRange("emulated", from, offset, bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (bytes != 0) std::memcpy(to, Own(from).at(offset), static_cast<size_t>(bytes));
  }
  void Wait() override {}

  void Launch(const Dispatch& dispatch) override {
    const Kernel& kernel = program_.Find(dispatch.kernel);
    CheckDispatch("emulated", dispatch, kernel.arguments, kernel.max_threads, program_.constants);
    Grid grid;
    grid.program = &program_;
    grid.kernel = &kernel;
    grid.constants = dispatch.constants;
    std::copy(dispatch.groups, dispatch.groups + 3, grid.groups);
    grid.threads = dispatch.threads;
    std::deque<HostBuffer> values;  // copies, of exact size, of what is passed by value
    for (const Dispatch::Argument& argument : dispatch.arguments) {
      if (argument.buffer != nullptr) {
        grid.arguments.push_back(Own(*argument.buffer).at(argument.offset));
        continue;
      }
      values.emplace_back(argument.byte_count);
      std::memcpy(values.back().at(0), argument.bytes, static_cast<size_t>(argument.byte_count));
      grid.arguments.push_back(values.back().at(0));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    Run(grid, schedule_);
  }

 private:
  const std::string name_ = "emulated";
  const Program& program_;
  const Schedule schedule_;
  std::mutex mutex_;  // one queue
};

}  // namespace

std::unique_ptr<Device> MakeDevice(const Program& program) { return std::make_unique<EmulatedDevice>(program); }

}  // namespace kvfuse::emulated

namespace kvfuse {
std::string emulated_backend::Reason() { return {}; }
std::unique_ptr<Device> emulated_backend::Make() { return emulated::MakeDevice(); }
}  // namespace kvfuse
