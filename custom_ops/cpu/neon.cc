// NEON as every 64-bit Arm CPU has it. Only dispatch.cc may call it.
#include "neon.h"

#include "machine.h"

#if defined(KVFUSE_ARM64)

#define KVFUSE_TARGET

#include "neon_vectors.h"

namespace kvfuse::neon {

KernelTable Table() { return tiles::Table<SimdIsa<Vectors>>("neon"); }

}  // namespace kvfuse::neon

#endif
