#pragma once

#include "kvfuse/kernels.h"

namespace kvfuse::avx512_vnni {

KernelTable Table();

}  // namespace kvfuse::avx512_vnni
