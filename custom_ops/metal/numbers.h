// Sums across a simdgroup, halves, integer dots. A part of kernels.metal.
#pragma once

inline float add_all(float x) {
  for (int step = 16; step > 0; step /= 2) x += simd_shuffle_xor(x, ushort(step));
  return x;
}

// The largest; NaN never is.
inline float largest(float x, float other) { return other > x ? other : x; }
inline float largest_of_all(float x) {
  for (int step = 16; step > 0; step /= 2) x = largest(x, simd_shuffle_xor(x, ushort(step)));
  return x;
}

inline uint or_all(uint x) {
  for (int step = 16; step > 0; step /= 2) x |= simd_shuffle_xor(x, ushort(step));
  return x;
}

inline float from_half(ushort bits) { return float(as_type<half>(bits)); }

// To nearest even; finite values beyond the range become 65504.
inline ushort to_half(float value) {
  const uint bits = as_type<uint>(value), magnitude = bits & 0x7fffffffu;
  const uint sign = (bits >> 16) & 0x8000u;
  if (magnitude > 0x7f800000u) return ushort(sign | 0x7e00u);
  if (magnitude == 0x7f800000u) return ushort(sign | 0x7c00u);
  if (magnitude >= 0x477ff000u) return ushort(sign | 0x7bffu);
  if (magnitude < 0x33000000u) return ushort(sign);
  const bool normal = magnitude >= 0x38800000u;
  const uint base = normal ? ((magnitude >> 23) - 112u) << 10 : 0u;
  const uint mantissa = normal ? magnitude & 0x7fffffu : (magnitude & 0x7fffffu) | 0x800000u;
  const uint shift = normal ? 13u : 126u - (magnitude >> 23);
  const uint rest = mantissa & ((1u << shift) - 1u), tie = 1u << (shift - 1u), kept = mantissa >> shift;
  const uint up = rest > tie || (rest == tie && (kept & 1u) != 0u) ? 1u : 0u;
  return ushort(sign | (base + kept + up));
}

// sum + the products of four signed bytes. Apple GPUs have no such instruction: 16-bit products, which they do at full
// rate and which hold 128 * 127, then 32-bit sums. A shim that has one (CUDA: __dp4a) defines it and KVFUSE_HAS_DOT4.
#ifndef KVFUSE_HAS_DOT4
inline int dot4(int a, int b, int sum) {
  const short4 products = short4(as_type<char4>(a)) * short4(as_type<char4>(b));
  return sum + (int(products.x) + int(products.y)) + (int(products.z) + int(products.w));
}
#endif

inline int byte_of(uint word, int index) { return int(word << (24 - 8 * index)) >> 24; }

// Eight codes + 8 of a word (channels 0..3 in the low nibbles, 4..7 in the high ones) times eight query codes.
inline int dot_nibbles(uint word, uint low, uint high, int sum) {
  if (kVariant == 0) {
    for (int i = 0; i < 4; ++i) {
      sum += int((word >> (8 * i)) & 15u) * byte_of(low, i);
      sum += int((word >> (8 * i + 4)) & 15u) * byte_of(high, i);
    }
    return sum;
  }
  return dot4(int((word >> 4) & 0x0f0f0f0fu), int(high), dot4(int(word & 0x0f0f0f0fu), int(low), sum));
}

inline int dot_bytes(uint word, uint query, int sum) {
  if (kVariant == 0) {
    for (int i = 0; i < 4; ++i) sum += byte_of(word, i) * byte_of(query, i);
    return sum;
  }
  return dot4(int(word), int(query), sum);
}

inline float dot_halves(uint word, float x, float y, float sum) {
  const half2 pair = as_type<half2>(word);
  return fma(float(pair.y), y, fma(float(pair.x), x, sum));
}
