// Declarations for tools/lint_metal.py: Metal's address spaces as clang's, so that a pointer into the wrong one is an
// error, as for Apple's compiler. Nothing here is ever run. Needs clang, and no other header.
#pragma once

#define __METAL_VERSION__ 310
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define MAXFLOAT __FLT_MAX__
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (2u * __INT_MAX__ + 1u)
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_LOG2E_F 1.44269504088896340735992460769127528f
#define M_LN2_F 0.693147180559945309417232121458176568f
#define M_SQRT1_2_F 0.707106781186547524400844362104849039f

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;
using size_t = unsigned long;
using ptrdiff_t = long;
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;

namespace lint {

// A vector from a scalar, from another vector, or from parts.
template <typename V>
struct Make {
  template <typename... Parts>
  V operator()(Parts...) const;
};

}  // namespace lint

#define KVFUSE_VECTOR(T, N)                           \
  using T##N = T __attribute__((ext_vector_type(N))); \
  constexpr lint::Make<T##N> make_##T##N{};
#define KVFUSE_VECTORS(T) KVFUSE_VECTOR(T, 2) KVFUSE_VECTOR(T, 3) KVFUSE_VECTOR(T, 4)
KVFUSE_VECTORS(char)
KVFUSE_VECTORS(uchar)
KVFUSE_VECTORS(short)
KVFUSE_VECTORS(ushort)
KVFUSE_VECTORS(int)
KVFUSE_VECTORS(uint)
KVFUSE_VECTORS(long)
KVFUSE_VECTORS(ulong)
KVFUSE_VECTORS(half)
KVFUSE_VECTORS(float)
using bool2 = int2;
using bool3 = int3;
using bool4 = int4;
constexpr lint::Make<int2> make_bool2{};
constexpr lint::Make<int3> make_bool3{};
constexpr lint::Make<int4> make_bool4{};

namespace metal {

#define KVFUSE_1(name)  \
  template <typename T> \
  T name(T);
#define KVFUSE_2(name)  \
  template <typename T> \
  T name(T, T);
#define KVFUSE_3(name)  \
  template <typename T> \
  T name(T, T, T);
#define KVFUSE_TO_BOOL(name) \
  template <typename T>      \
  bool name(T);
// clang-format off
KVFUSE_1(abs) KVFUSE_1(acos) KVFUSE_1(asin) KVFUSE_1(atan) KVFUSE_1(ceil) KVFUSE_1(cos) KVFUSE_1(cosh) KVFUSE_1(exp)
KVFUSE_1(exp10) KVFUSE_1(exp2) KVFUSE_1(fabs) KVFUSE_1(floor) KVFUSE_1(fract) KVFUSE_1(log) KVFUSE_1(log10)
KVFUSE_1(log2) KVFUSE_1(rint) KVFUSE_1(round) KVFUSE_1(rsqrt) KVFUSE_1(saturate) KVFUSE_1(sign) KVFUSE_1(sin)
KVFUSE_1(sinh) KVFUSE_1(sqrt) KVFUSE_1(tan) KVFUSE_1(tanh) KVFUSE_1(trunc) KVFUSE_1(clz) KVFUSE_1(ctz)
KVFUSE_1(popcount) KVFUSE_1(reverse_bits) KVFUSE_2(atan2) KVFUSE_2(copysign) KVFUSE_2(fdim) KVFUSE_2(fmax)
KVFUSE_2(fmin) KVFUSE_2(fmod) KVFUSE_2(max) KVFUSE_2(min) KVFUSE_2(pow) KVFUSE_2(powr) KVFUSE_2(step)
KVFUSE_2(absdiff) KVFUSE_2(mulhi) KVFUSE_2(mul24) KVFUSE_2(rotate) KVFUSE_3(clamp) KVFUSE_3(fma) KVFUSE_3(mix)
KVFUSE_3(mad24) KVFUSE_TO_BOOL(isfinite) KVFUSE_TO_BOOL(isinf) KVFUSE_TO_BOOL(isnan) KVFUSE_TO_BOOL(isnormal)
KVFUSE_TO_BOOL(signbit) KVFUSE_TO_BOOL(any) KVFUSE_TO_BOOL(all);
// clang-format on
template <typename T>
auto dot(T a, T) -> decltype(a.x + a.y);
template <typename T>
auto length(T a) -> decltype(a.x + a.y);
template <typename T, typename C>
T select(T, T, C);
float ldexp(float, int);
template <typename T>
T extract_bits(T, uint, uint);
template <typename T>
T insert_bits(T, T, uint, uint);
namespace precise {
using namespace metal;
}
namespace fast {
using namespace metal;
}

// clang-format off
KVFUSE_1(simd_sum) KVFUSE_1(simd_product) KVFUSE_1(simd_max) KVFUSE_1(simd_min) KVFUSE_1(simd_and) KVFUSE_1(simd_or)
KVFUSE_1(simd_xor) KVFUSE_1(simd_broadcast_first) KVFUSE_1(simd_prefix_inclusive_sum)
KVFUSE_1(simd_prefix_exclusive_sum);
// clang-format on
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();
#define KVFUSE_LANE(name) \
  template <typename T>   \
  T name(T, ushort);
// clang-format off
KVFUSE_LANE(simd_broadcast) KVFUSE_LANE(simd_shuffle) KVFUSE_LANE(simd_shuffle_xor) KVFUSE_LANE(simd_shuffle_up)
KVFUSE_LANE(simd_shuffle_down);
// clang-format on

enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

enum memory_order { memory_order_relaxed };
template <typename T>
struct Atomic {
  T value;
};
using atomic_int = Atomic<int>;
using atomic_uint = Atomic<uint>;
#define KVFUSE_ATOMIC(space)                                      \
  template <typename T>                                           \
  T atomic_load_explicit(const space Atomic<T>*, memory_order);   \
  template <typename T, typename U>                               \
  void atomic_store_explicit(space Atomic<T>*, U, memory_order);  \
  template <typename T, typename U>                               \
  T atomic_exchange_explicit(space Atomic<T>*, U, memory_order);  \
  template <typename T, typename U>                               \
  T atomic_fetch_add_explicit(space Atomic<T>*, U, memory_order); \
  template <typename T, typename U>                               \
  T atomic_fetch_sub_explicit(space Atomic<T>*, U, memory_order); \
  template <typename T, typename U>                               \
  T atomic_fetch_min_explicit(space Atomic<T>*, U, memory_order); \
  template <typename T, typename U>                               \
  T atomic_fetch_max_explicit(space Atomic<T>*, U, memory_order); \
  template <typename T, typename U>                               \
  T atomic_fetch_and_explicit(space Atomic<T>*, U, memory_order); \
  template <typename T, typename U>                               \
  T atomic_fetch_or_explicit(space Atomic<T>*, U, memory_order);  \
  template <typename T, typename U>                               \
  T atomic_fetch_xor_explicit(space Atomic<T>*, U, memory_order);
KVFUSE_ATOMIC(device)
KVFUSE_ATOMIC(threadgroup)

template <typename To, typename From>
To as_type(From from) {
  return __builtin_bit_cast(To, from);
}

}  // namespace metal
