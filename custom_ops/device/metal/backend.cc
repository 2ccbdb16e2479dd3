// What device.cc asks of the Metal back end.
#include "device/backends.h"
#include "device/metal/metal_device.h"

namespace kvfuse {

std::string metal_backend::Reason() { return HasMetalDevice() ? "" : "no GPU that Metal knows"; }

std::unique_ptr<Device> metal_backend::Make() { return MakeMetalDevice(MetalKernelSource()); }

}  // namespace kvfuse
