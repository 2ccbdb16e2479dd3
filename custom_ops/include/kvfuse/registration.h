// What the library knows of the onnxruntime that loaded it.
#pragma once

#include "kvfuse/export.h"

namespace kvfuse {

// The version of onnxruntime's C API in use, the smaller of the runtime's and ours; 0 before a registration.
KVFUSE_EXPORT int NegotiatedApiVersion();

}  // namespace kvfuse
