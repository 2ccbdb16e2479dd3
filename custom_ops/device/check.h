// What every back end checks before it touches a device.
#pragma once

#include <cstddef>
#include <vector>

#include "device/device.h"

namespace kvfuse {

constexpr size_t kMaxInlineArgument = 4096;  // bytes that Metal passes by value

struct ArgumentShape {
  const char* name;
  size_t bytes;    // of one element
  bool reference;  // `constant T&`: passed by value; else a pointer: a buffer
  bool writable;
};

struct ConstantShape {
  int index;
  const char* name;
  std::vector<int32_t> values;  // empty: any
};

// Throw Error with one sentence, `where` the name of the device. `max_threads`: of a group, at most 1024.
void CheckSize(const char* where, int64_t bytes);
void CheckRange(const char* where, const DeviceBuffer& buffer, int64_t offset, int64_t bytes);
void CheckDispatch(const char* where, const Dispatch& dispatch, const std::vector<ArgumentShape>& arguments,
                   uint32_t max_threads, const std::vector<ConstantShape>& constants);

}  // namespace kvfuse
