// What metal-cpp uses of the Objective-C runtime, for systems that have none. Implemented by ../../objc_runtime.cc.
#pragma once

#include <cmath>  // metal-cpp uses std::isinf and relies on others to include it
#include <cstddef>
#include <cstdint>

// Apple's spelling of a weak reference.
#define weak_import weak

struct objc_object {
  void* isa;
};
struct objc_selector;

using id = objc_object*;
using Class = struct objc_class*;
using SEL = objc_selector*;

extern "C" {
void* objc_lookUpClass(const char* name);
void* objc_getProtocol(const char* name);
SEL sel_registerName(const char* name);
}
