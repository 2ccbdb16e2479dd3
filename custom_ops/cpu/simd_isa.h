// The inner loops of tile_attend.h and tile_encode.h for instruction sets with vectors of 4 or 8 floats, over a class V
// of the operations of one of them (avx2_vectors.h, neon_vectors.h):
//   F, I, B    kLanes floats, as many int32, 4 * kLanes bytes
//   Sum        what Step(sum, u, q) adds products of four neighbouring nibbles u and int8 q to; after at most
//              kSteps steps a sum must be added to int32 lanes (Flush)
// KVFUSE_TARGET must be defined: the attribute that switches the instruction set on for one function. V lies in an
// unnamed namespace, so nothing made here has a name that another file's code could share.
#pragma once

#include "tile_encode.h"

#define KVFUSE_INLINE KVFUSE_TARGET __attribute__((always_inline)) static inline

namespace kvfuse {

template <typename V>
struct SimdIsa {
  using F = typename V::F;
  using I = typename V::I;
  using B = typename V::B;
  using Sum = typename V::Sum;
  using Planes = tiles::Planes;

  static constexpr int kQueries = 4, kLanes = V::kLanes;
  static constexpr int kParts = 16 / kLanes;  // vectors of a line of 16 tokens
  static constexpr int kVectors = kPageTokens / kLanes;

  KVFUSE_TARGET static void Rotate(float* row, int dim) {
    while (dim >= kLanes) {
      int block = kLanes;
      while (block * 2 <= dim) block *= 2;
      const F norm = V::Set(1.0f / std::sqrt(static_cast<float>(block)));
      for (int i = 0; i < block; i += kLanes) {
        const F x = V::Butterflies(V::Load(row + i));
        V::Store(row + i, block == kLanes ? V::Mul(x, norm) : x);
      }
      for (int half = kLanes; half < block; half *= 2)
        for (int start = 0; start < block; start += 2 * half)
          for (int i = start; i < start + half; i += kLanes) {
            const F a = V::Load(row + i), b = V::Load(row + i + half);
            F sum = V::Add(a, b), difference = V::Sub(a, b);
            if (2 * half == block) sum = V::Mul(sum, norm), difference = V::Mul(difference, norm);
            V::Store(row + i, sum);
            V::Store(row + i + half, difference);
          }
      row += block;
      dim -= block;
    }
    reference::Rotate(row, dim);
  }

  KVFUSE_TARGET static bool Finite(const float* row, int dim) {
    F odd = V::Set(0.0f);  // NaN once a NaN or an infinity has been met: x - x is 0 else
    for (int i = 0; i < dim; i += kLanes) {
      const F x = Load(row + i, dim - i);
      odd = V::Add(odd, V::Sub(x, x));
    }
    return V::ReduceAdd(odd) == 0.0f;
  }

  // The element of largest size, the first of equals.
  KVFUSE_TARGET static float Extreme(const float* row, int dim) {
    F largest = V::Set(0.0f);
    for (int i = 0; i < dim; i += kLanes) largest = V::MaxNumber(V::Abs(Load(row + i, dim - i)), largest);
    const float size = V::ReduceMax(largest);
    if (!(size > 0.0f)) return 0.0f;
    for (int i = 0; i < dim; i += kLanes) {
      const int found = V::Bits(V::Equal(V::Abs(Load(row + i, dim - i)), V::Set(size)));
      if (found != 0) return row[i + __builtin_ctz(found)];
    }
    return 0.0f;
  }

  // codes[i] = clamp(rint(x / scale), low, high) + offset
  KVFUSE_TARGET static void Codes(const float* row, int dim, float scale, int low, int high, int offset,
                                  uint8_t* codes) {
    const F least = V::Set(static_cast<float>(low)), most = V::Set(static_cast<float>(high)), divisor = V::Set(scale);
    for (int i = 0; i < dim; i += kLanes) {
      const F x = V::Min(V::Max(V::Div(Load(row + i, dim - i), divisor), least), most);
      V::StoreBytes(codes + i, V::AddInt(V::ToInt(x), V::SetInt(offset)), std::min(kLanes, dim - i));
    }
  }

  // int8 codes of a rotated query and their sums by key group; gives their scale.
  KVFUSE_TARGET static float QuantizeQuery(const SideFormat& side, const float* row, int8_t* codes, int32_t* sums) {
    if (!Finite(row, side.dim)) {
      std::fill(sums, sums + side.groups(), 0);
      std::memset(codes, 0, side.dim);
      return std::numeric_limits<float>::quiet_NaN();
    }
    float scale = std::fabs(Extreme(row, side.dim)) / 127.0f;
    if (scale == 0.0f) scale = 1.0f;
    Codes(row, side.dim, scale, -127, 127, 0, reinterpret_cast<uint8_t*>(codes));
    for (int g = 0; g < side.groups(); ++g) {
      const int first = g * side.group_width(), last = std::min(side.dim, first + side.group_width());
      int32_t sum = 0;
      for (int c = first; c < last; ++c) sum += codes[c];
      sums[g] = sum;
    }
    return scale;
  }

  static uint64_t NonZero(const uint8_t* bytes, int count) {
    uint64_t mask = 0;
    for (int i = 0; i < count; ++i) mask |= static_cast<uint64_t>(bytes[i] != 0) << i;
    return mask;
  }

  KVFUSE_TARGET static void Exp(const float* x, int count, float* out) {
    for (int i = 0; i < count; i += kLanes) Store(out + i, Exp(Load(x + i, count - i)), count - i);
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
  KVFUSE_TARGET static void DotRows(const void* const* rows, uint64_t mask, const float* query, int dim, float* dots) {
    for (; mask != 0; mask &= mask - 1) {
      const int t = __builtin_ctzll(mask);
      const T* row = static_cast<const T*>(rows[t]);
      F sums[4];
      for (F& sum : sums) sum = V::Set(0.0f);
      int c = 0;
      for (; c + 4 * kLanes <= dim; c += 4 * kLanes)
        for (int i = 0; i < 4; ++i)
          sums[i] = V::MulAdd(V::Load(row + c + i * kLanes), V::Load(query + c + i * kLanes), sums[i]);
      for (; c < dim; c += kLanes) sums[0] = V::MulAdd(Load(row + c, dim - c), Load(query + c, dim - c), sums[0]);
      dots[t] = V::ReduceAdd(V::Add(V::Add(sums[0], sums[1]), V::Add(sums[2], sums[3])));
    }
  }

  // dots[i][t] = row . queries[i]
  template <typename T>
  static void DotBatch(const void* const* rows, uint64_t mask, const float* const* queries, int n, int dim,
                       float* const* dots) {
    for (int i = 0; i < n; ++i) DotRows<T>(rows, mask, queries[i], dim, dots[i]);
  }

  // sums[i] += factors[i] * weights[i][t] * row for the rows of masks[i]
  template <typename T>
  static void AddBatch(const void* const* rows, const uint64_t* masks, const float* const* weights,
                       const float* factors, int n, float* const* sums, int dim) {
    for (int i = 0; i < n; ++i) AddRows<T>(rows, masks[i], weights[i], factors[i], sums[i], dim);
  }

  // sum += factor * weights[t] * row for the rows of `mask`
  template <typename T>
  KVFUSE_TARGET static void AddRows(const void* const* rows, uint64_t mask, const float* weights, float factor,
                                    float* sum, int dim) {
    int c = 0;
    for (; c + 4 * kLanes <= dim; c += 4 * kLanes) {
      F totals[4];
      for (int i = 0; i < 4; ++i) totals[i] = V::Load(sum + c + i * kLanes);
      for (uint64_t left = mask; left != 0; left &= left - 1) {
        const int t = __builtin_ctzll(left);
        const T* row = static_cast<const T*>(rows[t]) + c;
        const F weight = V::Set(factor * weights[t]);
        for (int i = 0; i < 4; ++i) totals[i] = V::MulAdd(weight, V::Load(row + i * kLanes), totals[i]);
      }
      for (int i = 0; i < 4; ++i) V::Store(sum + c + i * kLanes, totals[i]);
    }
    for (; c < dim; c += kLanes) {
      F total = Load(sum + c, dim - c);
      for (uint64_t left = mask; left != 0; left &= left - 1) {
        const int t = __builtin_ctzll(left);
        total = V::MulAdd(V::Set(factor * weights[t]), Load(static_cast<const T*>(rows[t]) + c, dim - c), total);
      }
      Store(sum + c, total, dim - c);
    }
  }

  // The scores of a span, kNegativeInfinity where none is seen; gives the largest, or 0 when all that are seen are NaN.
  KVFUSE_TARGET static float Scores(const tiles::SoftmaxArgs& args, float* scores_out) {
    const F hidden = V::Set(kNegativeInfinity), low_scale = V::Set(args.low_scale);
    const bool plain = !args.exact_mask.any() && args.softcap == 0.0f && args.bias == nullptr;
    F largest = hidden;
    for (int k = 0; k < args.tiles; ++k) {
      const uint64_t seen = args.low_mask.words[k] | args.exact_mask.words[k];
      for (int i = 0; i < kVectors; ++i) {
        // Lanes that no mask names hold anything until they are hidden.
        const int t = k * kPageTokens + i * kLanes;
        F score = V::Mul(low_scale, V::Load(args.low + t));
        if (args.addend != nullptr) score = V::Add(score, V::Load(args.addend + t));
        if (!plain) score = Adjusted(args, k, i, score);
        if (seen != ~uint64_t{0}) score = V::Select(V::Mask(Bits(seen, i)), score, hidden);
        V::Store(scores_out + t, score);
        largest = V::MaxNumber(score, largest);
      }
    }
    const float maximum = V::ReduceMax(largest);
    if (maximum != kNegativeInfinity) return maximum;
    bool nan = false;
    for (int t = 0; t < args.tiles * kPageTokens; ++t) nan |= scores_out[t] != scores_out[t];
    return nan ? 0.0f : kNegativeInfinity;
  }

  // exp(score - maximum) in their place; gives the sum.
  KVFUSE_TARGET static float Powers(float* scores, int tiles, float maximum) {
    const F top = V::Set(maximum);
    F sum = V::Set(0.0f);
    for (int t = 0; t < tiles * kPageTokens; t += kLanes) {
      const F weight = Exp(V::Sub(V::Load(scores + t), top));
      sum = V::Add(sum, weight);
      V::Store(scores + t, weight);
    }
    return V::ReduceAdd(sum);
  }

  // The largest |weight * scale| of a span; NaN when one of them is not finite.
  KVFUSE_TARGET static float Largest(const SideFormat& side, const tiles::SpanBytes& bytes, int tiles,
                                     const tiles::SpanMask& mask, const float* weights) {
    F largest = V::Set(0.0f), odd = largest;  // odd: NaN once x - x has not been 0
    for (int k = 0; k < tiles; ++k)
      for (int i = 0; bytes.tiles[k] != nullptr && i < kVectors; ++i) {
        const F weight = V::Load(weights + k * kPageTokens + i * kLanes);
        for (int g = 0; g < side.groups(); ++g) {
          const F x = Product(side, bytes.tiles[k], mask.words[k], weight, g, i);
          odd = V::Add(odd, V::Sub(x, x));
          largest = V::MaxNumber(V::Abs(x), largest);
        }
      }
    return V::ReduceAdd(odd) == 0.0f ? V::ReduceMax(largest) : std::numeric_limits<float>::quiet_NaN();
  }

  // The weights times the scales of each group, in steps of 1 / steps, as 16-bit integers in the two planes of query i.
  KVFUSE_TARGET static void Split(const SideFormat& side, const tiles::SpanBytes& bytes, int tiles,
                                  const tiles::SpanMask& mask, const float* weights, float steps, int i,
                                  const Planes* planes) {
    const F inverse = V::Set(steps);
    for (int g = 0; g < side.groups(); ++g) {
      auto* high = reinterpret_cast<uint8_t*>(planes[g].high + i * tiles::kPlaneStride);
      uint8_t* low = high + tiles::kSpanTokens;
      I sum = V::SetInt(0);
      for (int k = 0; k < tiles; ++k)
        for (int v = 0; bytes.tiles[k] != nullptr && v < kVectors; ++v) {
          const int t = k * kPageTokens + v * kLanes;
          const F x = Product(side, bytes.tiles[k], mask.words[k], V::Load(weights + t), g, v);
          const I whole = V::ToInt(V::Mul(x, inverse));
          sum = V::AddInt(sum, whole);
          V::StoreBytes(high + t, V::template ShiftRight<8>(V::AddInt(whole, V::SetInt(128))), kLanes);
          V::StoreBytes(low + t, whole, kLanes);
        }
      planes[g].sums[i] = V::ReduceAddInt(sum);
    }
  }

  static void AddSplitValues(const SideFormat& side, const tiles::SpanBytes& bytes, int tiles, const Planes* planes,
                             int n, const float* factors, float* const* sums) {
    using Function =
        void (*)(const SideFormat&, const tiles::SpanBytes&, int, const Planes*, int, const float*, float* const*);
    static constexpr Function four[] = {AddSplitValuesOf<1, 4>, AddSplitValuesOf<2, 4>};
    static constexpr Function eight[] = {AddSplitValuesOf<1, 8>, AddSplitValuesOf<2, 8>};
    for (int i = 0; i < n; i += 2)  // two at a time: what the registers hold
      (side.bits == 4 ? four : eight)[n - i > 1](side, bytes, tiles, planes, i, factors, sums);
  }

  // The same in f32: sum[c] += factor * weights[t] * scale * code for the tokens of `mask`.
  KVFUSE_TARGET static void AddValues(const SideFormat& side, const uint8_t* bytes, uint64_t mask, const float* weights,
                                      float factor, float* sum) {
    const int width = 8 / side.bits;  // codes to a byte
    const I code_mask = V::SetInt((1 << side.bits) - 1), offset = V::SetInt(side.bits == 4 ? 8 : 128);
    for (int c = 0; c < side.dim;) {
      const tiles::ValueChunk chunk = tiles::ValueChunkAt(side, c);
      for (int half = 0; half < width; ++half)
        for (int lane = 0; lane < chunk.lanes; lane += kLanes) {
          float* at = sum + c + half * chunk.lanes + lane;
          F total = Load(at, chunk.lanes);
          for (uint64_t left = mask; left != 0; left &= left - 1) {
            const int t = __builtin_ctzll(left);
            const I line =
                V::ToInts(LoadLanes(bytes + chunk.offset + (int64_t{t / 4} * chunk.lanes + lane) * 4, chunk.lanes));
            const I code = V::AndInt(V::ShiftRightBy(line, t % 4 * 8 + half * 4), code_mask);
            const int group = c / side.group_width();
            const float scale = reference::ScaleOf(side, bytes + tiles::ScaleOffset(side, group, t), 0);
            const F value = V::Mul(V::Set(scale), V::ToFloat(V::SubInt(code, offset)));
            total = V::MulAdd(V::Set(factor * weights[t]), value, total);
          }
          Store(at, total, chunk.lanes);
        }
      c += chunk.width;
    }
  }

 private:
  template <typename T>
  KVFUSE_INLINE F Load(const T* at, int count) {
    return count >= kLanes ? V::Load(at) : V::LoadSome(at, count);
  }
  KVFUSE_INLINE void Store(float* at, F x, int count) {
    if (count >= kLanes)
      V::Store(at, x);
    else
      V::StoreSome(at, x, count);
  }
  // The bits of a mask over 64 tokens that belong to vector i.
  KVFUSE_INLINE int Bits(uint64_t mask, int i) { return static_cast<int>(mask >> (i * kLanes)) & V::kAllBits; }
  // Reads no further than the last lane asked for.
  KVFUSE_INLINE F LoadSeen(const float* at, int bits) { return Load(at, 32 - __builtin_clz(bits)); }
  // kLanes groups of four bytes, or the half of them that a narrow line has.
  KVFUSE_INLINE B LoadLanes(const uint8_t* at, int lanes) {
    return lanes >= kLanes ? V::LoadBytes(at) : V::LoadHalfBytes(at);
  }

  KVFUSE_INLINE F Scales(const SideFormat& side, const uint8_t* bytes, int group, int token) {
    const uint8_t* at = bytes + tiles::ScaleOffset(side, group, token);
    if (side.group_size == 0) return V::Load(reinterpret_cast<const float*>(at));
    return V::Load(reinterpret_cast<const uint16_t*>(at));
  }

  // weight * scale of vector i of a tile; zero for tokens that `mask` does not name, which may be NaN.
  KVFUSE_INLINE F Product(const SideFormat& side, const uint8_t* tile, uint64_t mask, F weight, int group, int i) {
    const F x = V::Mul(weight, Scales(side, tile, group, i * kLanes));
    return mask == ~uint64_t{0} ? x : V::Select(V::Mask(Bits(mask, i)), x, V::Set(0.0f));
  }

  // The rarer parts of a score: exact keys, soft cap, bias.
  KVFUSE_INLINE F Adjusted(const tiles::SoftmaxArgs& args, int k, int i, F score) {
    const int t = k * kPageTokens + i * kLanes, exact = Bits(args.exact_mask.words[k], i);
    const int seen = exact | Bits(args.low_mask.words[k], i);
    if (exact != 0) score = V::Select(V::Mask(exact), V::Mul(V::Set(args.scale), V::Load(args.exact + t)), score);
    const F cap = V::Set(args.softcap);
    if (args.softcap > 0.0f) score = V::Mul(cap, Tanh(V::Div(score, cap)));
    if (args.bias == nullptr || seen == 0) return score;
    return V::Add(score, args.bias_stride == 0 ? V::Set(*args.bias) : LoadSeen(args.bias + t, seen));
  }

  // exp(x) for x <= 0, NaN for NaN: 2^floor(t) * p(t - floor(t)) with t = x log2(e); p is the polynomial of degree 6
  // with the least relative error over [0, 1) (8e-9 with its coefficients in f32); what t loses by rounding, and
  // log2(e) to f32, is added to the fraction. What would be subnormal, below 2^-126, is 0.
  KVFUSE_INLINE F Exp(F x) {
    const F log2e = V::Set(1.44269502f), t = V::Mul(x, log2e), least = V::Set(-126.0f);
    const F lost = V::MulAdd(x, V::Set(1.925963e-8f), V::MulAdd(x, log2e, V::Sub(V::Set(0.0f), t)));
    const F bounded = V::Select(V::Less(t, least), least, t), whole = V::Floor(bounded);
    const F f = V::Add(V::Sub(bounded, whole), lost);
    F p = V::MulAdd(V::Set(2.1702255e-4f), f, V::Set(1.2439688e-3f));
    p = V::MulAdd(p, f, V::Set(9.6788406e-3f));
    p = V::MulAdd(p, f, V::Set(5.5483341e-2f));
    p = V::MulAdd(p, f, V::Set(0.24022983f));
    p = V::MulAdd(p, f, V::Set(0.69314700f));
    p = V::MulAdd(p, f, V::Set(1.0f));
    // p in [1, 2): adding to its exponent multiplies it. A NaN has passed through p; it stays one.
    const F power = V::AddToExponent(p, V::ToInt(whole));
    return V::Select(V::Less(t, least), V::Set(0.0f), power);
  }

  // tanh, off by less than 2e-7: (1 - e) / (1 + e) with e = exp(-2 |x|), and a Taylor series near 0.
  KVFUSE_INLINE F Tanh(F x) {
    const F size = V::Abs(x), e = Exp(V::Mul(size, V::Set(-2.0f))), one = V::Set(1.0f), square = V::Mul(x, x);
    const F far = V::Div(V::Sub(one, e), V::Add(one, e));
    F near = V::Set(62.0f / 2835.0f);
    near = V::MulAdd(near, square, V::Set(-17.0f / 315.0f));
    near = V::MulAdd(near, square, V::Set(2.0f / 15.0f));
    near = V::MulAdd(near, square, V::Set(-1.0f / 3.0f));
    near = V::MulAdd(near, square, one);
    const F signed_far = V::Select(V::Less(x, V::Set(0.0f)), V::Sub(V::Set(0.0f), far), far);
    return V::Select(V::Less(size, V::Set(0.25f)), V::Mul(near, x), signed_far);
  }

  // sum over groups of s_k * (int32 dot) for the 64 tokens of a tile. Codes are stored with an offset o (8 or 128), so
  // dot = sum u * q - o * sum q; V may take 8-bit codes without their offset.
  template <int N, int kBits>
  KVFUSE_TARGET static void KeyScoresOf(const SideFormat& side, const uint8_t* bytes, const int8_t* const* codes,
                                        const int32_t* const* code_sums, float* scores, const uint8_t* next) {
    constexpr int kOffset = kBits == 4 ? 8 : V::kByteOffset, kLine = 64 * (kPageTokens / 16);
    constexpr int kChannels = kBits == 4 ? 8 : 4;
    for (int token = 0; token < kPageTokens; token += 16)
      for (int g = 0; g < side.groups(); ++g) {
        const int first = g * side.group_width(), last = std::min(side.dim, first + side.group_width());
        const uint8_t* line = bytes + token * 4 + first / kChannels * kLine;
        I dots[N][kParts];
        for (int i = 0; i < N; ++i)
          for (int p = 0; p < kParts; ++p) dots[i][p] = V::SetInt(-kOffset * code_sums[i][g]);
        for (int c = first; c < last;) {
          const int end = kBits == 4 ? std::min(last, c + V::kSteps / 2 * 8) : last;
          Sum sums[N][kParts];
          for (int i = 0; i < N; ++i)
            for (int p = 0; p < kParts; ++p) sums[i][p] = V::NoSum();
          for (; c < end; c += kChannels, line += kLine) {
            __builtin_prefetch(next + (line - bytes));
            for (int p = 0; p < kParts; ++p) {
              const B u = V::LoadBytes(line + p * 4 * kLanes);
              if constexpr (kBits == 4) {
                const B low = V::LowNibbles(u), high = V::HighNibbles(u);
                for (int i = 0; i < N; ++i) sums[i][p] = V::Step(sums[i][p], low, V::Broadcast4(codes[i] + c));
                for (int i = 0; i < N; ++i) sums[i][p] = V::Step(sums[i][p], high, V::Broadcast4(codes[i] + c + 4));
              } else {
                const B code = V::ByteCodes(u);
                for (int i = 0; i < N; ++i) dots[i][p] = V::ByteStep(dots[i][p], code, V::Broadcast4(codes[i] + c));
              }
            }
          }
          if constexpr (kBits == 4)
            for (int i = 0; i < N; ++i)
              for (int p = 0; p < kParts; ++p) dots[i][p] = V::Flush(dots[i][p], sums[i][p]);
        }
        for (int p = 0; p < kParts; ++p) {
          const F scales = Scales(side, bytes, g, token + p * kLanes);
          for (int i = 0; i < N; ++i) {
            float* at = scores + i * tiles::kSpanTokens + token + p * kLanes;
            const F score = V::Mul(scales, V::ToFloat(dots[i][p]));
            V::Store(at, g == 0 ? score : V::Add(V::Load(at), score));
          }
        }
      }
  }

  // sums[i][c] += factors[i] * (sum over tokens of (256 * high + low) * code) over the tiles that have bytes: kLanes
  // channels of either nibble at a time, for N queries from the one of number `first` on.
  template <int N, int kBits>
  KVFUSE_TARGET static void AddSplitValuesOf(const SideFormat& side, const tiles::SpanBytes& bytes, int tiles,
                                             const Planes* planes, int first, const float* factors,
                                             float* const* sums) {
    for (int c = 0; c < side.dim;) {
      const tiles::ValueChunk chunk = tiles::ValueChunkAt(side, c);
      const Planes& plane = planes[c / side.group_width()];
      const int8_t* high = plane.high + first * tiles::kPlaneStride;
      for (int lane = 0; lane < chunk.lanes; lane += kLanes) {
        const int64_t at = chunk.offset + lane * 4;
        I dots[N][2];
        for (int i = 0; i < N; ++i) {
          const I sum = V::SetInt(plane.sums[first + i]);
          const I offset = kBits == 4 ? V::template ShiftLeft<3>(sum) : V::template ShiftLeft<7>(sum);
          dots[i][0] = dots[i][1] = V::SubInt(V::SetInt(0), kBits == 4 || V::kByteOffset != 0 ? offset : V::SetInt(0));
        }
        for (int k = 0; k < tiles; ++k) {
          if (bytes.tiles[k] == nullptr) continue;
          // One column of lines of a chunk fetches them; the others lie beside it.
          for (int l = 0; first == 0 && lane == 0 && l < 16; ++l)
            __builtin_prefetch(bytes.next[k] + chunk.offset + l * 4 * chunk.lanes);
          if constexpr (kBits == 4)
            NibbleColumn<N>(bytes.tiles[k] + at, chunk.lanes, high + k * kPageTokens, dots);
          else
            ByteColumn<N>(bytes.tiles[k] + at, chunk.lanes, high + k * kPageTokens, dots);
        }
        for (int i = 0; i < N; ++i)
          for (int half = 0; half < 8 / kBits; ++half) {
            float* to = sums[first + i] + c + half * chunk.lanes + lane;
            const F factor = V::Set(factors[first + i]);
            Store(to, V::MulAdd(factor, V::ToFloat(dots[i][half]), Load(to, chunk.lanes)), chunk.lanes);
          }
      }
      c += chunk.width;
    }
  }

  // The 64 tokens of a tile. `high` is the upper plane of the first query, the lower one lies kSpanTokens behind it.
  template <int N>
  KVFUSE_INLINE void NibbleColumn(const uint8_t* column, int lanes, const int8_t* high, I (*dots)[2]) {
    for (int l = 0; l < 16;) {
      const int stop = std::min(16, l + V::kSteps);
      Sum parts[N][4];  // lower nibble under either plane, upper nibble under either plane
      for (int i = 0; i < N; ++i)
        for (Sum& part : parts[i]) part = V::NoSum();
      for (; l < stop; ++l) {
        const B u = LoadLanes(column + l * 4 * lanes, lanes), lower = V::LowNibbles(u), upper = V::HighNibbles(u);
        for (int i = 0; i < N; ++i) {
          const int8_t* at = high + i * tiles::kPlaneStride + 4 * l;
          const B h4 = V::Broadcast4(at), l4 = V::Broadcast4(at + tiles::kSpanTokens);
          parts[i][0] = V::Step(parts[i][0], lower, h4);
          parts[i][1] = V::Step(parts[i][1], lower, l4);
          parts[i][2] = V::Step(parts[i][2], upper, h4);
          parts[i][3] = V::Step(parts[i][3], upper, l4);
        }
      }
      for (int i = 0; i < N; ++i)
        for (int half = 0; half < 2; ++half)
          dots[i][half] = V::FlushPlanes(dots[i][half], parts[i][2 * half], parts[i][2 * half + 1]);
    }
  }

  // In the end at most 256 tokens * 32640 * 128 < 2^31; what wraps on the way wraps back.
  template <int N>
  KVFUSE_INLINE void ByteColumn(const uint8_t* column, int lanes, const int8_t* high, I (*dots)[2]) {
    I upper[N], lower[N];
    for (int i = 0; i < N; ++i) upper[i] = lower[i] = V::SetInt(0);
    for (int l = 0; l < 16; ++l) {
      const B code = V::ByteCodes(LoadLanes(column + l * 4 * lanes, lanes));
      for (int i = 0; i < N; ++i) {
        const int8_t* at = high + i * tiles::kPlaneStride + 4 * l;
        upper[i] = V::ByteStep(upper[i], code, V::Broadcast4(at));
        lower[i] = V::ByteStep(lower[i], code, V::Broadcast4(at + tiles::kSpanTokens));
      }
    }
    for (int i = 0; i < N; ++i)
      dots[i][0] = V::AddInt(dots[i][0], V::AddInt(V::template ShiftLeft<8>(upper[i]), lower[i]));
  }
};

}  // namespace kvfuse
