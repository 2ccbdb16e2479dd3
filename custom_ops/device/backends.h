// What device.cc knows of each back end: why it is not usable here (empty: it is), and how it is made. A back end that
// is not built has its reason in stubs.cc.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"

namespace kvfuse {
namespace metal_backend {
std::string Reason();
std::unique_ptr<Device> Make();
}  // namespace metal_backend
namespace cuda_backend {
std::string Reason();
std::unique_ptr<Device> Make();
}  // namespace cuda_backend
namespace emulated_backend {
std::string Reason();
std::unique_ptr<Device> Make();
}  // namespace emulated_backend
}  // namespace kvfuse
