// AVX-512 with VNNI: vpdpbusd on lines of 16 tokens. Only dispatch.cc may call it.
//
// The instruction set is switched on for each function below and not for the file: with file-wide flags, inline
// functions of shared headers would be compiled for it too, and the linker might keep those for everyone.
#include "avx512_vnni.h"

#include <immintrin.h>

#include "tile_attend.h"

#define KVFUSE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")))

namespace kvfuse::avx512_vnni {
namespace {

struct Isa {
  KVFUSE_AVX512 static __m512i Broadcast4(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, sizeof four);
    return _mm512_set1_epi32(four);
  }

  KVFUSE_AVX512 static __m512 Scales16(const SideFormat& side, const uint8_t* bytes, int group, int token) {
    const uint8_t* at = bytes + ScaleOffset(side, group, token);
    if (side.group_size == 0) return _mm512_loadu_ps(at);
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  }

  static int64_t ScaleOffset(const SideFormat& side, int group, int token) {
    return tiles::ScaleOffset(side, group, token);
  }

  // sum over groups of s_k * (int32 dot), for tokens [begin, end) of the tile, 16 at a time. Codes are stored with an
  // offset o (8 or 128), so dot = sum u * q - o * sum q.
  KVFUSE_AVX512 static void KeyScores(const SideFormat& side, const uint8_t* bytes, const int8_t* query, int begin,
                                      int end, float* scores) {
    const __m512i nibbles = _mm512_set1_epi8(15);
    const int width = side.bits == 4 ? 8 : 4, offset = side.bits == 4 ? 8 : 128;
    const int from = begin / 16 * 16;
    for (int g = 0; g < side.groups(); ++g) {
      const int first = g * side.group_width(), last = std::min(side.dim, first + side.group_width());
      int32_t query_sum = 0;
      for (int c = first; c < last; ++c) query_sum += query[c];
      for (int token = from; token < end; token += 16) {
        __m512i dot = _mm512_set1_epi32(-offset * query_sum);
        for (int c = first; c < last; c += width) {
          const __m512i line = _mm512_loadu_si512(bytes + tiles::KeyLine(side, token, c));
          if (side.bits == 4) {
            dot = _mm512_dpbusd_epi32(dot, _mm512_and_si512(line, nibbles), Broadcast4(query + c));
            dot = _mm512_dpbusd_epi32(dot, _mm512_and_si512(_mm512_srli_epi16(line, 4), nibbles),
                                      Broadcast4(query + c + 4));
          } else {
            dot = _mm512_dpbusd_epi32(dot, line, Broadcast4(query + c));
          }
        }
        const __m512 sum = g == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(scores + token);
        const __m512 score = _mm512_mul_ps(Scales16(side, bytes, g, token), _mm512_cvtepi32_ps(dot));
        _mm512_storeu_ps(scores + token, _mm512_add_ps(sum, score));
      }
    }
  }

  // One row of 4-bit values as floats, scale * code.
  KVFUSE_AVX512 static void ValueRow(const SideFormat& side, const uint8_t* bytes, int token, float* row) {
    const uint8_t* codes = bytes + int64_t{token} * side.code_bytes();
    const __m512i nibble = _mm512_set1_epi32(15), offset = _mm512_set1_epi32(8);
    for (int c = 0; c < side.dim; c += 32) {
      const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + c / 2)));
      const __m512 scale =
          _mm512_set1_ps(reference::ScaleOf(side, bytes + ScaleOffset(side, c / side.group_width(), token), 0));
      const __m512i low = _mm512_sub_epi32(_mm512_and_si512(wide, nibble), offset);
      const __m512i high = _mm512_sub_epi32(_mm512_srli_epi32(wide, 4), offset);
      _mm512_storeu_ps(row + c, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(low)));
      _mm512_storeu_ps(row + c + 16, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(high)));
    }
  }

  KVFUSE_AVX512 static float Dot(const float* a, const float* b, int count) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 16) {
      const __mmask16 mask = count - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count - i)) - 1);
      sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, a + i), _mm512_maskz_loadu_ps(mask, b + i), sum);
    }
    return _mm512_reduce_add_ps(sum);
  }

  KVFUSE_AVX512 static void Add(float weight, const float* row, float* sum, int count) {
    const __m512 w = _mm512_set1_ps(weight);
    for (int i = 0; i < count; i += 16) {
      const __mmask16 mask = count - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count - i)) - 1);
      const __m512 grown =
          _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(mask, row + i), _mm512_maskz_loadu_ps(mask, sum + i));
      _mm512_mask_storeu_ps(sum + i, mask, grown);
    }
  }

  // exp(x) for x <= 0, NaN for NaN: 2^n * p(r) with |r| <= ln 2 / 2, p the Taylor series of degree 7
  // (remainder below 6e-9 relative).
  KVFUSE_AVX512 static __m512 Exp(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);  // ln 2 in two parts
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040.0f);
    for (const float c : {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f})
      p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, n);
  }

  // Turns a tile's scores into exp(score - maximum), leaving kNegativeInfinity where it is, and sums them up.
  KVFUSE_AVX512 static float Weights(float* scores, float maximum) {
    const __m512 top = _mm512_set1_ps(maximum), hidden = _mm512_set1_ps(kNegativeInfinity);
    const __m512 least = _mm512_set1_ps(-104.0f);  // exp() is 0 in f32 from here on
    __m512 sum = _mm512_setzero_ps();
    for (int t = 0; t < kPageTokens; t += 16) {
      const __m512 score = _mm512_load_ps(scores + t), x = _mm512_sub_ps(score, top);
      const __mmask16 seen = _mm512_cmp_ps_mask(score, hidden, _CMP_NEQ_UQ);
      const __mmask16 zero = _mm512_cmp_ps_mask(x, least, _CMP_LT_OQ);
      const __m512 weight = _mm512_mask_mov_ps(Exp(x), zero, _mm512_setzero_ps());
      sum = _mm512_mask_add_ps(sum, seen, sum, weight);
      _mm512_store_ps(scores + t, _mm512_mask_mov_ps(hidden, seen, weight));
    }
    return _mm512_reduce_add_ps(sum);
  }
};

}  // namespace

void Attend(const AttendArgs& args) { tiles::TileAttention<Isa>(args).Run(); }

}  // namespace kvfuse::avx512_vnni
