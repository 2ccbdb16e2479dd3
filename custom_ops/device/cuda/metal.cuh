// What a translated kernel sees on a CUDA device: Metal's types and functions; a simdgroup is a warp.
#pragma once

#include "device/cuda/program.h"
#include "device/shim/math.h"

#define __METAL_VERSION__ 310

namespace kvfuse::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;  // lanes that have ended count as present

__device__ inline unsigned LaneIndex() { return threadIdx.x % 32; }

struct Position {
  __device__ metal::uint3 group() const { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
  __device__ metal::uint3 groups() const { return {gridDim.x, gridDim.y, gridDim.z}; }
  __device__ metal::uint3 threads() const { return {blockDim.x, 1u, 1u}; }
  __device__ metal::uint3 thread_in_group() const { return {threadIdx.x, 0u, 0u}; }
  __device__ metal::uint3 thread_in_grid() const {
    return {blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y, blockIdx.z};
  }
  __device__ metal::uint3 grid_threads() const { return {gridDim.x * blockDim.x, gridDim.y, gridDim.z}; }
  __device__ metal::uint3 thread() const { return threadIdx.x; }
  __device__ metal::uint3 lane() const { return LaneIndex(); }
  __device__ metal::uint3 simdgroup() const { return threadIdx.x / 32; }
  __device__ metal::uint3 simdgroups() const { return blockDim.x / 32; }
  __device__ metal::uint3 simd_width() const { return 32u; }
};

// A value as 32-bit words, each through a shuffle of the hardware.
template <typename T, typename Shuffle>
__device__ T ByWords(const T& value, Shuffle shuffle) {
  constexpr int kWords = (sizeof(T) + 3) / 4;
  unsigned words[kWords] = {};
  memcpy(words, &value, sizeof value);
  for (unsigned& word : words) word = shuffle(word);
  T result;
  memcpy(static_cast<void*>(&result), words, sizeof result);
  return result;
}

template <typename T>
__device__ T FromLane(const T& value, unsigned lane) {
  return ByWords(value, [lane](unsigned word) { return __shfl_sync(kAllLanes, word, static_cast<int>(lane)); });
}

// Op over the lanes that have not ended, in a tree when that is all of them. Metal leaves the order open.
template <typename T, typename Op>
__device__ T Reduce(T value, Op op) {
  const unsigned active = __activemask();
  if (active == kAllLanes) {
    for (int step = 16; step > 0; step /= 2)
      value = op(value, ByWords(value, [step](unsigned word) { return __shfl_xor_sync(kAllLanes, word, step); }));
    return value;
  }
  T total = FromLane(value, __ffs(active) - 1);
  for (unsigned rest = active & (active - 1); rest != 0; rest &= rest - 1)
    total = op(total, FromLane(value, __ffs(rest) - 1));
  return total;
}

}  // namespace kvfuse::cuda

namespace kvfuse::metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
__device__ constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<int>(a) | static_cast<int>(b));
}
__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
__device__ inline void simdgroup_barrier(mem_flags) { __syncwarp(); }

// What kernels.metal computes with four products where there is no such instruction.
#define KVFUSE_HAS_DOT4
__device__ inline int dot4(int a, int b, int sum) { return __dp4a(a, b, sum); }

#define KVFUSE_REDUCTION(name, expression)                                           \
  template <typename T>                                                              \
  __device__ T name(T value) {                                                       \
    return cuda::Reduce(value, [](T a, T b) { return static_cast<T>(expression); }); \
  }
KVFUSE_REDUCTION(simd_product, a* b)
KVFUSE_REDUCTION(simd_and, a& b)
KVFUSE_REDUCTION(simd_or, a | b)
KVFUSE_REDUCTION(simd_xor, a ^ b)
#undef KVFUSE_REDUCTION
// One instruction for 32-bit integers.
#define KVFUSE_REDUCTION(name, instruction, expression)                                \
  template <typename T>                                                                \
  __device__ T name(T value) {                                                         \
    if constexpr (std::is_same_v<T, int> || std::is_same_v<T, uint>)                   \
      return instruction(__activemask(), value);                                       \
    else                                                                               \
      return cuda::Reduce(value, [](T a, T b) { return static_cast<T>(expression); }); \
  }
KVFUSE_REDUCTION(simd_sum, __reduce_add_sync, a + b)
KVFUSE_REDUCTION(simd_max, __reduce_max_sync, max(a, b))
KVFUSE_REDUCTION(simd_min, __reduce_min_sync, min(a, b))
#undef KVFUSE_REDUCTION
__device__ inline bool simd_any(bool value) { return __any_sync(__activemask(), value); }
__device__ inline bool simd_all(bool value) { return __all_sync(__activemask(), value); }
__device__ inline bool simd_is_first() { return cuda::LaneIndex() + 1 == __ffs(__activemask()); }

template <typename T>
__device__ T simd_shuffle(T value, ushort from) {
  return cuda::FromLane(value, from);
}
template <typename T>
__device__ T simd_broadcast(T value, ushort from) {
  return cuda::FromLane(value, from);
}
template <typename T>
__device__ T simd_broadcast_first(T value) {
  return cuda::FromLane(value, __ffs(__activemask()) - 1);
}
template <typename T>
__device__ T simd_shuffle_xor(T value, ushort mask) {
  return cuda::ByWords(value, [mask](unsigned word) { return __shfl_xor_sync(cuda::kAllLanes, word, mask); });
}
template <typename T>
__device__ T simd_shuffle_up(T value, ushort delta) {
  return cuda::ByWords(value, [delta](unsigned word) { return __shfl_up_sync(cuda::kAllLanes, word, delta); });
}
template <typename T>
__device__ T simd_shuffle_down(T value, ushort delta) {
  return cuda::ByWords(value, [delta](unsigned word) { return __shfl_down_sync(cuda::kAllLanes, word, delta); });
}
template <typename T>
__device__ T simd_prefix_exclusive_sum(T value) {
  T total{};
  for (unsigned lane = 0; lane < 32; ++lane) {
    const T other = cuda::FromLane(value, lane);
    if (lane < cuda::LaneIndex()) total = static_cast<T>(total + other);
  }
  return total;
}
template <typename T>
__device__ T simd_prefix_inclusive_sum(T value) {
  return static_cast<T>(simd_prefix_exclusive_sum(value) + value);
}

enum memory_order { memory_order_relaxed };
template <typename T>
struct Atomic {
  T value;
};
using atomic_int = Atomic<int>;
using atomic_uint = Atomic<uint>;
template <typename T>
__device__ T atomic_load_explicit(const Atomic<T>* object, memory_order) {
  return *static_cast<const volatile T*>(&object->value);
}
template <typename T>
__device__ void atomic_store_explicit(Atomic<T>* object, std::common_type_t<T> value, memory_order) {
  *static_cast<volatile T*>(&object->value) = value;
}
#define KVFUSE_ATOMIC(name, builtin)                                                \
  template <typename T>                                                             \
  __device__ T name(Atomic<T>* object, std::common_type_t<T> value, memory_order) { \
    return builtin(&object->value, value);                                          \
  }
KVFUSE_ATOMIC(atomic_exchange_explicit, atomicExch)
KVFUSE_ATOMIC(atomic_fetch_add_explicit, atomicAdd)
KVFUSE_ATOMIC(atomic_fetch_sub_explicit, atomicSub)
KVFUSE_ATOMIC(atomic_fetch_min_explicit, atomicMin)
KVFUSE_ATOMIC(atomic_fetch_max_explicit, atomicMax)
KVFUSE_ATOMIC(atomic_fetch_and_explicit, atomicAnd)
KVFUSE_ATOMIC(atomic_fetch_or_explicit, atomicOr)
KVFUSE_ATOMIC(atomic_fetch_xor_explicit, atomicXor)
#undef KVFUSE_ATOMIC

}  // namespace kvfuse::metal
