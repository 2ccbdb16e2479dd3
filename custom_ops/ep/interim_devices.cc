#include "../device/device.h"
namespace kvfuse {
std::vector<DeviceChoice> DeviceChoices() { return {{"metal", "not built"}, {"cuda", "not built"}, {"emulated", ""}}; }
}  // namespace kvfuse
