#pragma once

#include "kvfuse/kernels.h"

namespace kvfuse::avx2 {

KernelTable Table();

}  // namespace kvfuse::avx2
