// IEEE 754 binary16 <-> binary32, round to nearest even, in plain integer arithmetic so that every
// compiler and instruction set gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvfuse {

inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t exponent = (half >> 10) & 0x1fu;
  uint32_t mantissa = half & 0x3ffu;
  uint32_t bits;
  if (exponent == 0x1fu) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112u) << 23) | (mantissa << 13);
  } else if (mantissa == 0) {
    bits = sign;
  } else {  // subnormal: shift the leading one into place
    exponent = 113;
    while ((mantissa & 0x400u) == 0) {
      mantissa <<= 1;
      --exponent;
    }
    bits = sign | (exponent << 23) | ((mantissa & 0x3ffu) << 13);
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Overflow becomes infinity, as IEEE says; see FloatToHalfSaturated.
inline uint16_t FloatToHalf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;   // NaN
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 65536 or more
  uint32_t mantissa, shift;
  uint16_t base;
  if (magnitude >= 0x38800000u) {  // normal half
    base = static_cast<uint16_t>((magnitude >> 23) - 113u) << 10;
    mantissa = magnitude & 0x7fffffu;
    shift = 13;
    base += 0x400u;
  } else if (magnitude >= 0x33000000u) {  // subnormal half
    base = 0;
    mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    shift = 126u - (magnitude >> 23);
  } else {
    return sign;
  }
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t tie = 1u << (shift - 1);
  uint32_t kept = mantissa >> shift;
  if (rest > tie || (rest == tie && (kept & 1u))) ++kept;  // may carry into the exponent: that is right
  return static_cast<uint16_t>(sign | (base + kept));
}

// As FloatToHalf, but finite values beyond the range become ±65504: a stored scale or mean stays finite.
inline uint16_t FloatToHalfSaturated(float value) {
  const uint16_t half = FloatToHalf(value);
  const bool overflow = (half & 0x7fffu) == 0x7c00u && value - value == 0.0f;
  return overflow ? static_cast<uint16_t>((half & 0x8000u) | 0x7bffu) : half;
}

}  // namespace kvfuse
