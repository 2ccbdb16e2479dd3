// Math and integer functions of the Metal Shading Language that kernels may use; see metal/msl_words.py.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>

#include "device/shim/half.h"

#undef MAXFLOAT
#define MAXFLOAT FLT_MAX
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_LOG2E_F 1.44269504088896340735992460769127528f
#define M_LN2_F 0.693147180559945309417232121458176568f
#define M_SQRT1_2_F 0.707106781186547524400844362104849039f

namespace kvfuse::metal {

// Functions of floats: on half they compute in float and round, on vectors element by element.
#define KVFUSE_MATH1(name, expression)                                        \
  KVFUSE_SHIM float name(float a) { return expression; }                      \
  KVFUSE_SHIM half name(half a) { return half(name(static_cast<float>(a))); } \
  template <typename T, int N>                                                \
  KVFUSE_SHIM Vector<T, N> name(const Vector<T, N>& a) {                      \
    Vector<T, N> r;                                                           \
    for (int i = 0; i < N; ++i) r[i] = name(a[i]);                            \
    return r;                                                                 \
  }
#define KVFUSE_MATH2(name, expression)                                                                       \
  KVFUSE_SHIM float name(float a, float b) { return expression; }                                            \
  KVFUSE_SHIM half name(half a, half b) { return half(name(static_cast<float>(a), static_cast<float>(b))); } \
  template <typename T, int N>                                                                               \
  KVFUSE_SHIM Vector<T, N> name(const Vector<T, N>& a, const Vector<T, N>& b) {                              \
    Vector<T, N> r;                                                                                          \
    for (int i = 0; i < N; ++i) r[i] = name(a[i], b[i]);                                                     \
    return r;                                                                                                \
  }
KVFUSE_MATH1(acos, ::acosf(a))
KVFUSE_MATH1(asin, ::asinf(a))
KVFUSE_MATH1(atan, ::atanf(a))
KVFUSE_MATH1(ceil, ::ceilf(a))
KVFUSE_MATH1(cos, ::cosf(a))
KVFUSE_MATH1(cosh, ::coshf(a))
KVFUSE_MATH1(exp, ::expf(a))
KVFUSE_MATH1(exp2, ::exp2f(a))
KVFUSE_MATH1(exp10, ::powf(10.0f, a))
KVFUSE_MATH1(fabs, ::fabsf(a))
KVFUSE_MATH1(floor, ::floorf(a))
KVFUSE_MATH1(fract, a - ::floorf(a))
KVFUSE_MATH1(log, ::logf(a))
KVFUSE_MATH1(log10, ::log10f(a))
KVFUSE_MATH1(log2, ::log2f(a))
KVFUSE_MATH1(rint, ::rintf(a))
KVFUSE_MATH1(round, ::roundf(a))
KVFUSE_MATH1(rsqrt, 1.0f / ::sqrtf(a))
KVFUSE_MATH1(saturate, ::fminf(::fmaxf(a, 0.0f), 1.0f))
KVFUSE_MATH1(sin, ::sinf(a))
KVFUSE_MATH1(sinh, ::sinhf(a))
KVFUSE_MATH1(sqrt, ::sqrtf(a))
KVFUSE_MATH1(tan, ::tanf(a))
KVFUSE_MATH1(tanh, ::tanhf(a))
KVFUSE_MATH1(trunc, ::truncf(a))
KVFUSE_MATH1(sign, a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a == 0.0f ? a : 0.0f)
KVFUSE_MATH2(atan2, ::atan2f(a, b))
KVFUSE_MATH2(copysign, ::copysignf(a, b))
KVFUSE_MATH2(fdim, ::fdimf(a, b))
KVFUSE_MATH2(fmax, ::fmaxf(a, b))
KVFUSE_MATH2(fmin, ::fminf(a, b))
KVFUSE_MATH2(fmod, ::fmodf(a, b))
KVFUSE_MATH2(pow, ::powf(a, b))
KVFUSE_MATH2(powr, ::powf(a, b))
KVFUSE_MATH2(step, b < a ? 0.0f : 1.0f)
#undef KVFUSE_MATH1
#undef KVFUSE_MATH2

KVFUSE_SHIM float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
KVFUSE_SHIM float ldexp(float a, int b) { return ::ldexpf(a, b); }
KVFUSE_SHIM float mix(float a, float b, float t) { return a + (b - a) * t; }
KVFUSE_SHIM bool isnan(float a) { return a != a; }
KVFUSE_SHIM bool isinf(float a) { return (as_type<uint>(a) & 0x7fffffffu) == 0x7f800000u; }
KVFUSE_SHIM bool isfinite(float a) { return (as_type<uint>(a) & 0x7f800000u) != 0x7f800000u; }
KVFUSE_SHIM bool isnormal(float a) { return isfinite(a) && (as_type<uint>(a) & 0x7f800000u) != 0; }
KVFUSE_SHIM bool signbit(float a) { return (as_type<uint>(a) >> 31) != 0; }

// Both arguments of one type, as Metal wants them: a mixture is an error here, not a conversion. NaN: the other one.
template <typename T>
KVFUSE_SHIM T min(T a, T b) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, half>)
    return fmin(a, b);
  else if constexpr (std::is_arithmetic_v<T>)
    return b < a ? b : a;
  else {
    for (int i = 0; i < T::kSize; ++i) a[i] = min(a[i], b[i]);
    return a;
  }
}
template <typename T>
KVFUSE_SHIM T max(T a, T b) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, half>)
    return fmax(a, b);
  else if constexpr (std::is_arithmetic_v<T>)
    return a < b ? b : a;
  else {
    for (int i = 0; i < T::kSize; ++i) a[i] = max(a[i], b[i]);
    return a;
  }
}
template <typename T>
KVFUSE_SHIM T clamp(T value, T low, T high) {
  return min(max(value, low), high);
}
template <typename T>
KVFUSE_SHIM T abs(T a) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, half>)
    return fabs(a);
  else if constexpr (std::is_unsigned_v<T>)
    return a;
  else if constexpr (std::is_arithmetic_v<T>)
    return a < 0 ? static_cast<T>(0 - static_cast<std::make_unsigned_t<T>>(a)) : a;
  else {
    for (int i = 0; i < T::kSize; ++i) a[i] = abs(a[i]);
    return a;
  }
}
template <typename T>
KVFUSE_SHIM std::make_unsigned_t<T> absdiff(T a, T b) {
  using U = std::make_unsigned_t<T>;
  return a < b ? static_cast<U>(static_cast<U>(b) - static_cast<U>(a))
               : static_cast<U>(static_cast<U>(a) - static_cast<U>(b));
}
// b where the condition holds, else a.
template <typename T>
KVFUSE_SHIM T select(T a, T b, bool condition) {
  return condition ? b : a;
}
template <typename T, int N>
KVFUSE_SHIM Vector<T, N> select(Vector<T, N> a, const Vector<T, N>& b, const Vector<bool, N>& condition) {
  for (int i = 0; i < N; ++i) a[i] = condition[i] ? b[i] : a[i];
  return a;
}
template <typename T, int N>
KVFUSE_SHIM T dot(const Vector<T, N>& a, const Vector<T, N>& b) {
  T sum = static_cast<T>(a[0] * b[0]);
  for (int i = 1; i < N; ++i) sum = static_cast<T>(sum + a[i] * b[i]);
  return sum;
}
template <typename T, int N>
KVFUSE_SHIM T length(const Vector<T, N>& a) {
  return sqrt(dot(a, a));
}
template <int N>
KVFUSE_SHIM bool any(const Vector<bool, N>& a) {
  bool result = false;
  for (int i = 0; i < N; ++i) result |= a[i];
  return result;
}
template <int N>
KVFUSE_SHIM bool all(const Vector<bool, N>& a) {
  bool result = true;
  for (int i = 0; i < N; ++i) result &= a[i];
  return result;
}

template <typename T>
KVFUSE_SHIM T popcount(T a) {
  T count = 0;
  for (auto bits = static_cast<std::make_unsigned_t<T>>(a); bits != 0; bits &= bits - 1) ++count;
  return count;
}
template <typename T>
KVFUSE_SHIM T clz(T a) {
  T count = 0;
  using U = std::make_unsigned_t<T>;
  for (int bit = 8 * int(sizeof(T)) - 1; bit >= 0 && ((static_cast<U>(a) >> bit) & 1u) == 0; --bit) ++count;
  return count;
}
template <typename T>
KVFUSE_SHIM T ctz(T a) {
  T count = 0;
  using U = std::make_unsigned_t<T>;
  for (int bit = 0; bit < 8 * int(sizeof(T)) && ((static_cast<U>(a) >> bit) & 1u) == 0; ++bit) ++count;
  return count;
}
template <typename T>
KVFUSE_SHIM T reverse_bits(T a) {
  using U = std::make_unsigned_t<T>;
  U result = 0;
  for (unsigned bit = 0; bit < 8 * sizeof(T); ++bit)
    result |= static_cast<U>(((static_cast<U>(a) >> bit) & 1u) << (8 * sizeof(T) - 1 - bit));
  return static_cast<T>(result);
}
template <typename T>
KVFUSE_SHIM T rotate(T a, T by) {
  using U = std::make_unsigned_t<T>;
  const unsigned width = 8 * sizeof(T), left = static_cast<unsigned>(by) % width;
  if (left == 0) return a;
  return static_cast<T>(static_cast<U>(a) << left | static_cast<U>(a) >> (width - left));
}
// `bits` bits from `offset` on; sign-extended for a signed type.
template <typename T>
KVFUSE_SHIM T extract_bits(T a, uint offset, uint bits) {
  const unsigned width = 8 * sizeof(T);
  if (bits == 0) return 0;
  using U = std::make_unsigned_t<T>;
  const U up = static_cast<U>(static_cast<U>(a) << (width - bits - offset));
  return static_cast<T>(static_cast<T>(up) >> (width - bits));
}
template <typename T>
KVFUSE_SHIM T insert_bits(T base, T insert, uint offset, uint bits) {
  using U = std::make_unsigned_t<T>;
  const U ones = bits == 8 * sizeof(T) ? static_cast<U>(~U{0}) : static_cast<U>((U{1} << bits) - 1);
  const U mask = static_cast<U>(ones << offset);
  return static_cast<T>((static_cast<U>(base) & ~mask) | ((static_cast<U>(insert) << offset) & mask));
}
KVFUSE_SHIM int mulhi(int a, int b) { return static_cast<int>((int64_t{a} * b) >> 32); }
KVFUSE_SHIM uint mulhi(uint a, uint b) { return static_cast<uint>((uint64_t{a} * b) >> 32); }
KVFUSE_SHIM int mul24(int a, int b) { return a * b; }
KVFUSE_SHIM uint mul24(uint a, uint b) { return a * b; }
KVFUSE_SHIM int mad24(int a, int b, int c) { return a * b + c; }
KVFUSE_SHIM uint mad24(uint a, uint b, uint c) { return a * b + c; }

// With fast math off these are the same functions.
namespace precise {
using metal::cos, metal::exp, metal::exp2, metal::log, metal::log2, metal::pow, metal::rint, metal::rsqrt, metal::sin,
    metal::sqrt, metal::tanh, metal::fma, metal::fmax, metal::fmin, metal::max, metal::min;
}
namespace fast {
using namespace precise;
}

}  // namespace kvfuse::metal
