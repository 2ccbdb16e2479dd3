#pragma once

#include "kvfuse/kernels.h"

namespace kvfuse::neon {

KernelTable Table();

}  // namespace kvfuse::neon
