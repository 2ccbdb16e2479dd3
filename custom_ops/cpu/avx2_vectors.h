// The operations of simd_isa.h for AVX2, and with KVFUSE_AVX_VNNI defined for AVX-VNNI.
//
// Without VNNI the product of bytes is vpmaddubsw, u8 x s8 in pairs into saturating int16. Nothing here saturates:
//   nibbles   a pair is at most 2 * 15 * 128 = 3840, and kSteps = 8 of them 30720 < 32767
//   bytes     as |q| x sign(k, q) with |k| <= 127 (no code is -128) and |q| <= 128 (the low plane of a weight may be
//             -128): a pair is at most 2 * 128 * 127 = 32512 < 32767, and goes to int32 at once
#pragma once

#include <immintrin.h>

#include "simd_isa.h"

namespace kvfuse {
namespace {

struct Vectors {
  using F = __m256;
  using I = __m256i;
  using B = __m256i;
  using Sum = __m256i;
  static constexpr int kLanes = 8, kAllBits = 0xff;

  KVFUSE_INLINE F Load(const float* at) { return _mm256_loadu_ps(at); }
  KVFUSE_INLINE F Load(const uint16_t* at) {  // IEEE halves
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  KVFUSE_INLINE I FirstLanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  KVFUSE_INLINE F LoadSome(const float* at, int count) { return _mm256_maskload_ps(at, FirstLanes(count)); }
  KVFUSE_INLINE F LoadSome(const uint16_t* at, int count) {
    uint16_t halves[8] = {};
    std::memcpy(halves, at, static_cast<size_t>(count) * 2);
    return Load(halves);
  }
  KVFUSE_INLINE void Store(float* at, F x) { _mm256_storeu_ps(at, x); }
  KVFUSE_INLINE void StoreSome(float* at, F x, int count) { _mm256_maskstore_ps(at, FirstLanes(count), x); }

  KVFUSE_INLINE F Set(float x) { return _mm256_set1_ps(x); }
  KVFUSE_INLINE F Add(F a, F b) { return _mm256_add_ps(a, b); }
  KVFUSE_INLINE F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  KVFUSE_INLINE F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  KVFUSE_INLINE F Div(F a, F b) { return _mm256_div_ps(a, b); }
  KVFUSE_INLINE F MulAdd(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  KVFUSE_INLINE F Min(F a, F b) { return _mm256_min_ps(a, b); }
  KVFUSE_INLINE F Max(F a, F b) { return _mm256_max_ps(a, b); }
  KVFUSE_INLINE F MaxNumber(F a, F b) { return _mm256_max_ps(a, b); }  // b when a is NaN
  KVFUSE_INLINE F Abs(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
  KVFUSE_INLINE F Floor(F x) { return _mm256_floor_ps(x); }
  KVFUSE_INLINE float ReduceAdd(F x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  KVFUSE_INLINE float ReduceMax(F x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
  // Stages 1, 2, 4: lane i and its partner p become i + p, or p - i where i is the upper.
  KVFUSE_INLINE F Butterflies(F x) {
    F p = _mm256_permute_ps(x, 0xb1);
    x = _mm256_blend_ps(_mm256_add_ps(x, p), _mm256_sub_ps(p, x), 0xaa), p = _mm256_permute_ps(x, 0x4e);
    x = _mm256_blend_ps(_mm256_add_ps(x, p), _mm256_sub_ps(p, x), 0xcc), p = _mm256_permute2f128_ps(x, x, 1);
    return _mm256_blend_ps(_mm256_add_ps(x, p), _mm256_sub_ps(p, x), 0xf0);
  }

  KVFUSE_INLINE F Mask(int bits) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), lanes), lanes));
  }
  KVFUSE_INLINE int Bits(F mask) { return _mm256_movemask_ps(mask); }
  KVFUSE_INLINE F Select(F mask, F yes, F no) { return _mm256_blendv_ps(no, yes, mask); }
  KVFUSE_INLINE F Less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  KVFUSE_INLINE F Equal(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }

  KVFUSE_INLINE I SetInt(int x) { return _mm256_set1_epi32(x); }
  KVFUSE_INLINE I AddInt(I a, I b) { return _mm256_add_epi32(a, b); }
  KVFUSE_INLINE I SubInt(I a, I b) { return _mm256_sub_epi32(a, b); }
  KVFUSE_INLINE I AndInt(I a, I b) { return _mm256_and_si256(a, b); }
  KVFUSE_INLINE I ToInt(F x) { return _mm256_cvtps_epi32(x); }  // rounds to nearest even
  KVFUSE_INLINE F ToFloat(I x) { return _mm256_cvtepi32_ps(x); }
  KVFUSE_INLINE F AddToExponent(F x, I n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(n, 23)));
  }
  KVFUSE_INLINE I ToInts(B x) { return x; }
  template <int kBits>
  KVFUSE_INLINE I ShiftLeft(I x) {
    return _mm256_slli_epi32(x, kBits);
  }
  template <int kBits>
  KVFUSE_INLINE I ShiftRight(I x) {
    return _mm256_srai_epi32(x, kBits);
  }
  KVFUSE_INLINE I ShiftRightBy(I x, int bits) { return _mm256_srl_epi32(x, _mm_cvtsi32_si128(bits)); }
  KVFUSE_INLINE int32_t ReduceAddInt(I x) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
  }
  // The low byte of each lane, for the first `count` lanes.
  KVFUSE_INLINE void StoreBytes(uint8_t* at, I x, int count) {
    const __m256i low = _mm256_shuffle_epi8(x, _mm256_set1_epi32(0x0c080400));  // in each half
    const uint32_t bytes[2] = {static_cast<uint32_t>(_mm256_extract_epi32(low, 0)),
                               static_cast<uint32_t>(_mm256_extract_epi32(low, 4))};
    if (count == 8)
      std::memcpy(at, bytes, 8);
    else
      std::memcpy(at, bytes, static_cast<size_t>(count));
  }

  KVFUSE_INLINE B LoadBytes(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
  KVFUSE_INLINE B LoadHalfBytes(const uint8_t* at) {
    return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  KVFUSE_INLINE B Broadcast4(const int8_t* at) {
    int32_t four;
    std::memcpy(&four, at, sizeof four);
    return _mm256_set1_epi32(four);
  }
  KVFUSE_INLINE B LowNibbles(B x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  KVFUSE_INLINE B HighNibbles(B x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
  KVFUSE_INLINE Sum NoSum() { return _mm256_setzero_si256(); }

#if defined(KVFUSE_AVX_VNNI)
  static constexpr int kSteps = 1 << 20, kByteOffset = 128;
  KVFUSE_INLINE Sum Step(Sum sum, B u, B q) { return _mm256_dpbusd_avx_epi32(sum, u, q); }
  KVFUSE_INLINE I Flush(I total, Sum sum) { return _mm256_add_epi32(total, sum); }
  KVFUSE_INLINE I FlushPlanes(I total, Sum high, Sum low) {
    return _mm256_add_epi32(total, _mm256_add_epi32(_mm256_slli_epi32(high, 8), low));
  }
  KVFUSE_INLINE B ByteCodes(B u) { return u; }
  KVFUSE_INLINE I ByteStep(I dot, B u, B q) { return _mm256_dpbusd_avx_epi32(dot, u, q); }
#else
  static constexpr int kSteps = 8, kByteOffset = 0;
  KVFUSE_INLINE Sum Step(Sum sum, B u, B q) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(u, q)); }
  KVFUSE_INLINE I Flush(I total, Sum sum) {
    return _mm256_add_epi32(total, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
  }
  KVFUSE_INLINE I FlushPlanes(I total, Sum high, Sum low) {
    return Flush(_mm256_add_epi32(total, _mm256_madd_epi16(high, _mm256_set1_epi16(256))), low);
  }
  KVFUSE_INLINE B ByteCodes(B u) { return _mm256_xor_si256(u, _mm256_set1_epi8(-128)); }  // signed, no offset
  KVFUSE_INLINE I ByteStep(I dot, B k, B q) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(k, q));
    return Flush(dot, pairs);
  }
#endif
};

}  // namespace
}  // namespace kvfuse
