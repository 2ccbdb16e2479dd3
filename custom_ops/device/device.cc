#include "device/device.h"

#include <iterator>
#include <memory>
#include <mutex>

#include "device/backends.h"
#include "kvfuse/error.h"

namespace kvfuse {
namespace {

struct Backend {
  const char* name;
  std::string (*reason)();  // empty: usable
  std::unique_ptr<Device> (*make)();
};

constexpr Backend kBackends[] = {
    {"metal", &metal_backend::Reason, &metal_backend::Make},
    {"cuda", &cuda_backend::Reason, &cuda_backend::Make},
    {"emulated", &emulated_backend::Reason, &emulated_backend::Make},
};

}  // namespace

std::vector<DeviceChoice> DeviceChoices() {
  std::vector<DeviceChoice> choices;
  for (const Backend& backend : kBackends) choices.push_back({backend.name, backend.reason()});
  return choices;
}

Device& GetDevice(const std::string& name) {
  static std::mutex mutex;
  static Device* made[std::size(kBackends)];  // never destroyed: a driver may be gone before this library
  std::lock_guard<std::mutex> lock(mutex);
  std::string known;
  for (size_t i = 0; i < std::size(kBackends); ++i) {
    const Backend& backend = kBackends[i];
    known += (known.empty() ? "" : ", ") + std::string(backend.name);
    if (name != backend.name) continue;
    if (made[i] == nullptr) {
      const std::string reason = backend.reason();
      if (!reason.empty()) Fail("[device] expected a device '", name, "' that is usable here; found: ", reason);
      made[i] = backend.make().release();
    }
    return *made[i];
  }
  Fail("[device] expected one of the devices ", known, "; found '", name, "'");
}

}  // namespace kvfuse
