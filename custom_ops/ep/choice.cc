#include "choice.h"

#include <string>
#include <vector>

#include "device/device.h"
#include "device/layer_cache.h"
#include "kvfuse/error.h"

namespace kvfuse {
namespace {

constexpr const char* kWhere = "[KvfuseExecutionProvider]";
constexpr const char* kEmulated = "emulated";

// The first GPU that is usable here. The emulator is for tests: it is never taken unasked.
std::string FirstUsable(const std::vector<DeviceChoice>& choices) {
  std::string reasons;
  for (const DeviceChoice& choice : choices) {
    if (choice.name == kEmulated) continue;
    if (choice.reason.empty()) return choice.name;
    reasons += (reasons.empty() ? "" : "; ") + choice.name + ": " + choice.reason;
  }
  Fail(kWhere, " expected a GPU that is usable here; found none (", reasons, "; the option device '", kEmulated,
       "' runs the same kernels on the CPU, slowly)");
}

void CheckName(const std::vector<DeviceChoice>& choices, const std::string& device) {
  std::string names;
  for (const DeviceChoice& choice : choices) {
    if (choice.name == device && choice.reason.empty()) return;
    if (choice.name == device)
      Fail(kWhere, " expected a device that is usable here; found ", device, ": ", choice.reason);
    names += (names.empty() ? "'" : ", '") + choice.name + "'";
  }
  Fail(kWhere, " expected device to be one of ", names, "; found '", device, "'");
}

}  // namespace

CacheDevice& ChooseDevice(const std::string& device, const std::string& variant, bool emulate) {
  if (!variant.empty() && variant != "scalar" && variant != "simd")
    Fail(kWhere, " expected variant to be 'scalar' or 'simd'; found '", variant, "'");
  const std::vector<DeviceChoice> choices = DeviceChoices();
  const std::string name = !device.empty() ? device : emulate ? kEmulated : FirstUsable(choices);
  CheckName(choices, name);
  DeviceOptions options;
  options.simd = variant != "scalar";
  return DeviceCaches(GetDevice(name), options);
}

}  // namespace kvfuse
