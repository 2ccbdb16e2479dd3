#pragma once

#include "kvfuse/kernels.h"

namespace kvfuse::avx512_vnni {
void Attend(const AttendArgs& args);
}  // namespace kvfuse::avx512_vnni
