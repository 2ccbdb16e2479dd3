// The operations of simd_isa.h for NEON, and with KVFUSE_NEON_DOTPROD defined for its dot-product instructions.
//
// Nibbles are 0..15 and fit int8, so sdot takes them as they are; 8-bit codes lose their offset by a flip of the upper
// bit. Without sdot, products of bytes go through int16: a pair is at most 2 * 127 * 128 = 32512 < 32767. The matrix
// instructions of i8mm want 8 neighbouring channels of a token, where the page has 4, and usdot would save no
// instruction over sdot: neither is used.
#pragma once

#include <arm_neon.h>

#include "simd_isa.h"

namespace kvfuse {
namespace {

struct Vectors {
  using F = float32x4_t;
  using I = int32x4_t;
  using B = int8x16_t;
  using Sum = int32x4_t;
  static constexpr int kLanes = 4, kAllBits = 0xf;

  KVFUSE_INLINE F Load(const float* at) { return vld1q_f32(at); }
  KVFUSE_INLINE F Load(const uint16_t* at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }  // IEEE halves
  KVFUSE_INLINE F LoadSome(const float* at, int count) {
    float some[4] = {};
    std::memcpy(some, at, static_cast<size_t>(count) * 4);
    return Load(some);
  }
  KVFUSE_INLINE F LoadSome(const uint16_t* at, int count) {
    uint16_t some[4] = {};
    std::memcpy(some, at, static_cast<size_t>(count) * 2);
    return Load(some);
  }
  KVFUSE_INLINE void Store(float* at, F x) { vst1q_f32(at, x); }
  KVFUSE_INLINE void StoreSome(float* at, F x, int count) {
    float all[4];
    Store(all, x);
    std::memcpy(at, all, static_cast<size_t>(count) * 4);
  }

  KVFUSE_INLINE F Set(float x) { return vdupq_n_f32(x); }
  KVFUSE_INLINE F Add(F a, F b) { return vaddq_f32(a, b); }
  KVFUSE_INLINE F Sub(F a, F b) { return vsubq_f32(a, b); }
  KVFUSE_INLINE F Mul(F a, F b) { return vmulq_f32(a, b); }
  KVFUSE_INLINE F Div(F a, F b) { return vdivq_f32(a, b); }
  KVFUSE_INLINE F MulAdd(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  KVFUSE_INLINE F Min(F a, F b) { return vminq_f32(a, b); }
  KVFUSE_INLINE F Max(F a, F b) { return vmaxq_f32(a, b); }
  KVFUSE_INLINE F MaxNumber(F a, F b) { return vmaxnmq_f32(a, b); }  // the other one where one is NaN
  KVFUSE_INLINE F Abs(F x) { return vabsq_f32(x); }
  KVFUSE_INLINE F Floor(F x) { return vrndmq_f32(x); }
  KVFUSE_INLINE float ReduceAdd(F x) { return vaddvq_f32(x); }
  KVFUSE_INLINE float ReduceMax(F x) { return vmaxnmvq_f32(x); }
  // Stages 1 and 2: lane i and its partner p become i + p, or p - i where i is the upper.
  KVFUSE_INLINE F Butterflies(F x) {
    F p = vrev64q_f32(x);
    x = vbslq_f32(Mask(0xa), vsubq_f32(p, x), vaddq_f32(x, p));
    p = vextq_f32(x, x, 2);
    return vbslq_f32(Mask(0xc), vsubq_f32(p, x), vaddq_f32(x, p));
  }

  KVFUSE_INLINE uint32x4_t Mask(int bits) {
    const uint32_t lanes[4] = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32(static_cast<uint32_t>(bits)), vld1q_u32(lanes));
  }
  KVFUSE_INLINE int Bits(uint32x4_t mask) {
    const uint32_t lanes[4] = {1, 2, 4, 8};
    return static_cast<int>(vaddvq_u32(vandq_u32(mask, vld1q_u32(lanes))));
  }
  KVFUSE_INLINE F Select(uint32x4_t mask, F yes, F no) { return vbslq_f32(mask, yes, no); }
  KVFUSE_INLINE uint32x4_t Less(F a, F b) { return vcltq_f32(a, b); }
  KVFUSE_INLINE uint32x4_t Equal(F a, F b) { return vceqq_f32(a, b); }

  KVFUSE_INLINE I SetInt(int x) { return vdupq_n_s32(x); }
  KVFUSE_INLINE I AddInt(I a, I b) { return vaddq_s32(a, b); }
  KVFUSE_INLINE I SubInt(I a, I b) { return vsubq_s32(a, b); }
  KVFUSE_INLINE I AndInt(I a, I b) { return vandq_s32(a, b); }
  KVFUSE_INLINE I ToInt(F x) { return vcvtnq_s32_f32(x); }  // rounds to nearest even
  KVFUSE_INLINE F ToFloat(I x) { return vcvtq_f32_s32(x); }
  KVFUSE_INLINE F AddToExponent(F x, I n) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(n, 23)));
  }
  KVFUSE_INLINE I ToInts(B x) { return vreinterpretq_s32_s8(x); }
  template <int kBits>
  KVFUSE_INLINE I ShiftLeft(I x) {
    return vshlq_n_s32(x, kBits);
  }
  template <int kBits>
  KVFUSE_INLINE I ShiftRight(I x) {
    return vshrq_n_s32(x, kBits);
  }
  KVFUSE_INLINE I ShiftRightBy(I x, int bits) {
    return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x), vdupq_n_s32(-bits)));
  }
  KVFUSE_INLINE int32_t ReduceAddInt(I x) { return vaddvq_s32(x); }
  // The low byte of each lane, for the first `count` lanes.
  KVFUSE_INLINE void StoreBytes(uint8_t* at, I x, int count) {
    const int16x4_t words = vmovn_s32(x);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    const uint32_t four = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
    if (count == 4)
      std::memcpy(at, &four, 4);
    else
      std::memcpy(at, &four, static_cast<size_t>(count));
  }

  KVFUSE_INLINE B LoadBytes(const uint8_t* at) { return vreinterpretq_s8_u8(vld1q_u8(at)); }
  KVFUSE_INLINE B LoadHalfBytes(const uint8_t* at) { return LoadBytes(at); }  // no line has less than four lanes
  KVFUSE_INLINE B Broadcast4(const int8_t* at) {
    int32_t four;
    std::memcpy(&four, at, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  KVFUSE_INLINE B LowNibbles(B x) { return vandq_s8(x, vdupq_n_s8(15)); }
  KVFUSE_INLINE B HighNibbles(B x) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x), 4)); }

  static constexpr int kSteps = 1 << 20, kByteOffset = 0;
  KVFUSE_INLINE Sum NoSum() { return vdupq_n_s32(0); }
#if defined(KVFUSE_NEON_DOTPROD)
  KVFUSE_INLINE Sum Step(Sum sum, B u, B q) { return vdotq_s32(sum, u, q); }
#else
  KVFUSE_INLINE Sum Step(Sum sum, B u, B q) {
    const int16x8_t low = vmull_s8(vget_low_s8(u), vget_low_s8(q)), high = vmull_high_s8(u, q);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
  }
#endif
  KVFUSE_INLINE I Flush(I total, Sum sum) { return vaddq_s32(total, sum); }
  KVFUSE_INLINE I FlushPlanes(I total, Sum high, Sum low) {
    return vaddq_s32(total, vaddq_s32(vshlq_n_s32(high, 8), low));
  }
  KVFUSE_INLINE B ByteCodes(B u) { return veorq_s8(u, vdupq_n_s8(-128)); }  // signed, no offset
  KVFUSE_INLINE I ByteStep(I dot, B k, B q) { return Step(dot, k, q); }
};

}  // namespace
}  // namespace kvfuse
