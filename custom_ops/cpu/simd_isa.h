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

  KVFUSE_TARGET static tiles::SoftmaxSums Softmax(const tiles::SoftmaxArgs& args, float* weights) {
    const F hidden = V::Set(kNegativeInfinity), scale = V::Set(args.scale);
    const F query_scale = V::Set(args.query_scale), cap = V::Set(args.softcap);
    const uint64_t seen = args.low_mask | args.exact_mask;
    F scores[kVectors];
    // Lanes that no mask names hold anything until they are hidden below.
    for (int i = 0; i < kVectors; ++i) scores[i] = V::Mul(scale, V::Mul(query_scale, V::Load(args.low + i * kLanes)));
    for (int i = 0; args.addend != nullptr && i < kVectors; ++i)
      scores[i] = V::Add(scores[i], V::Load(args.addend + i * kLanes));
    for (int i = 0; args.exact_mask != 0 && i < kVectors; ++i) {
      const F exact = V::Mul(scale, V::Load(args.exact + i * kLanes));
      scores[i] = V::Select(V::Mask(Bits(args.exact_mask, i)), exact, scores[i]);
    }
    for (int i = 0; args.softcap > 0.0f && i < kVectors; ++i) scores[i] = V::Mul(cap, Tanh(V::Div(scores[i], cap)));
    for (int i = 0; args.bias != nullptr && i < kVectors; ++i) {
      if (Bits(seen, i) == 0) continue;
      const F bias = args.bias_stride == 0 ? V::Set(*args.bias) : LoadSeen(args.bias + i * kLanes, Bits(seen, i));
      scores[i] = V::Add(scores[i], bias);
    }
    uint64_t visible = seen;
    F largest = hidden;
    for (int i = 0; seen != ~uint64_t{0} && i < kVectors; ++i)
      scores[i] = V::Select(V::Mask(Bits(seen, i)), scores[i], hidden);
    for (int i = 0; i < kVectors; ++i) {
      visible &= ~(static_cast<uint64_t>(V::Bits(V::Equal(scores[i], hidden))) << (i * kLanes));
      largest = V::MaxNumber(scores[i], largest);
    }
    float maximum = V::ReduceMax(largest);
    if (maximum == kNegativeInfinity) {
      if (visible == 0) return {kNegativeInfinity, 0.0f, 0};  // else some are NaN
      maximum = 0.0f;
    }
    const F top = V::Set(maximum);
    F sum = V::Set(0.0f);
    for (int i = 0; i < kVectors; ++i) {
      const F weight = Exp(V::Sub(scores[i], top));
      sum = V::Add(sum, weight);
      V::Store(weights + i * kLanes, weight);
    }
    return {maximum, V::ReduceAdd(sum), visible};
  }

  // The weights of query i times the scales of each group as 16-bit integers in two planes. False when they are too
  // small to divide by.
  KVFUSE_TARGET static bool Split(const SideFormat& side, const uint8_t* bytes, uint64_t mask, const float* weights,
                                  float factor, int i, Planes* planes) {
    // Products are finite or the sum of x - x is NaN. Tokens that are not seen may have any scale: they count as 0.
    F seen[kVectors], largest = V::Set(0.0f), odd = largest;
    const F zero = largest;
    const bool all = mask == ~uint64_t{0};
    for (int i = 0; i < kVectors; ++i) {
      seen[i] = V::Load(weights + i * kLanes);
      if (!all) seen[i] = V::Select(V::Mask(Bits(mask, i)), seen[i], zero);
    }
    for (int g = 0; g < side.groups(); ++g)
      for (int i = 0; i < kVectors; ++i) {
        const F x = V::Mul(seen[i], SeenScales(side, bytes, g, i, mask));
        odd = V::Add(odd, V::Sub(x, x));
        largest = V::MaxNumber(V::Abs(x), largest);
      }
    const bool finite = V::ReduceAdd(odd) == 0.0f;
    const float size = finite ? V::ReduceMax(largest) : 0.0f;
    if (size < 1e-30f && size > 0.0f) return false;
    const F inverse = V::Set(size == 0.0f ? 0.0f : 32512.0f / size);  // 127 * 256
    const float step = finite ? size / 32512.0f : std::numeric_limits<float>::quiet_NaN();
    for (int g = 0; g < side.groups(); ++g) {
      auto* high = reinterpret_cast<uint8_t*>(planes[g].high) + i * tiles::kPlaneStride;
      auto* low = reinterpret_cast<uint8_t*>(planes[g].low) + i * tiles::kPlaneStride;
      I sum = V::SetInt(0);
      for (int v = 0; v < kVectors; ++v) {
        const F x = V::Mul(seen[v], SeenScales(side, bytes, g, v, mask));
        const I whole = finite ? V::ToInt(V::Mul(x, inverse)) : V::SetInt(0);
        sum = V::AddInt(sum, whole);
        V::StoreBytes(high + v * kLanes, V::template ShiftRight<8>(V::AddInt(whole, V::SetInt(128))), kLanes);
        V::StoreBytes(low + v * kLanes, whole, kLanes);
      }
      planes[g].sums[i] = V::ReduceAddInt(sum);
      planes[g].factors[i] = step * factor;
    }
    return true;
  }

  static void AddSplitValues(const SideFormat& side, const uint8_t* bytes, uint64_t seen, const Planes* planes, int n,
                             float* const* sums, const uint8_t* next) {
    using Function =
        void (*)(const SideFormat&, const uint8_t*, uint64_t, const Planes*, int, float* const*, const uint8_t*);
    static constexpr Function four[] = {AddSplitValuesOf<1, 4>, AddSplitValuesOf<2, 4>};
    static constexpr Function eight[] = {AddSplitValuesOf<1, 8>, AddSplitValuesOf<2, 8>};
    for (int i = 0; i < n; i += 2)  // two at a time: what the registers hold
      (side.bits == 4 ? four : eight)[n - i > 1](side, bytes, seen, planes, i, sums, next);
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

  // Of vector i; zero for tokens that `mask` does not name, whose scales may be NaN.
  KVFUSE_INLINE F SeenScales(const SideFormat& side, const uint8_t* bytes, int group, int i, uint64_t mask) {
    const F scales = Scales(side, bytes, group, i * kLanes);
    return mask == ~uint64_t{0} ? scales : V::Select(V::Mask(Bits(mask, i)), scales, V::Set(0.0f));
  }

  // exp(x) for x <= 0, NaN for NaN: 2^floor(t) * p(t - floor(t)) with t = x log2(e); p is the polynomial of degree 6
  // with the least relative error over [0, 1) (8e-9 with its coefficients in f32), t rounds by |t| 2^-24. What would be
  // subnormal, below 2^-126, is 0.
  KVFUSE_INLINE F Exp(F x) {
    const F t = V::Mul(x, V::Set(1.44269504f)), least = V::Set(-126.0f);
    const F bounded = V::Select(V::Less(t, least), least, t), whole = V::Floor(bounded), f = V::Sub(bounded, whole);
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
            float* at = scores + i * kPageTokens + token + p * kLanes;
            const F score = V::Mul(scales, V::ToFloat(dots[i][p]));
            V::Store(at, g == 0 ? score : V::Add(V::Load(at), score));
          }
        }
      }
  }

  // sum[c] += factor * (sum over tokens of (256 * high + low) * code), kLanes channels of either nibble at a time, for
  // N queries from the one of number `first` on.
  template <int N, int kBits>
  KVFUSE_TARGET static void AddSplitValuesOf(const SideFormat& side, const uint8_t* bytes, uint64_t seen,
                                             const Planes* planes, int first, float* const* sums, const uint8_t* next) {
    const int begin = __builtin_ctzll(seen) / 4, end = (63 - __builtin_clzll(seen)) / 4 + 1;
    for (int c = 0; c < side.dim;) {
      const tiles::ValueChunk chunk = tiles::ValueChunkAt(side, c);
      const Planes& plane = planes[c / side.group_width()];
      const int8_t* high = plane.high + first * tiles::kPlaneStride;
      for (int l = 0; first == 0 && l < 16; ++l) __builtin_prefetch(next + chunk.offset + l * 4 * chunk.lanes);
      for (int lane = 0; lane < chunk.lanes; lane += kLanes) {
        const uint8_t* column = bytes + chunk.offset + lane * 4;
        I dots[N][2];
        if constexpr (kBits == 4)
          NibbleColumn<N>(column, chunk.lanes, begin, end, high, plane.sums + first, dots);
        else
          ByteColumn<N>(column, chunk.lanes, begin, end, high, plane.sums + first, dots);
        for (int i = 0; i < N; ++i)
          for (int half = 0; half < 8 / kBits; ++half) {
            float* at = sums[first + i] + c + half * chunk.lanes + lane;
            const F factor = V::Set(plane.factors[first + i]);
            Store(at, V::MulAdd(factor, V::ToFloat(dots[i][half]), Load(at, chunk.lanes)), chunk.lanes);
          }
      }
      c += chunk.width;
    }
  }

  // `high` is the upper plane of the first query, the lower one kPageTokens behind it; `sums` of 256 * high + low.
  template <int N>
  KVFUSE_INLINE void NibbleColumn(const uint8_t* column, int lanes, int begin, int end, const int8_t* high,
                                  const int32_t* sums, I (*dots)[2]) {
    for (int i = 0; i < N; ++i) dots[i][0] = dots[i][1] = V::SetInt(-8 * sums[i]);
    for (int l = begin; l < end;) {
      const int stop = std::min(end, l + V::kSteps);
      Sum parts[N][4];  // lower nibble under either plane, upper nibble under either plane
      for (int i = 0; i < N; ++i)
        for (Sum& part : parts[i]) part = V::NoSum();
      for (; l < stop; ++l) {
        const B u = LoadLanes(column + l * 4 * lanes, lanes), lower = V::LowNibbles(u), upper = V::HighNibbles(u);
        for (int i = 0; i < N; ++i) {
          const int8_t* at = high + i * tiles::kPlaneStride + 4 * l;
          const B h4 = V::Broadcast4(at), l4 = V::Broadcast4(at + kPageTokens);
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

  template <int N>
  KVFUSE_INLINE void ByteColumn(const uint8_t* column, int lanes, int begin, int end, const int8_t* high,
                                const int32_t* sums, I (*dots)[2]) {
    I upper[N], lower[N];
    for (int i = 0; i < N; ++i) upper[i] = V::SetInt(0), lower[i] = V::SetInt(-V::kByteOffset * sums[i]);
    for (int l = begin; l < end; ++l) {
      const B code = V::ByteCodes(LoadLanes(column + l * 4 * lanes, lanes));
      for (int i = 0; i < N; ++i) {
        const int8_t* at = high + i * tiles::kPlaneStride + 4 * l;
        upper[i] = V::ByteStep(upper[i], code, V::Broadcast4(at));
        lower[i] = V::ByteStep(lower[i], code, V::Broadcast4(at + kPageTokens));
      }
    }
    // at most 64 tokens * 32639 * 255 < 2^30
    for (int i = 0; i < N; ++i) dots[i][0] = V::AddInt(V::template ShiftLeft<8>(upper[i]), lower[i]);
  }
};

}  // namespace kvfuse
