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
#include "profile.h"
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

// Weights as integers: weight * scale = factor * (256 * high + low), for one group of channels of one tile.
struct Planes {
  int8_t *high, *low;  // [queries][kPlaneStride], kPageTokens of them used
  float* factors;      // [queries]
  int32_t* sums;       // [queries]: of 256 * high + low
};
constexpr int kPlaneStride = 2 * kPageTokens;

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
    for (int64_t tile = begin / kPageTokens * kPageTokens; tile < end; tile += kTiles * kPageTokens) {
      const int tiles = static_cast<int>(std::min<int64_t>(kTiles, (end - tile + kPageTokens - 1) / kPageTokens));
      for (int i = 0; i < tiles; ++i) {
        const int64_t first = tile + i * kPageTokens;
        attended_[i] = step_.padding == nullptr
                           ? ~uint64_t{0}
                           : Isa::NonZero(step_.padding + first, static_cast<int>(std::min<int64_t>(64, end - first)));
        attended_[i] &= Range(begin - first, end - first);
      }
      for (int i = 0; i < count_; i += Isa::kQueries)
        Block(queries_ + i, std::min(Isa::kQueries, count_ - i), tile, tiles);
    }
    const profile::Timed timed(profile::kMerge);
    if (args_.partials == nullptr)
      for (int i = 0; i < count_; ++i) FinishQuery(args_, i, queries_[i].result);
  }

 private:
  void MakeQueries() {
    const profile::Timed timed(profile::kQuery);
    const int group = step_.num_heads / format_.kv_num_heads;
    const SideFormat& side = format_.key;
    count_ = static_cast<int>(args_.query_end - args_.query_begin) * group;
    Workspace& space = Workspace::OfThread();
    const int64_t partial = PartialFloats(format_.value.dim);
    float* partials = args_.partials;
    if (partials == nullptr) partials = space.Take<float>(count_ * partial);
    queries_ = space.Take<TileQuery>(count_);
    row_ = space.Take<float>(std::max(side.dim, format_.value.dim));
    for (float** array : {&low_, &exact_, &addend_, &weights_})
      *array = space.Take<float>(kTiles * Isa::kQueries * kPageTokens);
    planes_ = space.Take<Planes>(format_.value.groups());
    for (int g = 0; g < format_.value.groups(); ++g) {
      planes_[g].high = space.Take<int8_t>(Isa::kQueries * kPlaneStride);
      planes_[g].low = planes_[g].high + kPageTokens;
      planes_[g].factors = space.Take<float>(Isa::kQueries);
      planes_[g].sums = space.Take<int32_t>(Isa::kQueries);
    }
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
    return Isa::QuantizeQuery(side, row, query.codes, query.code_sums);
  }

  // What to fetch ahead while this tile is at work.
  const uint8_t* Ahead(bool key, int64_t tile) const {
    return Side(key, tile + kPageTokens < cache_.encoded_end ? tile + kPageTokens : tile);
  }

  const uint8_t* Side(bool key, int64_t tile) const {
    return cache_.pages[tile / kPageTokens - cache_.page_begin] + format_.side_offset(key, args_.kv_head);
  }

  // Some queries and some tiles, stage by stage: the stages of one tile wait for each other, those of several do not.
  void Block(TileQuery* queries, int n, int64_t first, int tiles) {
    for (int k = 0; k < tiles; ++k) {
      Masks(queries, n, first + k * kPageTokens, k);
      if (low_any_[k] != 0) KeyScores(queries, n, first + k * kPageTokens, k);
    }
    for (int k = 0; k < tiles; ++k)
      for (int i = 0; i < n; ++i)
        if ((low_masks_[k][i] | exact_masks_[k][i]) != 0) ExactScores(queries[i], first + k * kPageTokens, k, i);
    for (int i = 0; i < n; ++i) Weigh(queries[i], first, tiles, i);
    for (int k = 0; k < tiles; ++k) {
      if (low_any_[k] != 0) LowValues(queries, n, first + k * kPageTokens, k);
      for (int i = 0; i < n; ++i) {
        if (exact_masks_[k][i] == 0) continue;
        const profile::Timed timed(profile::kExactValues);
        ExactRows(false, first + k * kPageTokens, exact_masks_[k][i]);
        Isa::template AddRows<float>(rows_, exact_masks_[k][i], Weights(k, i), factors_[k][i], queries[i].result.exact,
                                     format_.value.dim);
      }
    }
  }

  // Which tokens each query sees, exactly or not.
  void Masks(const TileQuery* queries, int n, int64_t tile, int k) {
    low_any_[k] = 0;
    for (int i = 0; i < n; ++i) {
      const TileQuery& query = queries[i];
      const uint64_t seen = attended_[k] & Range(query.begin - tile, query.end - tile);
      const uint64_t exact = Range(0, format_.n_sink - tile) | Range(query.exact_from - tile, 64);
      low_masks_[k][i] = seen & ~exact;
      exact_masks_[k][i] = seen & exact;
      low_any_[k] |= low_masks_[k][i];
    }
  }

  // Low(k, i)[t] = sum over groups of s_k * dot, for all tokens that some query sees.
  void KeyScores(TileQuery* queries, int n, int64_t tile, int k) {
    const profile::Timed timed(profile::kScores);
    const uint8_t* side = Side(true, tile);
    if (Fits(format_.key)) {
      const int8_t* codes[Isa::kQueries];
      const int32_t* sums[Isa::kQueries];
      for (int i = 0; i < n; ++i) codes[i] = queries[i].codes, sums[i] = queries[i].code_sums;
      Isa::KeyScores(format_.key, side, codes, sums, n, Low(k, 0), Ahead(true, tile));
      return;
    }
    for (int i = 0; i < n && !format_.key.scaled(); ++i) {
      LowRows(side, format_.key.row_bytes(), low_masks_[k][i]);
      Isa::template DotRows<uint16_t>(rows_, low_masks_[k][i], queries[i].exact, format_.key.dim, Low(k, i));
    }
    for (uint64_t left = format_.key.scaled() ? low_any_[k] : 0; left != 0; left &= left - 1) {
      const int t = __builtin_ctzll(left);
      low_row_.Read(format_.key, side + int64_t{t} * format_.key.row_bytes());
      for (int i = 0; i < n; ++i) Low(k, i)[t] = GroupDots(format_.key, queries[i].codes, low_row_);
    }
  }

  // The f32 dots of exact keys, and what block-centred keys add to the low-bit ones.
  void ExactScores(const TileQuery& query, int64_t tile, int k, int i) {
    if (exact_masks_[k][i] != 0) {
      const profile::Timed timed(profile::kExactKeys);
      ExactRows(true, tile, exact_masks_[k][i]);
      Isa::template DotRows<float>(rows_, exact_masks_[k][i], query.exact, format_.key.dim, Exact(k, i));
    }
    if (low_masks_[k][i] != 0 && format_.centered()) MeanScores(query, tile, low_masks_[k][i], Addend(k, i));
  }

  // Turns scores into softmax weights relative to their tile's maximum, and takes the running maximum further;
  // factors_ bring those weights to it. A tile that a bias hides wholly loses its masks.
  void Weigh(TileQuery& query, int64_t first, int tiles, int i) {
    const profile::Timed timed(profile::kSoftmax);
    SoftmaxSums sums[kTiles];
    float maximum = *query.result.maximum;
    for (int k = 0; k < tiles; ++k) {
      sums[k] = {kNegativeInfinity, 0.0f};
      if ((low_masks_[k][i] | exact_masks_[k][i]) == 0) continue;
      SoftmaxArgs softmax{Low(k, i), Exact(k, i),   low_masks_[k][i], exact_masks_[k][i],   query.scale, step_.scale,
                          nullptr,   step_.softcap, nullptr,          step_.bias_key_stride};
      if (format_.centered()) softmax.addend = Addend(k, i);
      if (query.bias != nullptr) softmax.bias = query.bias + (first + k * kPageTokens) * step_.bias_key_stride;
      sums[k] = Isa::Softmax(softmax, Weights(k, i));
      if (sums[k].sum == 0.0f) low_masks_[k][i] = exact_masks_[k][i] = 0;
      maximum = std::max(maximum, sums[k].maximum);
    }
    if (maximum == kNegativeInfinity) return;
    float exponents[kTiles + 1], powers[kTiles + 1];
    for (int k = 0; k < kTiles; ++k) exponents[k] = k < tiles ? sums[k].maximum - maximum : 0.0f;
    exponents[kTiles] = *query.result.maximum - maximum;
    Isa::Exp(exponents, kTiles + 1, powers);
    if (maximum > *query.result.maximum && *query.result.sum != 0.0f) query.result.Scale(powers[kTiles]);
    *query.result.maximum = maximum;
    for (int k = 0; k < tiles; ++k) {
      factors_[k][i] = powers[k];
      if (sums[k].sum != 0.0f) *query.result.sum += powers[k] * sums[k].sum;
    }
  }

  // addend[t] = scale * (q . mean of the block of token t)
  void MeanScores(const TileQuery& query, int64_t tile, uint64_t mask, float* addend) {
    const int64_t block = format_.block;
    for (int t = 0; t < kPageTokens;) {
      const int end = static_cast<int>(std::min<int64_t>(kPageTokens, ((tile + t) / block + 1) * block - tile));
      float score = 0.0f;
      if ((mask & Range(t, end)) != 0) {
        const uint16_t* mean = cache_.block_means[(tile + t) / block - cache_.mean_begin];
        const void* row = mean + int64_t{args_.kv_head} * format_.key.dim;
        Isa::template DotRows<uint16_t>(&row, 1, query.exact, format_.key.dim, &score);
      }
      std::fill(addend + t, addend + end, step_.scale * score);
      t = end;
    }
  }

  void LowValues(TileQuery* queries, int n, int64_t tile, int k) {
    const SideFormat& side = format_.value;
    const uint8_t* bytes = Side(false, tile);
    if (!side.scaled()) return HalfValues(queries, n, bytes, k);
    if (!Fits(side)) return RowValues(queries, n, bytes, k);
    float* sums[Isa::kQueries];
    uint64_t seen = 0;
    int kept = 0;  // queries whose weights have become integers
    for (int i = 0; i < n; ++i) {
      if (low_masks_[k][i] == 0) continue;
      const profile::Timed timed(profile::kSplit);
      float* sum = RotatedSum(queries[i]);
      const bool exact =
          ExactWeights() || !Isa::Split(side, bytes, low_masks_[k][i], Weights(k, i), factors_[k][i], kept, planes_);
      if (exact) {
        Isa::AddValues(side, bytes, low_masks_[k][i], Weights(k, i), factors_[k][i], sum);
        continue;
      }
      sums[kept++] = sum;
      seen |= low_masks_[k][i];
    }
    const profile::Timed timed(profile::kValues);
    if (kept > 0) Isa::AddSplitValues(side, bytes, seen, planes_, kept, sums, Ahead(false, tile));
  }

  void HalfValues(TileQuery* queries, int n, const uint8_t* bytes, int k) {
    for (int i = 0; i < n; ++i) {
      LowRows(bytes, format_.value.row_bytes(), low_masks_[k][i]);
      Isa::template AddRows<uint16_t>(rows_, low_masks_[k][i], Weights(k, i), factors_[k][i], queries[i].result.exact,
                                      format_.value.dim);
    }
  }

  void RowValues(TileQuery* queries, int n, const uint8_t* bytes, int k) {
    for (uint64_t left = low_any_[k]; left != 0; left &= left - 1) {
      const int t = __builtin_ctzll(left);
      low_row_.Read(format_.value, bytes + int64_t{t} * format_.value.row_bytes());
      const void* row = low_row_.values.data();
      for (int i = 0; i < n; ++i)
        if ((low_masks_[k][i] >> t & 1) != 0)
          Isa::template AddRows<float>(&row, 1, Weights(k, i) + t, factors_[k][i], RotatedSum(queries[i]),
                                       format_.value.dim);
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

  // What the block at work needs of one tile and query.
  float* Low(int k, int i) const { return low_ + (k * Isa::kQueries + i) * kPageTokens; }
  float* Exact(int k, int i) const { return exact_ + (k * Isa::kQueries + i) * kPageTokens; }
  float* Addend(int k, int i) const { return addend_ + (k * Isa::kQueries + i) * kPageTokens; }
  float* Weights(int k, int i) const { return weights_ + (k * Isa::kQueries + i) * kPageTokens; }

  static constexpr int kTiles = 4;  // tiles of a block

  const AttendArgs& args_;
  const StepArgs& step_;
  const CacheView& cache_;
  const CacheFormat& format_;
  Workspace::Scope scope_;
  TileQuery* queries_ = nullptr;
  int count_ = 0;
  uint64_t attended_[kTiles] = {};  // tokens that padding lets through
  uint64_t low_any_[kTiles] = {}, low_masks_[kTiles][Isa::kQueries], exact_masks_[kTiles][Isa::kQueries];
  float factors_[kTiles][Isa::kQueries] = {};
  float* row_;                                // [max dim]
  float *low_, *exact_, *addend_, *weights_;  // [kTiles][kQueries][kPageTokens]
  Planes* planes_;                            // [value groups]
  const void* rows_[kPageTokens];             // of the tokens at work
  LowBitRow low_row_;
};

}  // namespace kvfuse::tiles
