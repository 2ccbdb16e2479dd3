// AVX2 with AVX-VNNI, as client CPUs without AVX-512 have it. Only dispatch.cc may call it; see avx512_isa.h for why
// no flag is set for the whole file.
#include "avx_vnni.h"

#include "machine.h"

#if defined(KVFUSE_X86)

#define KVFUSE_TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define KVFUSE_AVX_VNNI

#include "avx2_vectors.h"

namespace kvfuse::avx_vnni {

KernelTable Table() { return tiles::Table<SimdIsa<Vectors>>("avx_vnni"); }

}  // namespace kvfuse::avx_vnni

#endif
