// What runs the kernels of kernels.metal: buffers, named kernels, dispatches in order. Back ends: metal, emulated,
// cuda.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvfuse/export.h"

namespace kvfuse {

class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual int64_t size() const = 0;
};

// One kernel launch. Argument i of the kernel, [[buffer(i)]], is arguments[i]: for `constant T&` the bytes of a T, at
// most 4096; for a pointer a buffer from an offset on, a multiple of 4.
struct Dispatch {
  struct Argument {
    DeviceBuffer* buffer = nullptr;  // null: `bytes` are passed by value
    int64_t offset = 0;
    const void* bytes = nullptr;
    int64_t byte_count = 0;
  };
  std::string kernel;
  std::vector<std::pair<int, int32_t>> constants;  // function constants: index, value
  std::vector<Argument> arguments;
  uint32_t groups[3] = {1, 1, 1};
  uint32_t threads = 32;  // per threadgroup, a multiple of 32, at most 1024
};

// One device with one in-order queue. Calls may come from any thread. Errors are kvfuse::Error with one sentence.
class Device {
 public:
  virtual ~Device() = default;
  virtual const std::string& name() const = 0;

  // Zero-filled. Throws MemoryError when the device is out of memory.
  virtual std::shared_ptr<DeviceBuffer> Allocate(int64_t bytes) = 0;
  // Upload and Copy take their place in the queue; the source of an Upload may change once the call is back.
  virtual void Upload(DeviceBuffer& to, int64_t offset, const void* from, int64_t bytes) = 0;
  virtual void Copy(DeviceBuffer& to, int64_t to_offset, DeviceBuffer& from, int64_t from_offset, int64_t bytes) = 0;
  virtual void Launch(const Dispatch& dispatch) = 0;
  // Waits for all that was queued before, then copies to the host.
  virtual void Download(void* to, DeviceBuffer& from, int64_t offset, int64_t bytes) = 0;
  virtual void Wait() = 0;
};

struct DeviceChoice {
  std::string name;
  std::string reason;  // empty: usable here; else one sentence why not
};

// All back ends that this library knows, built or not.
KVFUSE_EXPORT std::vector<DeviceChoice> DeviceChoices();
// Made on first use and kept. Throws Error with the reason when `name` is unknown or not usable here.
KVFUSE_EXPORT Device& GetDevice(const std::string& name);

}  // namespace kvfuse
