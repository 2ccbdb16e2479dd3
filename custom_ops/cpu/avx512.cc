// The table of AVX-512 with VNNI.
#include "avx512.h"

#include "machine.h"

#if defined(KVFUSE_X86)

#include "avx512_isa.h"

namespace kvfuse::avx512_vnni {

KernelTable Table() { return tiles::Table<Isa>("avx512_vnni"); }

}  // namespace kvfuse::avx512_vnni

#endif
