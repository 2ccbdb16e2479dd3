// The entry points through which every Objective-C message goes; cast by the caller to the method's type.
#pragma once

#include "runtime.h"

extern "C" {
void objc_msgSend();
void objc_msgSend_fpret();  // x86-64: methods that return a long double there, and float or double for metal-cpp
void objc_msgSend_stret();  // x86-64: methods that return a struct in memory
}
