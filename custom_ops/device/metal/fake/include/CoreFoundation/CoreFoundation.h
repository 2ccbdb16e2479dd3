// What metal-cpp uses of CoreFoundation and of libdispatch: names of types and one function.
#pragma once

#include <cstddef>
#include <cstdint>

using CFTimeInterval = double;
using dispatch_queue_t = struct dispatch_queue_s*;
using dispatch_data_t = struct dispatch_data_s*;

extern "C" const void* __CFStringMakeConstantString(const char* text);
