// Scalar and vector types of the Metal Shading Language, for host compilers and nvcc alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define KVFUSE_SHIM __host__ __device__ inline
#else
#define KVFUSE_SHIM inline
#endif

namespace kvfuse::metal {

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using std::int16_t, std::int32_t, std::int64_t, std::int8_t;
using std::size_t, std::ptrdiff_t;
using std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;
static_assert(sizeof(long) == 8, "Metal's long has 64 bits");

template <typename T, int N>
struct Storage;
template <typename T>
struct alignas(2 * sizeof(T)) Storage<T, 2> {
  T x, y;
};
template <typename T>
struct alignas(4 * sizeof(T)) Storage<T, 3> {
  T x, y, z;
};
template <typename T>
struct alignas(4 * sizeof(T)) Storage<T, 4> {
  T x, y, z, w;
};

// A vector of 2, 3 or 4; three take the room of four, as in Metal.
template <typename T, int N>
struct Vector : Storage<T, N> {
  Vector() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): a scalar becomes a vector without a word, as in Metal
  KVFUSE_SHIM Vector(T scalar) {
    for (int i = 0; i < N; ++i) (*this)[i] = scalar;
  }
  template <typename U>
  KVFUSE_SHIM explicit Vector(const Vector<U, N>& other) {
    for (int i = 0; i < N; ++i) (*this)[i] = static_cast<T>(other[i]);
  }
  // Parts in order: scalars and smaller vectors that fill it exactly.
  template <typename A, typename B, typename... Rest>
  KVFUSE_SHIM Vector(const A& a, const B& b, const Rest&... rest) {
    static_assert(Count<A>() + Count<B>() + (0 + ... + Count<Rest>()) == N, "parts that fill the vector exactly");
    int at = 0;
    Put(at, a);
    Put(at, b);
    (Put(at, rest), ...);
  }

  KVFUSE_SHIM T& operator[](int i) { return i == 0 ? this->x : i == 1 ? this->y : Upper(*this, i); }
  KVFUSE_SHIM const T& operator[](int i) const { return i == 0 ? this->x : i == 1 ? this->y : Upper(*this, i); }

#define KVFUSE_SWIZZLE2(name, i, j) \
  KVFUSE_SHIM Vector<T, 2> name() const { return {(*this)[i], (*this)[j]}; }
  KVFUSE_SWIZZLE2(xy, 0, 1)
  KVFUSE_SWIZZLE2(xz, 0, 2)
  KVFUSE_SWIZZLE2(xw, 0, 3)
  KVFUSE_SWIZZLE2(yz, 1, 2)
  KVFUSE_SWIZZLE2(yw, 1, 3)
  KVFUSE_SWIZZLE2(zw, 2, 3)
  KVFUSE_SWIZZLE2(yx, 1, 0)
  KVFUSE_SWIZZLE2(wz, 3, 2)
  KVFUSE_SWIZZLE2(xx, 0, 0)
  KVFUSE_SWIZZLE2(yy, 1, 1)
  KVFUSE_SWIZZLE2(zz, 2, 2)
  KVFUSE_SWIZZLE2(ww, 3, 3)
#undef KVFUSE_SWIZZLE2
  KVFUSE_SHIM Vector<T, 3> xyz() const { return {(*this)[0], (*this)[1], (*this)[2]}; }
  KVFUSE_SHIM Vector<T, 3> yzw() const { return {(*this)[1], (*this)[2], (*this)[3]}; }
  KVFUSE_SHIM Vector<T, 4> xyzw() const { return *this; }

 private:
  template <typename S>
  KVFUSE_SHIM static auto& Upper(S& self, int i) {
    if constexpr (N == 2)
      return self.y;
    else if constexpr (N == 3)
      return self.z;
    else
      return i == 2 ? self.z : self.w;
  }
  template <typename A>
  KVFUSE_SHIM static constexpr int Count() {
    if constexpr (std::is_convertible_v<A, T>)
      return 1;
    else
      return A::kSize;
  }
  template <typename A>
  KVFUSE_SHIM void Put(int& at, const A& part) {
    if constexpr (std::is_convertible_v<A, T>)
      (*this)[at++] = static_cast<T>(part);
    else
      for (int i = 0; i < A::kSize; ++i) (*this)[at++] = static_cast<T>(part[i]);
  }

 public:
  static constexpr int kSize = N;
};

#define KVFUSE_OPERATOR(op)                                                                     \
  template <typename T, int N>                                                                  \
  KVFUSE_SHIM Vector<T, N> operator op(const Vector<T, N>& a, const Vector<T, N>& b) {          \
    Vector<T, N> r;                                                                             \
    for (int i = 0; i < N; ++i) r[i] = static_cast<T>(a[i] op b[i]);                            \
    return r;                                                                                   \
  }                                                                                             \
  template <typename T, int N>                                                                  \
  KVFUSE_SHIM Vector<T, N> operator op(const Vector<T, N>& a, const std::common_type_t<T>& b) { \
    return a op Vector<T, N>(b);                                                                \
  }                                                                                             \
  template <typename T, int N>                                                                  \
  KVFUSE_SHIM Vector<T, N> operator op(const std::common_type_t<T>& a, const Vector<T, N>& b) { \
    return Vector<T, N>(a) op b;                                                                \
  }                                                                                             \
  template <typename T, int N, typename B>                                                      \
  KVFUSE_SHIM Vector<T, N>& operator op## = (Vector<T, N> & a, const B& b) {                    \
    return a = a op b;                                                                          \
  }
KVFUSE_OPERATOR(+)
KVFUSE_OPERATOR(-)
KVFUSE_OPERATOR(*)
KVFUSE_OPERATOR(/)
KVFUSE_OPERATOR(%)
KVFUSE_OPERATOR(&)
KVFUSE_OPERATOR(|)
KVFUSE_OPERATOR(^)
KVFUSE_OPERATOR(<<)
KVFUSE_OPERATOR(>>)
#undef KVFUSE_OPERATOR

#define KVFUSE_COMPARISON(op)                                                             \
  template <typename T, int N>                                                            \
  KVFUSE_SHIM Vector<bool, N> operator op(const Vector<T, N>& a, const Vector<T, N>& b) { \
    Vector<bool, N> r;                                                                    \
    for (int i = 0; i < N; ++i) r[i] = a[i] op b[i];                                      \
    return r;                                                                             \
  }
KVFUSE_COMPARISON(==)
KVFUSE_COMPARISON(!=)
KVFUSE_COMPARISON(<)
KVFUSE_COMPARISON(<=)
KVFUSE_COMPARISON(>)
KVFUSE_COMPARISON(>=)
#undef KVFUSE_COMPARISON

// f(a[i]), f(a[i], b[i]) … as a vector, for the functions of math.h.
template <typename T, int N>
KVFUSE_SHIM Vector<T, N> operator-(const Vector<T, N>& a) {
  Vector<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = static_cast<T>(-a[i]);
  return r;
}
template <typename T, int N>
KVFUSE_SHIM Vector<T, N> operator~(const Vector<T, N>& a) {
  Vector<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = static_cast<T>(~a[i]);
  return r;
}

// The bits of one type as another of the same size.
template <typename To, typename From>
KVFUSE_SHIM To as_type(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of one size");
  To to;
  memcpy(static_cast<void*>(&to), &from, sizeof to);
  return to;
}

#define KVFUSE_VECTORS(T)    \
  using T##2 = Vector<T, 2>; \
  using T##3 = Vector<T, 3>; \
  using T##4 = Vector<T, 4>;
KVFUSE_VECTORS(bool)
KVFUSE_VECTORS(char)
KVFUSE_VECTORS(uchar)
KVFUSE_VECTORS(short)
KVFUSE_VECTORS(ushort)
KVFUSE_VECTORS(int)
KVFUSE_VECTORS(uint)
KVFUSE_VECTORS(long)
KVFUSE_VECTORS(ulong)
KVFUSE_VECTORS(float)

// A position in the shape that a kernel asks for: one number, or the first two or all three.
template <typename T>
KVFUSE_SHIM T As(const uint3& position) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(position.x);
  } else {
    T result;
    for (int i = 0; i < T::kSize; ++i) result[i] = static_cast<std::decay_t<decltype(result[i])>>(position[i]);
    return result;
  }
}

}  // namespace kvfuse::metal
