#include "device_caches.h"

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kvfuse/error.h"

namespace kvfuse {
namespace {

constexpr const char* kWhere = "[KvfuseExecutionProvider]";

}  // namespace

CacheDevice& DeviceCaches(const std::string& device, const std::string& variant, bool emulate) {
  (void)emulate;
  if (!variant.empty() && variant != "scalar" && variant != "simd")
    Fail(kWhere, " expected a variant of 'scalar' or 'simd'; found '", variant, "'");
  if (!device.empty() && device != "emulated")
    Fail(kWhere, " expected device to be 'emulated'; found '", device, "'");
  return CpuDevice();
}

}  // namespace kvfuse
