// Scenarios for the Metal back end, and what they are made of. Those of host_any.cc run over any Metal, a Mac's as
// well; those of host_fake.cc steer the fake one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "device/metal/metal_device.h"
#include "host_abi.h"
#include "kvfuse/error.h"

#define EXPECT(condition)                                                                      \
  do {                                                                                         \
    if (!(condition)) Fail("line ", __LINE__, ": expected ", #condition, "; found otherwise"); \
  } while (false)

namespace kvfuse {

using Scenario = std::pair<const char*, void (*)()>;
std::vector<Scenario> AnyScenarios();
std::vector<Scenario> FakeScenarios();
std::vector<Scenario> AbortScenarios();  // what the fake must not let pass

// The text of host.metal.
const std::string& HostKernelSource();

using Ints = std::vector<int32_t>;

inline std::unique_ptr<Device> Make() { return MakeMetalDevice(HostKernelSource()); }

inline Ints Range(int count, int first = 0) {
  Ints values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), first);
  return values;
}

inline int64_t Bytes(const Ints& values) { return static_cast<int64_t>(values.size() * sizeof(int32_t)); }

inline std::shared_ptr<DeviceBuffer> BufferOf(Device& device, const Ints& values) {
  auto buffer = device.Allocate(Bytes(values));
  device.Upload(*buffer, 0, values.data(), Bytes(values));
  return buffer;
}

inline Ints Read(Device& device, DeviceBuffer& buffer, int64_t offset = 0) {
  Ints values(static_cast<size_t>((buffer.size() - offset) / 4));
  device.Download(values.data(), buffer, offset, Bytes(values));
  return values;
}

inline Dispatch::Argument Value(const void* bytes, size_t size) {
  return {nullptr, 0, bytes, static_cast<int64_t>(size)};
}

// data[i] = data[i] * factor + bias
inline void Scale(Device& device, DeviceBuffer& data, int count, int factor, int bias, int64_t offset = 0) {
  ScaleParams params{count, bias};
  Dispatch dispatch{"scale", {{CONSTANT_FACTOR, factor}}, {{&data, offset}, Value(&params, sizeof params)}};
  dispatch.groups[0] = static_cast<uint32_t>(count + 31) / 32;
  device.Launch(dispatch);
}

// to[i] = from[i] + 1
inline void Follow(Device& device, DeviceBuffer& from, DeviceBuffer& to, int count) {
  Dispatch dispatch{"follow", {}, {{&from}, {&to}, Value(&count, sizeof count)}};
  dispatch.groups[0] = static_cast<uint32_t>(count + 63) / 64;
  dispatch.threads = 64;
  device.Launch(dispatch);
}

// Runs `action`, which has to throw ErrorType with all of `words`.
template <typename ErrorType = Error>
void ExpectError(const std::vector<std::string>& words, const std::function<void()>& action) {
  try {
    action();
  } catch (const ErrorType& error) {
    for (const std::string& word : words) {
      if (std::string(error.what()).find(word) == std::string::npos) {
        Fail("expected an error that says '", word, "'; found: ", error.what());
      }
    }
    return;
  }
  Fail("expected an error that says '", words[0], "'; found none");
}

}  // namespace kvfuse
