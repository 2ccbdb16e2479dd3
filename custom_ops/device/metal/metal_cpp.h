// Includes metal-cpp with its symbols hidden: another library of the process may carry another version of it.
#pragma once

#define METALCPP_SYMBOL_VISIBILITY_HIDDEN

#if defined(__GNUC__)
#pragma GCC system_header
#endif
#include <Metal/Metal.hpp>
