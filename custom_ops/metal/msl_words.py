"""The part of the Metal Shading Language that the translator lets through: anything else is refused.

The shims (device/shim/) define every word of BUILTINS; a word is added here and there together.
"""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """The set of the words of a text."""
    return frozenset(text.split())


SCALARS = words(
    "bool char uchar short ushort int uint long ulong half float size_t ptrdiff_t "
    "int8_t uint8_t int16_t uint16_t int32_t uint32_t int64_t uint64_t"
)
VECTORS = frozenset(
    f"{scalar}{size}"
    for scalar in words("bool char uchar short ushort int uint long ulong half float")
    for size in (2, 3, 4)
)
ATOMICS = frozenset(("atomic_int", "atomic_uint"))

# Words that stand before a parenthesis without being a call.
KEYWORDS = words(
    "if for while switch return sizeof alignof alignas decltype static_assert constexpr else do case "
    "and or not operator explicit noexcept static_cast reinterpret_cast const_cast"
)

# C++ that Metal lacks (or that must not be used in a kernel), although a host compiler would take it.
FORBIDDEN = words(
    "double new delete throw try catch goto virtual dynamic_cast typeid thread_local std asm mutable "
    "printf malloc free memcpy memset __shared__ __global__ __device__ volatile"
)

MATH = words(
    "abs absdiff acos asin atan atan2 ceil clamp copysign cos cosh exp exp10 exp2 fabs fdim floor fma fmax "
    "fmin fmod fract isfinite isinf isnan isnormal ldexp log log10 log2 max min mix pow powr rint round "
    "rsqrt saturate select sign signbit sin sinh sqrt step tan tanh trunc dot any all length"
)
INTEGER = words("clz ctz popcount extract_bits insert_bits mulhi mul24 mad24 reverse_bits rotate")
SIMD = words(
    "simd_sum simd_product simd_max simd_min simd_and simd_or simd_xor simd_any simd_all "
    "simd_broadcast simd_broadcast_first simd_shuffle simd_shuffle_xor simd_shuffle_up simd_shuffle_down "
    "simd_prefix_inclusive_sum simd_prefix_exclusive_sum simd_is_first"
)
BARRIERS = frozenset(("threadgroup_barrier", "simdgroup_barrier"))
ATOMIC_CALLS = frozenset(
    f"atomic_{call}_explicit"
    for call in words(
        "load store exchange fetch_add fetch_sub fetch_min fetch_max fetch_and fetch_or fetch_xor"
    )
)
BUILTINS = MATH | INTEGER | SIMD | BARRIERS | ATOMIC_CALLS | {"as_type"}

# Parameters of a kernel that say where a thread is: attribute -> the member of `Position` in the shims.
POSITIONS = {
    "thread_position_in_grid": "thread_in_grid",
    "threadgroup_position_in_grid": "group",
    "thread_position_in_threadgroup": "thread_in_group",
    "thread_index_in_threadgroup": "thread",
    "thread_index_in_simdgroup": "lane",
    "simdgroup_index_in_threadgroup": "simdgroup",
    "threads_per_threadgroup": "threads",
    "threadgroups_per_grid": "groups",
    "threads_per_grid": "grid_threads",
    "simdgroups_per_threadgroup": "simdgroups",
    "threads_per_simdgroup": "simd_width",
}
ATTRIBUTES = frozenset(POSITIONS) | {
    "buffer",
    "function_constant",
    "host_name",
    "kernel",
    "max_total_threads_per_threadgroup",
}

SWIZZLES = words("xy xz xw yz yw zw yx wz xx yy zz ww xyz yzw xyzw")
