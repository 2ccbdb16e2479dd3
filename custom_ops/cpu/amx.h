#pragma once

#include <string>

#include "kvfuse/kernels.h"

namespace kvfuse::amx {

KernelTable Table();
// Why this machine cannot run it; empty: it can. The first call asks Linux to let this process use tiles.
std::string Reason();

}  // namespace kvfuse::amx
