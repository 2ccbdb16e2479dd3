#pragma once

#include "kvfuse/kernels.h"

namespace kvfuse::avx_vnni {

KernelTable Table();

}  // namespace kvfuse::avx_vnni
