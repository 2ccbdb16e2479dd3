// NEON with the dot products of Armv8.2 (sdot). Only dispatch.cc may call it; see avx512_isa.h for why no flag is
// set for the whole file.
#include "neon_dotprod.h"

#include "machine.h"

#if defined(KVFUSE_ARM64)

#if defined(__clang__)
#define KVFUSE_TARGET __attribute__((target("dotprod")))
#else
#define KVFUSE_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define KVFUSE_NEON_DOTPROD

#include "neon_vectors.h"

namespace kvfuse::neon_dotprod {

KernelTable Table() { return tiles::Table<SimdIsa<Vectors>>("neon_dotprod"); }

}  // namespace kvfuse::neon_dotprod

#endif
