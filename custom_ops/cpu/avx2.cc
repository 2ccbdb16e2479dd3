// AVX2 with FMA and F16C. Only dispatch.cc may call it; see avx512_isa.h for why no flag is set for the whole file.
#include "avx2.h"

#include "machine.h"

#if defined(KVFUSE_X86)

#define KVFUSE_TARGET __attribute__((target("avx2,fma,f16c")))

#include "avx2_vectors.h"

namespace kvfuse::avx2 {

KernelTable Table() { return tiles::Table<SimdIsa<Vectors>>("avx2"); }

}  // namespace kvfuse::avx2

#endif
