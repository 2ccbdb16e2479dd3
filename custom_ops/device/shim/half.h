// Metal's half: every operation rounds, as no wider register would.
#pragma once

#include "device/shim/vectors.h"
#if defined(__CUDACC__)
#include <cuda_fp16.h>
#else
#include "kvfuse/half.h"
#endif

namespace kvfuse::metal {

class half {
 public:
  half() = default;
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  KVFUSE_SHIM explicit half(T value) : bits_(FromFloat(static_cast<float>(value))) {}
  // NOLINTNEXTLINE(google-explicit-constructor): half becomes float without a word, as in Metal
  KVFUSE_SHIM operator float() const { return ToFloat(bits_); }

  template <typename B>
  KVFUSE_SHIM half& operator+=(B b) {
    return *this = half(static_cast<float>(*this + b));
  }
  template <typename B>
  KVFUSE_SHIM half& operator-=(B b) {
    return *this = half(static_cast<float>(*this - b));
  }
  template <typename B>
  KVFUSE_SHIM half& operator*=(B b) {
    return *this = half(static_cast<float>(*this * b));
  }

 private:
#if defined(__CUDACC__)
  KVFUSE_SHIM static uint16_t FromFloat(float value) { return __half_as_ushort(__float2half_rn(value)); }
  KVFUSE_SHIM static float ToFloat(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
#else
  static uint16_t FromFloat(float value) { return FloatToHalf(value); }
  static float ToFloat(uint16_t bits) { return HalfToFloat(bits); }
#endif
  uint16_t bits_;
};

// float holds the exact product and, with its 24 >= 2 * 11 + 2 bits, rounding twice gives the half nearest to the
// exact sum and quotient too. An integer beside a half becomes a half first; a float makes the result float.
#define KVFUSE_HALF_OPERATOR(op)                                                                                \
  KVFUSE_SHIM half operator op(half a, half b) { return half(static_cast<float>(a) op static_cast<float>(b)); } \
  template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>>                                     \
  KVFUSE_SHIM half operator op(half a, I b) {                                                                   \
    return a op half(b);                                                                                        \
  }                                                                                                             \
  template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>>                                     \
  KVFUSE_SHIM half operator op(I a, half b) {                                                                   \
    return half(a) op b;                                                                                        \
  }
KVFUSE_HALF_OPERATOR(+)
KVFUSE_HALF_OPERATOR(-)
KVFUSE_HALF_OPERATOR(*)
KVFUSE_HALF_OPERATOR(/)
#undef KVFUSE_HALF_OPERATOR
KVFUSE_SHIM half operator-(half a) { return as_type<half>(static_cast<uint16_t>(as_type<uint16_t>(a) ^ 0x8000u)); }

KVFUSE_VECTORS(half)
#undef KVFUSE_VECTORS

}  // namespace kvfuse::metal
