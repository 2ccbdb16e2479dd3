// The Apple GPU behind device.h, through metal-cpp.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"

namespace kvfuse {

// The system's default GPU with the kernels of `source`, Metal text that includes nothing but Metal's own headers.
// Throws Error when there is no GPU, or when Metal's compiler refuses the text (its own words are in the sentence).
std::unique_ptr<Device> MakeMetalDevice(const std::string& source);

bool HasMetalDevice();

// The text of the kernels with its includes in place; made by embed_kernels.py when the library is built.
const std::string& MetalKernelSource();

}  // namespace kvfuse
