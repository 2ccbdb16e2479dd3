// Attention tile by tile, for every instruction set: an Isa supplies the inner loops, up to Isa::kQueries queries that
// share each unpacked line. Scores of low-bit keys are bit-equal to the reference's.
//
// Low-bit values are summed up in integers: the softmax weights of a tile, exp(score - the tile's maximum) times the
// values' scales, become 16-bit numbers in two signed 8-bit planes, each off by at most 1/65024 of the tile's largest
// (per group of channels). They depend on the query and the tile alone, never on the chunk. With exact weights
// (KVFUSE_WEIGHTS=exact) the same sums are taken in f32.
#pragma once

#include <cmath>
#include <cstring>

#include "partial.h"
#include "query.h"
#include "tiles.h"
#include "workspace.h"

namespace kvfuse::tiles {

// One query head at one position, with its running softmax.
struct TileQuery {
  const float* exact;  // [dim], as given
  int8_t* codes;       // int8 codes of the rotated query
  int32_t* code_sums;  // [key groups]
  float scale;         // of the codes
  int64_t begin, end;  // the keys that it sees
  int64_t exact_from;  // exact from here on
  const float* bias;   // null: none
  Partial result;
};

// Scores of one tile and one query, from its raw dots.
struct SoftmaxArgs {
  const float *low, *exact;       // [kPageTokens]: sums of s_k * dot; f32 dots
  uint64_t low_mask, exact_mask;  // which tokens each is for; the others are not seen
  float query_scale, scale;       // score = scale * (query_scale * low), or scale * exact
  const float* addend;            // [kPageTokens], added to the low-bit scores; null: none
  float softcap;                  // 0: none
  const float* bias;              // null: none
  ptrdiff_t bias_stride;          // 0 or 1
};
struct SoftmaxSums {
  float maximum, sum;  // of the scores, and of the weights exp(score - maximum); kNegativeInfinity, 0 when none is seen
};

// One query's weights as integers, for one group of channels: weight * scale = factor * (256 * high + low).
struct Planes {
  int8_t *high, *low;  // [kPageTokens] each
  float factor;
  int32_t sum;  // of 256 * high + low
};

inline uint64_t Range(int64_t begin, int64_t end) {  // bits [begin, end) of 0 .. 64
  begin = std::clamp<int64_t>(begin, 0, 64), end = std::clamp<int64_t>(end, begin, 64);
  return begin == end ? 0 : (~uint64_t{0} >> (64 - (end - begin))) << begin;
}

template <typename Isa>
class TileAttention {
 public:
  explicit TileAttention(const AttendArgs& args)
      : args_(args), step_(args.step), cache_(args.cache), format_(*args.cache.format) {}

  void Run() {
    MakeQueries();
    int64_t begin = cache_.total, end = 0;
    for (int i = 0; i < count_; ++i) begin = std::min(begin, queries_[i].begin), end = std::max(end, queries_[i].end);
    begin = std::max(begin, args_.key_begin), end = std::min(end, args_.key_end);
    for (int64_t tile = begin / kPageTokens; tile * kPageTokens < end; ++tile) {
      const int64_t first = tile * kPageTokens;
      attended_ = step_.padding == nullptr
                      ? ~uint64_t{0}
                      : Isa::NonZero(step_.padding + first, static_cast<int>(std::min<int64_t>(64, end - first)));
      attended_ &= Range(begin - first, end - first);
      for (int i = 0; i < count_; i += Isa::kQueries)
        Block(queries_ + i, std::min(Isa::kQueries, count_ - i), first, first + kPageTokens < end);
    }
    if (args_.partials == nullptr)
      for (int i = 0; i < count_; ++i) FinishQuery(args_, i, queries_[i].result);
  }

 private:
  void MakeQueries() {
    const int group = step_.num_heads / format_.kv_num_heads;
    const SideFormat& side = format_.key;
    count_ = static_cast<int>(args_.query_end - args_.query_begin) * group;
    Workspace& space = Workspace::OfThread();
    const int64_t partial = PartialFloats(format_.value.dim);
    float* partials = args_.partials;
    if (partials == nullptr) partials = space.Take<float>(count_ * partial);
    queries_ = space.Take<TileQuery>(count_);
    row_ = space.Take<float>(std::max(side.dim, format_.value.dim));
    low_ = space.Take<float>(Isa::kQueries * kPageTokens);
    weights_ = space.Take<float>(Isa::kQueries * kPageTokens);
    exact_ = space.Take<float>(kPageTokens);
    addend_ = space.Take<float>(kPageTokens);
    planes_ = space.Take<Planes>(Isa::kQueries * format_.value.groups());
    int8_t* bytes = space.Take<int8_t>(int64_t{2} * kPageTokens * Isa::kQueries * format_.value.groups());
    for (int i = 0; i < Isa::kQueries * format_.value.groups(); ++i, bytes += 2 * kPageTokens)
      planes_[i].high = bytes, planes_[i].low = bytes + kPageTokens;
    for (int i = 0; i < count_; ++i) {
      const int64_t token = args_.query_begin + i / group;
      const int head = args_.kv_head * group + i % group;
      TileQuery& query = queries_[i];
      query.exact = step_.query.at(head, token);
      const QueryRange seen = RangeOf(args_, token);
      query.begin = seen.begin, query.end = seen.end, query.exact_from = seen.exact_from;
      query.bias = BiasRow(args_, head, token);
      query.codes = space.Take<int8_t>(side.dim);
      query.code_sums = space.Take<int32_t>(std::max(1, side.groups()));
      query.scale = QuantizeQuery(query, row_);
      query.result = PartialAt(partials + i * partial, format_.value.dim);
      query.result.Clear();
    }
  }

  float QuantizeQuery(TileQuery& query, float* row) {
    const SideFormat& side = format_.key;
    if (!side.scaled()) return 1.0f;
    std::copy(query.exact, query.exact + side.dim, row);
    if (side.rotated()) Isa::Rotate(row, side.dim);
    const float scale = Isa::QuantizeQuery(row, side.dim, query.codes);
    for (int g = 0; g < side.groups(); ++g) {
      const int first = g * side.group_width(), last = std::min(side.dim, first + side.group_width());
      query.code_sums[g] = 0;
      for (int c = first; c < last; ++c) query.code_sums[g] += query.codes[c];
    }
    return scale;
  }

  const uint8_t* Side(bool key, int64_t tile) const {
    return cache_.pages[tile / kPageTokens - cache_.page_begin] + format_.side_offset(key, args_.kv_head);
  }

  // Some queries and one tile; `more`: another tile follows.
  void Block(TileQuery* queries, int n, int64_t tile, bool more) {
    uint64_t low_masks[Isa::kQueries], exact_masks[Isa::kQueries], low_any = 0, any = 0;
    for (int i = 0; i < n; ++i) {
      const TileQuery& query = queries[i];
      const uint64_t seen = attended_ & Range(query.begin - tile, query.end - tile);
      const uint64_t exact = Range(0, format_.n_sink - tile) | Range(query.exact_from - tile, 64);
      low_masks[i] = seen & ~exact, exact_masks[i] = seen & exact;
      low_any |= low_masks[i], any |= seen;
    }
    if (any == 0) return;
    const uint8_t* next = nullptr;  // fetched ahead
    if (low_any != 0 && more && tile + kPageTokens < cache_.encoded_end) next = Side(true, tile + kPageTokens);
    if (low_any != 0) KeyScores(queries, n, tile, low_any, next);
    float factors[Isa::kQueries] = {};
    for (int i = 0; i < n; ++i) {
      const uint64_t seen = low_masks[i] | exact_masks[i];
      if (seen == 0) continue;
      factors[i] =
          Weigh(queries[i], tile, low_masks[i], exact_masks[i], low_ + i * kPageTokens, weights_ + i * kPageTokens);
      if (factors[i] == kHidden) low_masks[i] = exact_masks[i] = 0;  // a bias hides all of them
    }
    if (low_any != 0) LowValues(queries, n, tile, low_masks, factors, next);
    for (int i = 0; i < n; ++i) {
      if (exact_masks[i] == 0) continue;
      ExactRows(false, tile, exact_masks[i]);
      Isa::template AddRows<float>(rows_, exact_masks[i], weights_ + i * kPageTokens, factors[i],
                                   queries[i].result.exact, format_.value.dim);
    }
  }

  // low_[i][t] = sum over groups of s_k * dot, for all tokens that some query sees.
  void KeyScores(TileQuery* queries, int n, int64_t tile, uint64_t seen, const uint8_t* next) {
    const uint8_t* side = Side(true, tile);
    if (Fits(format_.key)) {
      const int8_t* codes[Isa::kQueries];
      const int32_t* sums[Isa::kQueries];
      for (int i = 0; i < n; ++i) codes[i] = queries[i].codes, sums[i] = queries[i].code_sums;
      Isa::KeyScores(format_.key, side, codes, sums, n, low_, next);
      return;
    }
    for (int i = 0; i < n && !format_.key.scaled(); ++i) {
      LowRows(side, format_.key.row_bytes(), seen);
      Isa::template DotRows<uint16_t>(rows_, seen, queries[i].exact, format_.key.dim, low_ + i * kPageTokens);
    }
    for (int t = 0; t < kPageTokens && format_.key.scaled(); ++t) {
      if ((seen >> t & 1) == 0) continue;
      low_row_.Read(format_.key, side + int64_t{t} * format_.key.row_bytes());
      for (int i = 0; i < n; ++i) low_[i * kPageTokens + t] = GroupDots(format_.key, queries[i].codes, low_row_);
    }
  }

  // Turns scores into softmax weights relative to the tile's maximum, and takes the running maximum further. What
  // comes back brings those weights to it; kHidden when no token has a weight.
  static constexpr float kHidden = -1.0f;
  float Weigh(TileQuery& query, int64_t tile, uint64_t low_mask, uint64_t exact_mask, const float* low,
              float* weights) {
    if (exact_mask != 0) {
      ExactRows(true, tile, exact_mask);
      Isa::template DotRows<float>(rows_, exact_mask, query.exact, format_.key.dim, exact_);
    }
    SoftmaxArgs softmax{low,         exact_,  low_mask,      exact_mask, query.scale,
                        step_.scale, nullptr, step_.softcap, nullptr,    step_.bias_key_stride};
    if (low_mask != 0 && format_.centered()) {
      MeanScores(query, tile, low_mask);
      softmax.addend = addend_;
    }
    if (query.bias != nullptr) softmax.bias = query.bias + tile * step_.bias_key_stride;
    const SoftmaxSums sums = Isa::Softmax(softmax, weights);
    if (sums.sum == 0.0f) return kHidden;
    Partial& result = query.result;
    float factor = 1.0f;
    if (sums.maximum > *result.maximum) {
      const float shrink = Isa::Exp(*result.maximum - sums.maximum);
      if (*result.sum != 0.0f) result.Scale(shrink);
      *result.maximum = sums.maximum;
    } else {
      factor = Isa::Exp(sums.maximum - *result.maximum);
    }
    *result.sum += factor * sums.sum;
    return factor;
  }

  // addend_[t] = scale * (q . mean of the block of token t)
  void MeanScores(const TileQuery& query, int64_t tile, uint64_t mask) {
    const int64_t block = format_.block;
    for (int t = 0; t < kPageTokens;) {
      const int end = static_cast<int>(std::min<int64_t>(kPageTokens, ((tile + t) / block + 1) * block - tile));
      float score = 0.0f;
      if ((mask & Range(t, end)) != 0) {
        const uint16_t* mean = cache_.block_means[(tile + t) / block - cache_.mean_begin];
        const void* row = mean + int64_t{args_.kv_head} * format_.key.dim;
        Isa::template DotRows<uint16_t>(&row, 1, query.exact, format_.key.dim, &score);
      }
      for (; t < end; ++t) addend_[t] = step_.scale * score;
    }
  }

  void LowValues(TileQuery* queries, int n, int64_t tile, const uint64_t* masks, const float* factors,
                 const uint8_t* next) {
    const SideFormat& side = format_.value;
    const uint8_t* bytes = Side(false, tile);
    if (next != nullptr) next = Side(false, tile + kPageTokens);
    if (!side.scaled()) return HalfValues(queries, n, bytes, masks, factors);
    if (!Fits(side)) return RowValues(queries, n, bytes, masks, factors);
    float* sums[Isa::kQueries];
    uint64_t seen = 0;
    int kept = 0;  // queries whose weights have become integers; planes_ is [kept][groups]
    for (int i = 0; i < n; ++i) {
      if (masks[i] == 0) continue;
      float* sum = RotatedSum(queries[i]);
      const float* weights = weights_ + i * kPageTokens;
      bool integer = !ExactWeights();
      for (int g = 0; g < side.groups() && integer; ++g)
        integer = Isa::Split(side, bytes, g, masks[i], weights, factors[i], planes_[kept * side.groups() + g]);
      if (!integer) {
        Isa::AddValues(side, bytes, masks[i], weights, factors[i], sum);
        continue;
      }
      sums[kept++] = sum;
      seen |= masks[i];
    }
    if (kept > 0) Isa::AddSplitValues(side, bytes, seen, planes_, kept, sums, next);
  }

  void HalfValues(TileQuery* queries, int n, const uint8_t* bytes, const uint64_t* masks, const float* factors) {
    for (int i = 0; i < n; ++i) {
      LowRows(bytes, format_.value.row_bytes(), masks[i]);
      Isa::template AddRows<uint16_t>(rows_, masks[i], weights_ + i * kPageTokens, factors[i], queries[i].result.exact,
                                      format_.value.dim);
    }
  }

  void RowValues(TileQuery* queries, int n, const uint8_t* bytes, const uint64_t* masks, const float* factors) {
    for (int t = 0; t < kPageTokens; ++t) {
      bool unpacked = false;
      for (int i = 0; i < n; ++i) {
        if ((masks[i] >> t & 1) == 0) continue;
        if (!unpacked) low_row_.Read(format_.value, bytes + int64_t{t} * format_.value.row_bytes());
        unpacked = true;
        const void* row = low_row_.values.data();
        Isa::template AddRows<float>(&row, 1, weights_ + i * kPageTokens + t, factors[i], RotatedSum(queries[i]),
                                     format_.value.dim);
      }
    }
  }

  float* RotatedSum(TileQuery& query) const {
    return format_.value.rotated() ? query.result.rotated : query.result.exact;
  }

  void ExactRows(bool key, int64_t tile, uint64_t mask) {
    for (; mask != 0; mask &= mask - 1) {
      const int t = __builtin_ctzll(mask);
      rows_[t] = ExactRow(cache_, key, args_.kv_head, tile + t);
    }
  }

  void LowRows(const uint8_t* bytes, int row_bytes, uint64_t mask) {
    for (; mask != 0; mask &= mask - 1) {
      const int t = __builtin_ctzll(mask);
      rows_[t] = bytes + int64_t{t} * row_bytes;
    }
  }

  const AttendArgs& args_;
  const StepArgs& step_;
  const CacheView& cache_;
  const CacheFormat& format_;
  Workspace::Scope scope_;
  TileQuery* queries_ = nullptr;
  int count_ = 0;
  uint64_t attended_ = 0;          // tokens of the tile that padding lets through
  float *row_, *low_, *weights_;   // [max dim]; [kQueries][kPageTokens] twice
  float *exact_, *addend_;         // [kPageTokens]
  Planes* planes_;                 // [kQueries][value groups]
  const void* rows_[kPageTokens];  // of the tokens at work
  LowBitRow low_row_;
};

}  // namespace kvfuse::tiles
