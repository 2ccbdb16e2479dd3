// The device that a provider option names, for layer caches.
#pragma once

#include <string>

#include "kvfuse/layer_cache.h"

namespace kvfuse {

// `device` is a name of DeviceChoices; empty takes the first GPU that is usable, or the emulator with `emulate`.
// `variant` is "scalar" or "simd"; empty takes the default. Throws Error for an unknown word, and with the reason
// where a device is not usable. What is returned lives as long as the process.
CacheDevice& ChooseDevice(const std::string& device, const std::string& variant, bool emulate);

}  // namespace kvfuse
