// What a translated kernel sees on the emulated device: Metal's types and functions over group.h.
#pragma once

#include <cstring>
#include <vector>

#include "device/emulated/grid.h"
#include "device/emulated/group.h"
#include "device/shim/math.h"

#define __METAL_VERSION__ 310

namespace kvfuse::emulated {

// A function constant: read from the dispatch, an error when that does not set it.
template <typename T>
struct FunctionConstant {
  int index;
  const char* name;
  operator T() const { return static_cast<T>(ConstantValue(index, name)); }  // NOLINT(google-explicit-constructor)
};

template <typename T>
T& Shared(const char* name, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return *static_cast<T*>(SharedMemory(sizeof(T), alignof(T), {name, file, line}));
}

template <typename T>
Bits ToBits(const T& value) {
  static_assert(sizeof(T) <= sizeof(Bits) && std::is_trivially_copyable_v<T>, "a value of up to 16 bytes");
  Bits bits{};
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T>
T FromBits(const Bits& bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof value);
  return value;
}

// Op over all active lanes, from the first to the last or the other way round.
template <typename T, typename Op>
Bits Fold(const Lanes& lanes) {
  T total{};
  bool first = true;
  for (int i = 0; i < 32; ++i) {
    const int lane = lanes.descending ? 31 - i : i;
    if ((lanes.active >> lane & 1u) == 0) continue;
    const T value = FromBits<T>(lanes.values[lane]);
    total = first ? value : Op()(total, value);
    first = false;
  }
  return ToBits(total);
}

}  // namespace kvfuse::emulated

namespace kvfuse::metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<int>(a) | static_cast<int>(b));
}

#define KVFUSE_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void threadgroup_barrier(mem_flags flags, KVFUSE_SITE) {
  emulated::ThreadgroupBarrier(flags != mem_flags::mem_none, {"threadgroup_barrier", file, line});
}
inline void simdgroup_barrier(mem_flags flags, KVFUSE_SITE) {
  emulated::SimdgroupBarrier(flags != mem_flags::mem_none, {"simdgroup_barrier", file, line});
}

#define KVFUSE_REDUCTION(name, expression)                                                                     \
  template <typename T>                                                                                        \
  T name(T value, KVFUSE_SITE) {                                                                               \
    struct Op {                                                                                                \
      T operator()(T a, T b) const { return static_cast<T>(expression); }                                      \
    };                                                                                                         \
    const auto bits = emulated::Combine(emulated::ToBits(value), &emulated::Fold<T, Op>, {#name, file, line}); \
    return emulated::FromBits<T>(bits);                                                                        \
  }
KVFUSE_REDUCTION(simd_sum, a + b)
KVFUSE_REDUCTION(simd_product, a* b)
KVFUSE_REDUCTION(simd_max, max(a, b))
KVFUSE_REDUCTION(simd_min, min(a, b))
KVFUSE_REDUCTION(simd_and, a& b)
KVFUSE_REDUCTION(simd_or, a | b)
KVFUSE_REDUCTION(simd_xor, a ^ b)
#undef KVFUSE_REDUCTION
inline bool simd_any(bool value, KVFUSE_SITE) { return simd_or(static_cast<int>(value), file, line) != 0; }
inline bool simd_all(bool value, KVFUSE_SITE) { return simd_and(static_cast<int>(value), file, line) != 0; }

template <typename T>
T simd_shuffle(T value, ushort from, KVFUSE_SITE) {
  return emulated::FromBits<T>(emulated::FromLane(emulated::ToBits(value), from, {"simd_shuffle", file, line}));
}
template <typename T>
T simd_broadcast(T value, ushort from, KVFUSE_SITE) {
  return emulated::FromBits<T>(emulated::FromLane(emulated::ToBits(value), from, {"simd_broadcast", file, line}));
}
template <typename T>
T simd_shuffle_xor(T value, ushort mask, KVFUSE_SITE) {
  return emulated::FromBits<T>(
      emulated::FromLane(emulated::ToBits(value), emulated::LaneIndex() ^ mask, {"simd_shuffle_xor", file, line}));
}
// No wrapping around: the first (last) `delta` lanes keep their own value.
template <typename T>
T simd_shuffle_up(T value, ushort delta, KVFUSE_SITE) {
  const uint lane = emulated::LaneIndex();
  return emulated::FromBits<T>(
      emulated::FromLane(emulated::ToBits(value), lane < delta ? lane : lane - delta, {"simd_shuffle_up", file, line}));
}
template <typename T>
T simd_shuffle_down(T value, ushort delta, KVFUSE_SITE) {
  const uint lane = emulated::LaneIndex();
  return emulated::FromBits<T>(emulated::FromLane(emulated::ToBits(value), lane + delta > 31 ? lane : lane + delta,
                                                  {"simd_shuffle_down", file, line}));
}
inline bool simd_is_first(KVFUSE_SITE) {
  const uint32_t active = emulated::ActiveLanes({"simd_is_first", file, line});
  return (active & ((1u << emulated::LaneIndex()) - 1u)) == 0;
}
template <typename T>
T simd_broadcast_first(T value, KVFUSE_SITE) {
  return emulated::FromBits<T>(emulated::Combine(
      emulated::ToBits(value), [](const emulated::Lanes& lanes) { return lanes.values[__builtin_ctz(lanes.active)]; },
      {"simd_broadcast_first", file, line}));
}
template <typename T>
T simd_prefix_exclusive_sum(T value, KVFUSE_SITE) {
  T total{};
  for (uint lane = 0; lane < 32; ++lane) {  // one meeting for each lane: slow, simple, rarely used
    const T other = simd_shuffle(value, static_cast<ushort>(lane), file, line);
    if (lane < emulated::LaneIndex()) total = static_cast<T>(total + other);
  }
  return total;
}
template <typename T>
T simd_prefix_inclusive_sum(T value, KVFUSE_SITE) {
  return static_cast<T>(simd_prefix_exclusive_sum(value, file, line) + value);
}
#undef KVFUSE_SITE

enum memory_order { memory_order_relaxed };
template <typename T>
struct Atomic {
  T value;
};
using atomic_int = Atomic<int>;
using atomic_uint = Atomic<uint>;
template <typename T>
T atomic_load_explicit(const Atomic<T>* object, memory_order) {
  return __atomic_load_n(&object->value, __ATOMIC_RELAXED);
}
template <typename T>
void atomic_store_explicit(Atomic<T>* object, std::common_type_t<T> value, memory_order) {
  __atomic_store_n(&object->value, value, __ATOMIC_RELAXED);
}
#define KVFUSE_ATOMIC(name, builtin)                                     \
  template <typename T>                                                  \
  T name(Atomic<T>* object, std::common_type_t<T> value, memory_order) { \
    return builtin(&object->value, value, __ATOMIC_RELAXED);             \
  }
KVFUSE_ATOMIC(atomic_exchange_explicit, __atomic_exchange_n)
KVFUSE_ATOMIC(atomic_fetch_add_explicit, __atomic_fetch_add)
KVFUSE_ATOMIC(atomic_fetch_sub_explicit, __atomic_fetch_sub)
KVFUSE_ATOMIC(atomic_fetch_and_explicit, __atomic_fetch_and)
KVFUSE_ATOMIC(atomic_fetch_or_explicit, __atomic_fetch_or)
KVFUSE_ATOMIC(atomic_fetch_xor_explicit, __atomic_fetch_xor)
#undef KVFUSE_ATOMIC
#define KVFUSE_ATOMIC_EXTREME(name, better)                                                                       \
  template <typename T>                                                                                           \
  T name(Atomic<T>* object, std::common_type_t<T> value, memory_order) {                                          \
    T old = __atomic_load_n(&object->value, __ATOMIC_RELAXED);                                                    \
    while (value better old &&                                                                                    \
           !__atomic_compare_exchange_n(&object->value, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
    }                                                                                                             \
    return old;                                                                                                   \
  }
KVFUSE_ATOMIC_EXTREME(atomic_fetch_min_explicit, <)
KVFUSE_ATOMIC_EXTREME(atomic_fetch_max_explicit, >)
#undef KVFUSE_ATOMIC_EXTREME

}  // namespace kvfuse::metal
