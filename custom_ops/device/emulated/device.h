// The emulated device: buffers are memory of the host, a launch runs at once.
#pragma once

#include <memory>

#include "device/device.h"
#include "device/emulated/grid.h"

namespace kvfuse::emulated {

// The kernels of this library, translated at build time.
const Program& BuiltinProgram();
// Throws Error when KVFUSE_EMULATED_SCHEDULE says nothing that is known.
std::unique_ptr<Device> MakeDevice(const Program& program = BuiltinProgram());

}  // namespace kvfuse::emulated
