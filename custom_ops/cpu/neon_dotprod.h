#pragma once

#include "kvfuse/kernels.h"

namespace kvfuse::neon_dotprod {

KernelTable Table();

}  // namespace kvfuse::neon_dotprod
