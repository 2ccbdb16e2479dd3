// The inner loops of tile_attend.h for AVX-512 with VNNI: vpdpbusd on lines of 16 tokens (keys) or 16 channels
// (values). Only files whose tables dispatch.cc guards may include it.
//
// The instruction set is switched on for each function below and not for the file: with file-wide flags, inline
// functions of shared headers would be compiled for it too, and the linker might keep those for everyone.
#pragma once

#include <immintrin.h>

#include "tile_encode.h"

#define KVFUSE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")))
#define KVFUSE_AVX512_INLINE KVFUSE_AVX512 inline __attribute__((always_inline))

namespace kvfuse::avx512_vnni {
namespace {

using tiles::Planes;

constexpr int kLines = kPageTokens / 16;  // of a tile, 16 tokens each

// The first `count` of 16 lanes.
KVFUSE_AVX512_INLINE __mmask16 First(int count) {
  return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

KVFUSE_AVX512_INLINE __m512 Load(const float* at, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, at); }
KVFUSE_AVX512_INLINE __m512 Load(const uint16_t* at, __mmask16 mask) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at));
}

// sum += u8 x s8 over 4 channels, lane by lane. Spelt out because the compiler's intrinsic costs register copies.
KVFUSE_AVX512_INLINE void AddDot(__m512i& sum, __m512i codes, __m512i weights) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(weights));
}

KVFUSE_AVX512_INLINE __m512i Broadcast4(const int8_t* at) {
  int32_t four;
  std::memcpy(&four, at, sizeof four);
  return _mm512_set1_epi32(four);
}

KVFUSE_AVX512_INLINE __m512 Scales16(const SideFormat& side, const uint8_t* bytes, int group, int token) {
  const uint8_t* at = bytes + tiles::ScaleOffset(side, group, token);
  if (side.group_size == 0) return _mm512_loadu_ps(at);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// exp(x) for x <= 0, NaN for NaN: 2^floor(t) * p(t - floor(t)) with t = x log2(e); p is the polynomial of degree 6 with
// the least relative error over [0, 1) (8e-9 with its coefficients in f32); what t loses by rounding, and log2(e) to
// f32, is added to the fraction. Below -104 the result is 0 in f32.
KVFUSE_AVX512_INLINE __m512 Exp16(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // the second operand is kept when it is NaN
  const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269502f));
  const __m512 lost =
      _mm512_fmadd_ps(x, _mm512_set1_ps(1.925963e-8f), _mm512_fmsub_ps(x, _mm512_set1_ps(1.44269502f), t));
  const __m512 f = _mm512_add_ps(_mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), lost);
  __m512 p = _mm512_set1_ps(2.1702255e-4f);
  for (const float c : {1.2439688e-3f, 9.6788406e-3f, 5.5483341e-2f, 0.24022983f, 0.69314700f, 1.0f})
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, t);
}

// tanh, off by less than 2e-7: (1 - e) / (1 + e) with e = exp(-2 |x|), and a Taylor series near 0.
KVFUSE_AVX512_INLINE __m512 Tanh16(__m512 x) {
  const __m512 size = _mm512_abs_ps(x), e = Exp16(_mm512_mul_ps(size, _mm512_set1_ps(-2.0f)));
  const __m512 one = _mm512_set1_ps(1.0f), square = _mm512_mul_ps(x, x);
  const __m512 far = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  __m512 near = _mm512_set1_ps(62.0f / 2835.0f);
  for (const float c : {-17.0f / 315.0f, 2.0f / 15.0f, -1.0f / 3.0f, 1.0f})
    near = _mm512_fmadd_ps(near, square, _mm512_set1_ps(c));
  const __m512 signed_far = _mm512_or_ps(far, _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
  const __mmask16 small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.25f), _CMP_LT_OQ);
  return _mm512_mask_mul_ps(signed_far, small, near, x);
}

// scores[i * kSpanTokens + t] = sum over groups of s_k * (int32 dot), for the 64 tokens of a tile. Codes are stored
// with an offset o (8 or 128), so dot = sum u * q - o * sum q.
template <int N, int kBits>
KVFUSE_AVX512 void KeyScoresOf(const SideFormat& side, const uint8_t* bytes, const int8_t* const* codes,
                               const int32_t* const* code_sums, float* scores, const uint8_t* next) {
  constexpr int kOffset = kBits == 4 ? 8 : 128, kChannels = kBits == 4 ? 8 : 4;
  const __m512i nibbles = _mm512_set1_epi8(15);
  const uint8_t* line = bytes;
  const int64_t ahead = next - bytes;
  __m512 totals[N][kLines];
  for (int g = 0; g < side.groups(); ++g) {
    const int first = g * side.group_width(), last = std::min(side.dim, first + side.group_width());
    __m512i dots[N][kLines];
    for (int i = 0; i < N; ++i)
      for (int l = 0; l < kLines; ++l) dots[i][l] = _mm512_set1_epi32(-kOffset * code_sums[i][g]);
    for (int c = first; c < last; c += kChannels, line += 64 * kLines) {
      __m512i q[N], r[N];
      for (int i = 0; i < N; ++i) q[i] = Broadcast4(codes[i] + c);
      for (int i = 0; i < N && kBits == 4; ++i) r[i] = Broadcast4(codes[i] + c + 4);
      for (int l = 0; l < kLines; ++l) {
        _mm_prefetch(reinterpret_cast<const char*>(line + ahead + 64 * l), _MM_HINT_T0);
        const __m512i u = _mm512_load_si512(line + 64 * l);
        if (kBits == 4) {
          const __m512i low = _mm512_and_si512(u, nibbles);
          const __m512i high = _mm512_and_si512(_mm512_srli_epi16(u, 4), nibbles);
          for (int i = 0; i < N; ++i) AddDot(dots[i][l], low, q[i]);
          for (int i = 0; i < N; ++i) AddDot(dots[i][l], high, r[i]);
        } else {
          for (int i = 0; i < N; ++i) AddDot(dots[i][l], u, q[i]);
        }
      }
    }
    for (int l = 0; l < kLines; ++l) {
      const __m512 scales = Scales16(side, bytes, g, 16 * l);
      for (int i = 0; i < N; ++i) {
        const __m512 score = _mm512_mul_ps(scales, _mm512_cvtepi32_ps(dots[i][l]));
        totals[i][l] = g == 0 ? score : _mm512_add_ps(totals[i][l], score);
      }
    }
  }
  for (int i = 0; i < N; ++i)
    for (int l = 0; l < kLines; ++l) _mm512_store_ps(scores + i * tiles::kSpanTokens + 16 * l, totals[i][l]);
}

// sums[i][c] += factors[i] * (sum over tokens of (256 * high + low) * code) over the tiles that have bytes.
template <int N, int kBits>
KVFUSE_AVX512 void AddSplitValuesOf(const SideFormat& side, const tiles::SpanBytes& bytes, int tiles,
                                    const Planes* planes, const float* factors, float* const* sums) {
  constexpr int kHalves = kBits == 4 ? 2 : 1;
  const __m512i nibbles = _mm512_set1_epi8(15);
  for (int c = 0; c < side.dim;) {
    const tiles::ValueChunk chunk = tiles::ValueChunkAt(side, c);
    const Planes& plane = planes[c / side.group_width()];
    const __mmask16 lanes = First(chunk.lanes);
    const int64_t stride = 4 * chunk.lanes;
    __m512i high[N][kHalves], low[N][kHalves];
    for (int i = 0; i < N; ++i)
      for (int h = 0; h < kHalves; ++h) high[i][h] = low[i][h] = _mm512_setzero_si512();
    for (int k = 0; k < tiles; ++k) {
      if (bytes.tiles[k] == nullptr) continue;
      const uint8_t* line = bytes.tiles[k] + chunk.offset;
      const int64_t ahead = bytes.next[k] - bytes.tiles[k];
      const int8_t* words = plane.high + k * kPageTokens;
      for (const int8_t* end = words + kPageTokens; words < end; line += stride, words += 4) {
        _mm_prefetch(reinterpret_cast<const char*>(line + ahead), _MM_HINT_T0);
        __m512i codes[2];
        codes[0] = _mm512_maskz_loadu_epi32(lanes, line);
        if (kBits == 4) {
          codes[1] = _mm512_and_si512(_mm512_srli_epi16(codes[0], 4), nibbles);
          codes[0] = _mm512_and_si512(codes[0], nibbles);
        }
        for (int i = 0; i < N; ++i) {
          const __m512i h4 = Broadcast4(words + i * tiles::kPlaneStride);
          const __m512i l4 = Broadcast4(words + i * tiles::kPlaneStride + tiles::kSpanTokens);
          for (int h = 0; h < kHalves; ++h) AddDot(high[i][h], codes[h], h4);
          for (int h = 0; h < kHalves; ++h) AddDot(low[i][h], codes[h], l4);
        }
      }
    }
    for (int i = 0; i < N; ++i) {
      const __m512i offset = _mm512_slli_epi32(_mm512_set1_epi32(plane.sums[i]), kBits == 4 ? 3 : 7);  // times o
      const __m512 factor = _mm512_set1_ps(factors[i]);
      for (int h = 0; h < kHalves; ++h) {
        // In the end at most 256 tokens * 32640 * 128 < 2^31; what wraps on the way wraps back.
        const __m512i dot = _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(high[i][h], 8), low[i][h]), offset);
        float* at = sums[i] + c + h * chunk.lanes;
        const __m512 grown = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(dot), _mm512_maskz_loadu_ps(lanes, at));
        _mm512_mask_storeu_ps(at, lanes, grown);
      }
    }
    c += chunk.width;
  }
}

// The sums of the lanes of four vectors.
KVFUSE_AVX512_INLINE __m128 Sums(__m512 a, __m512 b, __m512 c, __m512 d) {
  const auto half = [](__m512 x) __attribute__((target("avx512f,avx512dq"), always_inline)) {
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  };
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(half(a), half(b)), _mm256_hadd_ps(half(c), half(d)));
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

// Four rows at a time, so that each load serves N queries or four rows.
template <int N, typename T>
KVFUSE_AVX512 void DotBatchOf(const void* const* rows, uint64_t mask, const float* const* queries, int dim,
                              float* const* dots) {
  while (mask != 0) {
    int tokens[4];
    const T* row[4];
    for (int j = 0; j < 4; ++j) {  // the last one again when fewer are left
      tokens[j] = mask != 0 ? __builtin_ctzll(mask) : tokens[j - 1];
      mask &= mask - 1;
      row[j] = static_cast<const T*>(rows[tokens[j]]);
    }
    __m512 sums[N][4];
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < 4; ++j) sums[i][j] = _mm512_setzero_ps();
    for (int c = 0; c < dim; c += 16) {
      const __mmask16 lanes = First(dim - c);
      __m512 r[4];
      for (int j = 0; j < 4; ++j) r[j] = Load(row[j] + c, lanes);
      for (int i = 0; i < N; ++i) {
        const __m512 q = Load(queries[i] + c, lanes);
        for (int j = 0; j < 4; ++j) sums[i][j] = _mm512_fmadd_ps(q, r[j], sums[i][j]);
      }
    }
    for (int i = 0; i < N; ++i) {
      alignas(16) float four[4];
      _mm_store_ps(four, Sums(sums[i][0], sums[i][1], sums[i][2], sums[i][3]));
      for (int j = 0; j < 4; ++j) dots[i][tokens[j]] = four[j];
    }
  }
}

// 64 channels at a time, so that each load serves N queries. Each query adds up its own tokens in their order, whoever
// else is here: a chunk of another size gives the same sums. (A weight of 0 would not do: the row may hold a NaN.)
template <int N, typename T>
KVFUSE_AVX512 void AddBatchOf(const void* const* rows, const uint64_t* masks, const float* const* weights,
                              const float* factors, float* const* sums, int dim) {
  uint64_t any = 0;
  for (int i = 0; i < N; ++i) any |= masks[i];
  for (int c = 0; c < dim; c += 64) {
    __mmask16 lanes[4];
    __m512 totals[N][4];
    for (int j = 0; j < 4; ++j) {
      lanes[j] = First(std::max(0, dim - c - 16 * j));
      for (int i = 0; i < N; ++i) totals[i][j] = _mm512_setzero_ps();
    }
    for (uint64_t left = any; left != 0; left &= left - 1) {
      const int t = __builtin_ctzll(left);
      const T* row = static_cast<const T*>(rows[t]) + c;
      __m512 r[4];
      for (int j = 0; j < 4; ++j) r[j] = Load(row + 16 * j, lanes[j]);
      for (int i = 0; i < N; ++i) {
        const __m512 weight = _mm512_set1_ps(weights[i][t]);
        const auto seen = static_cast<__mmask16>(-static_cast<int>(masks[i] >> t & 1));
        for (int j = 0; j < 4; ++j) totals[i][j] = _mm512_mask3_fmadd_ps(weight, r[j], totals[i][j], seen);
      }
    }
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < 4; ++j) {
        float* at = sums[i] + c + 16 * j;
        const __m512 grown = _mm512_fmadd_ps(_mm512_set1_ps(factors[i]), totals[i][j], Load(at, lanes[j]));
        _mm512_mask_storeu_ps(at, lanes[j], grown);
      }
  }
}

struct Isa {
  static constexpr int kQueries = 4;

  KVFUSE_AVX512 static void Rotate(float* row, int dim) {
    while (dim >= 16) {
      int block = 16;
      while (block * 2 <= dim) block *= 2;
      const __m512 norm = _mm512_set1_ps(1.0f / std::sqrt(static_cast<float>(block)));
      // Stages 1, 2, 4, 8 within a register: lane i and its partner p become i + p, or p - i where i is the upper.
      for (int i = 0; i < block; i += 16) {
        __m512 x = _mm512_loadu_ps(row + i), p = _mm512_permute_ps(x, 0xb1);
        x = _mm512_mask_sub_ps(_mm512_add_ps(x, p), 0xaaaa, p, x), p = _mm512_permute_ps(x, 0x4e);
        x = _mm512_mask_sub_ps(_mm512_add_ps(x, p), 0xcccc, p, x), p = _mm512_shuffle_f32x4(x, x, 0xb1);
        x = _mm512_mask_sub_ps(_mm512_add_ps(x, p), 0xf0f0, p, x), p = _mm512_shuffle_f32x4(x, x, 0x4e);
        x = _mm512_mask_sub_ps(_mm512_add_ps(x, p), 0xff00, p, x);
        _mm512_storeu_ps(row + i, block == 16 ? _mm512_mul_ps(x, norm) : x);
      }
      for (int half = 16; half < block; half *= 2)
        for (int start = 0; start < block; start += 2 * half)
          for (int i = start; i < start + half; i += 16) {
            const __m512 a = _mm512_loadu_ps(row + i), b = _mm512_loadu_ps(row + i + half);
            __m512 sum = _mm512_add_ps(a, b), difference = _mm512_sub_ps(a, b);
            if (2 * half == block) sum = _mm512_mul_ps(sum, norm), difference = _mm512_mul_ps(difference, norm);
            _mm512_storeu_ps(row + i, sum);
            _mm512_storeu_ps(row + i + half, difference);
          }
      row += block;
      dim -= block;
    }
    reference::Rotate(row, dim);
  }

  KVFUSE_AVX512 static bool Finite(const float* row, int dim) {
    __mmask16 bad = 0;
    for (int i = 0; i < dim; i += 16)
      bad |= _mm512_fpclass_ps_mask(Load(row + i, First(dim - i)), 0x99);  // NaN or infinite
    return bad == 0;
  }

  // The element of largest size, the first of equals.
  KVFUSE_AVX512 static float Extreme(const float* row, int dim) {
    __m512 largest = _mm512_setzero_ps();
    for (int i = 0; i < dim; i += 16) largest = _mm512_max_ps(largest, _mm512_abs_ps(Load(row + i, First(dim - i))));
    const float size = _mm512_reduce_max_ps(largest);
    for (int i = 0; size > 0.0f && i < dim; i += 16) {
      const __mmask16 found =
          _mm512_cmp_ps_mask(_mm512_abs_ps(Load(row + i, First(dim - i))), _mm512_set1_ps(size), _CMP_EQ_OQ);
      if (found != 0) return row[i + __builtin_ctz(found)];
    }
    return 0.0f;
  }

  // codes[i] = clamp(rint(x / scale), low, high) + offset
  KVFUSE_AVX512 static void Codes(const float* row, int dim, float scale, int low, int high, int offset,
                                  uint8_t* codes) {
    for (int i = 0; i < dim; i += 16) {
      const __mmask16 mask = First(dim - i);
      const __m512 x = _mm512_div_ps(Load(row + i, mask), _mm512_set1_ps(scale));
      const __m512 bounded = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(low)), _mm512_set1_ps(high));
      const __m512i code = _mm512_add_epi32(_mm512_cvtps_epi32(bounded), _mm512_set1_epi32(offset));
      _mm512_mask_cvtepi32_storeu_epi8(codes + i, mask, code);
    }
  }

  // int8 codes of a rotated query and their sums by key group; gives their scale.
  KVFUSE_AVX512 static float QuantizeQuery(const SideFormat& side, const float* row, int8_t* codes, int32_t* sums) {
    if (!Finite(row, side.dim)) {
      std::memset(codes, 0, side.dim);
      std::fill(sums, sums + side.groups(), 0);
      return std::numeric_limits<float>::quiet_NaN();
    }
    float scale = std::fabs(Extreme(row, side.dim)) / 127.0f;
    if (scale == 0.0f) scale = 1.0f;
    Codes(row, side.dim, scale, -127, 127, 0, reinterpret_cast<uint8_t*>(codes));
    for (int g = 0; g < side.groups(); ++g) {
      const int first = g * side.group_width(), last = std::min(side.dim, first + side.group_width());
      __m512i sum = _mm512_setzero_si512();
      for (int c = first; c < last; c += 64) {
        const __mmask64 there = last - c >= 64 ? ~__mmask64{0} : (__mmask64{1} << (last - c)) - 1;
        AddDot(sum, _mm512_set1_epi8(1), _mm512_maskz_loadu_epi8(there, codes + c));
      }
      sums[g] = _mm512_reduce_add_epi32(sum);
    }
    return scale;
  }

  KVFUSE_AVX512 static uint64_t NonZero(const uint8_t* bytes, int count) {
    const __mmask64 there = count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
    const __m512i loaded = _mm512_maskz_loadu_epi8(there, bytes);
    return _mm512_test_epi8_mask(loaded, loaded);
  }

  // For at most 16 numbers.
  KVFUSE_AVX512 static void Exp(const float* x, int count, float* out) {
    _mm512_mask_storeu_ps(out, First(count), Exp16(Load(x, First(count))));
  }

  static void KeyScores(const SideFormat& side, const uint8_t* bytes, const int8_t* const* codes,
                        const int32_t* const* sums, int n, float* scores, const uint8_t* next) {
    using Function = void (*)(const SideFormat&, const uint8_t*, const int8_t* const*, const int32_t* const*, float*,
                              const uint8_t*);
    static constexpr Function four[] = {KeyScoresOf<1, 4>, KeyScoresOf<2, 4>, KeyScoresOf<3, 4>, KeyScoresOf<4, 4>};
    static constexpr Function eight[] = {KeyScoresOf<1, 8>, KeyScoresOf<2, 8>, KeyScoresOf<3, 8>, KeyScoresOf<4, 8>};
    (side.bits == 4 ? four : eight)[n - 1](side, bytes, codes, sums, scores, next);
  }

  // dots[t] = row . query for the rows of `mask`
  template <typename T>
  KVFUSE_AVX512 static void DotRows(const void* const* rows, uint64_t mask, const float* query, int dim, float* dots) {
    for (; mask != 0; mask &= mask - 1) {
      const int t = __builtin_ctzll(mask);
      const T* row = static_cast<const T*>(rows[t]);
      __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
      int i = 0;
      for (; i + 32 <= dim; i += 32) {
        even = _mm512_fmadd_ps(Load(row + i, 0xffff), _mm512_loadu_ps(query + i), even);
        odd = _mm512_fmadd_ps(Load(row + i + 16, 0xffff), _mm512_loadu_ps(query + i + 16), odd);
      }
      for (; i < dim; i += 16)
        even = _mm512_fmadd_ps(Load(row + i, First(dim - i)), Load(query + i, First(dim - i)), even);
      dots[t] = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
    }
  }

  // dots[i][t] = row . queries[i]
  template <typename T>
  static void DotBatch(const void* const* rows, uint64_t mask, const float* const* queries, int n, int dim,
                       float* const* dots) {
    using Function = void (*)(const void* const*, uint64_t, const float* const*, int, float* const*);
    static constexpr Function functions[] = {DotBatchOf<1, T>, DotBatchOf<2, T>, DotBatchOf<3, T>, DotBatchOf<4, T>};
    for (int i = 0; i < n; i += 4) functions[std::min(3, n - i - 1)](rows, mask, queries + i, dim, dots + i);
  }

  // sums[i] += factors[i] * weights[i][t] * row for the rows of masks[i]
  template <typename T>
  static void AddBatch(const void* const* rows, const uint64_t* masks, const float* const* weights,
                       const float* factors, int n, float* const* sums, int dim) {
    using Function =
        void (*)(const void* const*, const uint64_t*, const float* const*, const float*, float* const*, int);
    static constexpr Function functions[] = {AddBatchOf<1, T>, AddBatchOf<2, T>, AddBatchOf<3, T>, AddBatchOf<4, T>};
    for (int i = 0; i < n; i += 4)
      functions[std::min(3, n - i - 1)](rows, masks + i, weights + i, factors + i, sums + i, dim);
  }

  // sum += factor * weights[t] * row for the rows of `mask`
  template <typename T>
  KVFUSE_AVX512 static void AddRows(const void* const* rows, uint64_t mask, const float* weights, float factor,
                                    float* sum, int dim) {
    for (int c = 0; c < dim; c += 64) {
      __mmask16 lanes[4];
      __m512 total[4];
      for (int i = 0; i < 4; ++i) {
        lanes[i] = First(std::max(0, dim - c - 16 * i));
        total[i] = Load(sum + c + 16 * i, lanes[i]);
      }
      for (uint64_t left = mask; left != 0; left &= left - 1) {
        const int t = __builtin_ctzll(left);
        const T* row = static_cast<const T*>(rows[t]) + c;
        const __m512 weight = _mm512_set1_ps(factor * weights[t]);
        for (int i = 0; i < 4; ++i)
          if (lanes[i] != 0) total[i] = _mm512_fmadd_ps(weight, Load(row + 16 * i, lanes[i]), total[i]);
      }
      for (int i = 0; i < 4; ++i) _mm512_mask_storeu_ps(sum + c + 16 * i, lanes[i], total[i]);
    }
  }

  // The scores of a span, kNegativeInfinity where none is seen; gives the largest, or 0 when all that are seen are NaN.
  KVFUSE_AVX512 static float Scores(const tiles::SoftmaxArgs& args, float* scores_out) {
    const __m512 hidden = _mm512_set1_ps(kNegativeInfinity), low_scale = _mm512_set1_ps(args.low_scale);
    const bool plain = !args.exact_mask.any() && args.softcap == 0.0f && args.bias == nullptr;
    __m512 largest = hidden;
    for (int k = 0; k < args.tiles; ++k) {
      // Lanes that no mask names hold anything until they are hidden.
      const float* low = args.low + k * kPageTokens;
      __m512 scores[kLines];
      for (int l = 0; l < kLines; ++l) scores[l] = _mm512_mul_ps(low_scale, _mm512_load_ps(low + 16 * l));
      for (int l = 0; args.addend != nullptr && l < kLines; ++l)
        scores[l] = _mm512_add_ps(scores[l], _mm512_load_ps(args.addend + k * kPageTokens + 16 * l));
      if (!plain) Adjust(args, k, scores);
      const uint64_t seen = args.low_mask.words[k] | args.exact_mask.words[k];
      for (int l = 0; l < kLines; ++l) {
        scores[l] = _mm512_mask_mov_ps(hidden, static_cast<__mmask16>(seen >> (16 * l)), scores[l]);
        _mm512_store_ps(scores_out + k * kPageTokens + 16 * l, scores[l]);
      }
      // The second operand is kept beside a NaN.
      for (int l = 0; l < kLines; ++l) largest = _mm512_max_ps(scores[l], largest);
    }
    const float maximum = _mm512_reduce_max_ps(largest);
    if (maximum != kNegativeInfinity) return maximum;
    __mmask16 nan = 0;
    for (int t = 0; t < args.tiles * kPageTokens; t += 16)
      nan |= _mm512_fpclass_ps_mask(_mm512_load_ps(scores_out + t), 0x81);
    return nan == 0 ? kNegativeInfinity : 0.0f;
  }

  // exp(score - maximum) in their place; gives the sum.
  KVFUSE_AVX512 static float Powers(float* scores, int tiles, float maximum) {
    const __m512 top = _mm512_set1_ps(maximum);
    __m512 sum = _mm512_setzero_ps();
    for (int k = 0; k < tiles; ++k, scores += kPageTokens) {
      __m512 w[kLines];
      for (int l = 0; l < kLines; ++l) w[l] = Exp16(_mm512_sub_ps(_mm512_load_ps(scores + 16 * l), top));
      for (int l = 0; l < kLines; ++l) _mm512_store_ps(scores + 16 * l, w[l]);
      sum = _mm512_add_ps(sum, _mm512_add_ps(_mm512_add_ps(w[0], w[1]), _mm512_add_ps(w[2], w[3])));
    }
    return _mm512_reduce_add_ps(sum);
  }

  // The rarer parts of a tile's scores: exact keys, soft cap, bias.
  KVFUSE_AVX512 static void Adjust(const tiles::SoftmaxArgs& args, int k, __m512* scores) {
    const __m512 scale = _mm512_set1_ps(args.scale), cap = _mm512_set1_ps(args.softcap);
    for (int l = 0; l < kLines; ++l) {
      const int t = k * kPageTokens + 16 * l;
      const auto exact = static_cast<__mmask16>(args.exact_mask.words[k] >> (16 * l));
      const auto seen = static_cast<__mmask16>(exact | args.low_mask.words[k] >> (16 * l));
      scores[l] = _mm512_mask_mul_ps(scores[l], exact, scale, _mm512_load_ps(args.exact + t));
      if (args.softcap > 0.0f) scores[l] = _mm512_mul_ps(cap, Tanh16(_mm512_div_ps(scores[l], cap)));
      if (args.bias != nullptr)
        scores[l] = _mm512_add_ps(
            scores[l], args.bias_stride == 0 ? _mm512_set1_ps(*args.bias) : _mm512_maskz_loadu_ps(seen, args.bias + t));
    }
  }

  // The largest |weight * scale| of a span; NaN when one of them is: as integers, the bits of floats without a sign are
  // in the order of the floats, with NaN above all.
  KVFUSE_AVX512 static float Largest(const SideFormat& side, const tiles::SpanBytes& bytes, int tiles,
                                     const tiles::SpanMask& mask, const float* weights) {
    const __m512i unsign = _mm512_set1_epi32(0x7fffffff);
    __m512i largest = _mm512_setzero_si512();
    __m512 products[kLines];
    for (int g = 0; g < side.groups(); ++g)
      for (int k = 0; k < tiles; ++k) {
        if (bytes.tiles[k] == nullptr) continue;
        Products(side, bytes.tiles[k], mask.words[k], weights + k * kPageTokens, g, products);
        for (int l = 0; l < kLines; ++l)
          largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_castps_si512(products[l]), unsign));
      }
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float size;
    std::memcpy(&size, &bits, sizeof size);
    return size;
  }

  // The weights times the scales of each group, in steps of 1 / steps, as 16-bit integers in the two planes of query i.
  KVFUSE_AVX512 static void Split(const SideFormat& side, const tiles::SpanBytes& bytes, int tiles,
                                  const tiles::SpanMask& mask, const float* weights, float steps, int i,
                                  const Planes* planes) {
    const __m512 inverse = _mm512_set1_ps(steps);
    __m512 products[kLines];
    for (int g = 0; g < side.groups(); ++g) {
      __m512i sum = _mm512_setzero_si512();
      int8_t* at = planes[g].high + i * tiles::kPlaneStride;
      for (int k = 0; k < tiles; ++k, at += kPageTokens) {
        if (bytes.tiles[k] == nullptr) continue;
        Products(side, bytes.tiles[k], mask.words[k], weights + k * kPageTokens, g, products);
        for (int l = 0; l < kLines; ++l) {
          const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(products[l], inverse));
          sum = _mm512_add_epi32(sum, whole);
          const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
          _mm_store_si128(reinterpret_cast<__m128i*>(at + 16 * l), _mm512_cvtepi32_epi8(high));
          _mm_store_si128(reinterpret_cast<__m128i*>(at + tiles::kSpanTokens + 16 * l), _mm512_cvtepi32_epi8(whole));
        }
      }
      planes[g].sums[i] = _mm512_reduce_add_epi32(sum);
    }
  }

  // weight * scale of a tile's tokens, zero where the mask names none: those may be NaN.
  KVFUSE_AVX512_INLINE static void Products(const SideFormat& side, const uint8_t* tile, uint64_t mask,
                                            const float* weights, int group, __m512* products) {
    const uint8_t* scales = tile + tiles::ScaleOffset(side, group, 0);
    if (side.group_size == 0) {
      for (int l = 0; l < kLines; ++l)
        products[l] = _mm512_maskz_mul_ps(static_cast<__mmask16>(mask >> (16 * l)), _mm512_load_ps(weights + 16 * l),
                                          _mm512_loadu_ps(scales + 64 * l));
    } else {
      for (int l = 0; l < kLines; ++l)
        products[l] =
            _mm512_maskz_mul_ps(static_cast<__mmask16>(mask >> (16 * l)), _mm512_load_ps(weights + 16 * l),
                                _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + 32 * l))));
    }
  }

  static void AddSplitValues(const SideFormat& side, const tiles::SpanBytes& bytes, int tiles, const Planes* planes,
                             int n, const float* factors, float* const* sums) {
    using Function =
        void (*)(const SideFormat&, const tiles::SpanBytes&, int, const Planes*, const float*, float* const*);
    static constexpr Function four[] = {AddSplitValuesOf<1, 4>, AddSplitValuesOf<2, 4>, AddSplitValuesOf<3, 4>,
                                        AddSplitValuesOf<4, 4>};
    static constexpr Function eight[] = {AddSplitValuesOf<1, 8>, AddSplitValuesOf<2, 8>, AddSplitValuesOf<3, 8>,
                                         AddSplitValuesOf<4, 8>};
    (side.bits == 4 ? four : eight)[n - 1](side, bytes, tiles, planes, factors, sums);
  }

  // The same in f32: sum[c] += factor * weights[t] * scale * code for the tokens of `mask`.
  KVFUSE_AVX512 static void AddValues(const SideFormat& side, const uint8_t* bytes, uint64_t mask, const float* weights,
                                      float factor, float* sum) {
    const int width = 8 / side.bits;  // codes to a byte
    const __m512i code_mask = _mm512_set1_epi32((1 << side.bits) - 1);
    const __m512i offset = _mm512_set1_epi32(side.bits == 4 ? 8 : 128);
    for (int c = 0; c < side.dim;) {
      const tiles::ValueChunk chunk = tiles::ValueChunkAt(side, c);
      const __mmask16 lanes = First(chunk.lanes);
      for (int half = 0; half < width; ++half) {
        float* at = sum + c + half * chunk.lanes;
        __m512 total = _mm512_maskz_loadu_ps(lanes, at);
        for (uint64_t left = mask; left != 0; left &= left - 1) {
          const int t = __builtin_ctzll(left);
          const __m512i line = _mm512_maskz_loadu_epi32(lanes, bytes + chunk.offset + int64_t{t / 4} * 4 * chunk.lanes);
          const __m512i code =
              _mm512_and_si512(_mm512_srl_epi32(line, _mm_cvtsi32_si128(t % 4 * 8 + half * 4)), code_mask);
          const float scale = reference::ScaleOf(side, bytes + tiles::ScaleOffset(side, c / side.group_width(), t), 0);
          const __m512 value = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_cvtepi32_ps(_mm512_sub_epi32(code, offset)));
          total = _mm512_fmadd_ps(_mm512_set1_ps(factor * weights[t]), value, total);
        }
        _mm512_mask_storeu_ps(at, lanes, total);
      }
      c += chunk.width;
    }
  }
};

}  // namespace
}  // namespace kvfuse::avx512_vnni
