// Attention span by span, for every instruction set: an Isa supplies the inner loops, up to Isa::kQueries queries that
// share each unpacked line. The int32 dots of low-bit keys are the reference's.
//
// A span is four tiles, 256 tokens, begun at a multiple of 256. Low-bit values are summed up in integers: the softmax
// weights of a span, exp(score - the span's maximum) times the values' scales, become 16-bit numbers in two signed
// 8-bit planes, each off by at most 1/65024 of the span's largest. They depend on the query and the span alone, never
// on the chunk. With exact weights (KVFUSE_WEIGHTS=exact) the same sums are taken in f32.
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

constexpr int kTiles = 4;
constexpr int kSpanTokens = kTiles * kPageTokens;

// Which tokens of a span: one word a tile.
struct SpanMask {
  uint64_t words[kTiles];
  bool any() const { return (words[0] | words[1] | words[2] | words[3]) != 0; }
  uint32_t lanes(int line) const {  // 16 tokens
    return static_cast<uint32_t>(words[line / 4] >> (line % 4 * 16)) & 0xffff;
  }
};

// Scores of one span and one query, from its raw dots.
struct SoftmaxArgs {
  const float *low, *exact;       // [kSpanTokens]: sums of s_k * dot; f32 dots
  SpanMask low_mask, exact_mask;  // which tokens each is for; the others are not seen
  int tiles;                      // of the span that may be seen
  float low_scale, scale;         // score = low_scale * low, or scale * exact
  const float* addend;            // [kSpanTokens], added to the low-bit scores; null: none
  float softcap;                  // 0: none
  const float* bias;              // null: none
  ptrdiff_t bias_stride;          // 0 or 1
};
// The value bytes of a span's tiles that have low-bit tokens; null for the others.
struct SpanBytes {
  const uint8_t* tiles[kTiles];
  const uint8_t* next[kTiles];  // to be fetched ahead
};

// Weights as integers: weight * scale = factor * (256 * high + low), for one group of channels of one span.
struct Planes {
  int8_t *high, *low;  // [queries][kPlaneStride], kSpanTokens of them used
  int32_t* sums;       // [queries]: of 256 * high + low
};
constexpr int kPlaneStride = 2 * kSpanTokens;
constexpr float kSteps = 127 * 256;  // the largest of a span becomes this integer
constexpr float kSmallest = 1e-30f;  // below it, kSteps / largest might overflow: such spans are summed in f32

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
    for (int64_t span = begin / kSpanTokens * kSpanTokens; span < end; span += kSpanTokens) {
      tiles_ = static_cast<int>(std::min<int64_t>(kTiles, (end - span + kPageTokens - 1) / kPageTokens));
      for (int k = 0; k < tiles_; ++k) {
        const int64_t first = span + k * kPageTokens;
        attended_[k] = step_.padding == nullptr
                           ? ~uint64_t{0}
                           : Isa::NonZero(step_.padding + first, static_cast<int>(std::min<int64_t>(64, end - first)));
        attended_[k] &= Range(begin - first, end - first);
      }
      for (int i = 0; i < count_; i += Isa::kQueries) Attend(queries_ + i, std::min(Isa::kQueries, count_ - i), span);
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
    for (float** array : {&low_, &exact_, &addend_, &weights_}) *array = space.Take<float>(Isa::kQueries * kSpanTokens);
    means_ = space.Take<float>(Isa::kQueries * kPageTokens);
    planes_ = space.Take<Planes>(format_.value.groups());
    for (int g = 0; g < format_.value.groups(); ++g) {
      planes_[g].high = space.Take<int8_t>(Isa::kQueries * kPlaneStride);
      planes_[g].low = planes_[g].high + kSpanTokens;
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

  // What to fetch ahead while this tile is at work: one tile ahead comes too late, a span ahead crowds the L1 cache.
  const uint8_t* Ahead(bool key, int64_t tile) const {
    return Side(key, tile + 2 * kPageTokens < cache_.encoded_end ? tile + 2 * kPageTokens : tile);
  }

  const uint8_t* Side(bool key, int64_t tile) const {
    return cache_.pages[tile / kPageTokens - cache_.page_begin] + format_.side_offset(key, args_.kv_head);
  }

  // Some queries and one span, stage by stage.
  void Attend(TileQuery* queries, int n, int64_t span) {
    for (int k = 0; k < tiles_; ++k) {
      const int64_t tile = span + k * kPageTokens;
      low_any_[k] = Masks(queries, n, tile, k);
      if (low_any_[k] != 0) KeyScores(queries, n, tile, k);
      ExactScores(queries, n, tile, k);
    }
    if (format_.centered()) MeanScores(queries, n, span);
    Weigh(queries, n, span);
    LowValues(queries, n, span);
    for (int k = 0; k < tiles_; ++k) ExactValues(queries, n, span + k * kPageTokens, k);
  }

  // Which tokens each query sees, exactly or not; gives those that some query sees as low-bit.
  uint64_t Masks(const TileQuery* queries, int n, int64_t tile, int k) {
    uint64_t any = 0;
    for (int i = 0; i < n; ++i) {
      const TileQuery& query = queries[i];
      uint64_t low = attended_[k], exact = 0;
      const int64_t end = tile + kPageTokens;
      if (tile < std::max(query.begin, format_.n_sink) || end > std::min(query.end, query.exact_from)) {
        const uint64_t seen = low & Range(query.begin - tile, query.end - tile);
        exact = seen & (Range(0, format_.n_sink - tile) | Range(query.exact_from - tile, 64));
        low = seen & ~exact;
      }
      low_masks_[i].words[k] = low;
      exact_masks_[i].words[k] = exact;
      any |= low;
    }
    return any;
  }

  // Low(i)[t] = sum over groups of s_k * dot, for all tokens that some query sees.
  void KeyScores(TileQuery* queries, int n, int64_t tile, int k) {
    const profile::Timed timed(profile::kScores);
    const uint8_t* side = Side(true, tile);
    if (Fits(format_.key)) {
      const int8_t* codes[Isa::kQueries];
      const int32_t* sums[Isa::kQueries];
      for (int i = 0; i < n; ++i) codes[i] = queries[i].codes, sums[i] = queries[i].code_sums;
      Isa::KeyScores(format_.key, side, codes, sums, n, low_ + k * kPageTokens, Ahead(true, tile));
      return;
    }
    for (int i = 0; i < n && !format_.key.scaled(); ++i) {
      const uint64_t mask = low_masks_[i].words[k];
      LowRows(side, format_.key.row_bytes(), mask);
      Isa::template DotRows<uint16_t>(rows_, mask, queries[i].exact, format_.key.dim, Low(i) + k * kPageTokens);
    }
    for (uint64_t left = format_.key.scaled() ? low_any_[k] : 0; left != 0; left &= left - 1) {
      const int t = __builtin_ctzll(left);
      low_row_.Read(format_.key, side + int64_t{t} * format_.key.row_bytes());
      for (int i = 0; i < n; ++i) Low(i)[k * kPageTokens + t] = GroupDots(format_.key, queries[i].codes, low_row_);
    }
  }

  // The f32 dots of keys that some query uses exactly, and what block-centred keys add to the low-bit ones.
  void ExactScores(const TileQuery* queries, int n, int64_t tile, int k) {
    const profile::Timed timed(profile::kExactKeys);
    const float* rows[Isa::kQueries];
    float* dots[Isa::kQueries];
    uint64_t exact = 0;
    for (int i = 0; i < n; ++i) {
      rows[i] = queries[i].exact;
      dots[i] = Exact(i) + k * kPageTokens;
      exact |= exact_masks_[i].words[k];
    }
    if (exact != 0) {
      ExactRows(true, tile, exact);
      Isa::template DotBatch<float>(rows_, exact, rows, n, format_.key.dim, dots);
    }
  }

  void ExactValues(TileQuery* queries, int n, int64_t tile, int k) {
    uint64_t masks[Isa::kQueries], any = 0;
    for (int i = 0; i < n; ++i) any |= masks[i] = exact_masks_[i].words[k];
    if (any == 0) return;
    const profile::Timed timed(profile::kExactValues);
    ExactRows(false, tile, any);
    const float* weights[Isa::kQueries];
    float* sums[Isa::kQueries];
    for (int i = 0; i < n; ++i) {
      weights[i] = Weights(i) + k * kPageTokens;
      sums[i] = queries[i].result.exact;
    }
    Isa::template AddBatch<float>(rows_, masks, weights, factors_, n, sums, format_.value.dim);
  }

  // Turns scores into softmax weights relative to the span's maximum, and takes the running maximum further; factors_
  // bring those weights to it. Here as in LowValues, one step is
  // taken for all queries before the next: what a step ends with comes late, and the next would wait for it.
  void Weigh(TileQuery* queries, int n, int64_t span) {
    const profile::Timed timed(profile::kSoftmax);
    float maxima[Isa::kQueries], sums[Isa::kQueries], exponents[2 * Isa::kQueries], powers[2 * Isa::kQueries];
    for (int i = 0; i < n; ++i) {
      maxima[i] = kNegativeInfinity;
      if (!low_masks_[i].any() && !exact_masks_[i].any()) continue;
      const TileQuery& query = queries[i];
      const SoftmaxArgs softmax{Low(i),
                                Exact(i),
                                low_masks_[i],
                                exact_masks_[i],
                                tiles_,
                                step_.scale * query.scale,
                                step_.scale,
                                format_.centered() ? Addend(i) : nullptr,
                                step_.softcap,
                                query.bias == nullptr ? nullptr : query.bias + span * step_.bias_key_stride,
                                step_.bias_key_stride};
      maxima[i] = Isa::Scores(softmax, Weights(i));
      if (query.bias != nullptr) HideTokens(i);
    }
    for (int i = 0; i < n; ++i) {
      sums[i] = 0.0f;
      if (maxima[i] == kNegativeInfinity)
        low_masks_[i] = exact_masks_[i] = {};
      else
        sums[i] = Isa::Powers(Weights(i), tiles_, maxima[i]);
      const float before = *queries[i].result.maximum, maximum = std::max(before, maxima[i]);
      const bool first = before == kNegativeInfinity;
      exponents[2 * i] = maxima[i] == kNegativeInfinity ? 0.0f : maxima[i] - maximum;
      exponents[2 * i + 1] = first ? 0.0f : before - maximum;
    }
    Isa::Exp(exponents, 2 * n, powers);
    for (int i = 0; i < n; ++i) {
      Partial& result = queries[i].result;
      factors_[i] = powers[2 * i];
      if (maxima[i] == kNegativeInfinity) continue;
      if (maxima[i] > *result.maximum) {
        if (*result.maximum != kNegativeInfinity) result.Scale(powers[2 * i + 1]);
        *result.maximum = maxima[i];
      }
      *result.sum += powers[2 * i] * sums[i];
    }
  }

  // Tokens that a bias of minus infinity hides leave the masks: nothing is read of their values, which may be NaN.
  void HideTokens(int i) {
    for (int t = 0; t < tiles_ * kPageTokens; ++t) {
      const uint64_t hidden = static_cast<uint64_t>(Weights(i)[t] == kNegativeInfinity) << t % kPageTokens;
      low_masks_[i].words[t / kPageTokens] &= ~hidden;
      exact_masks_[i].words[t / kPageTokens] &= ~hidden;
    }
  }

  // Addend(i)[t] = scale * (q . mean of the block of token t), for the blocks that have low-bit tokens here.
  void MeanScores(const TileQuery* queries, int n, int64_t span) {
    const profile::Timed timed(profile::kScores);
    int begins[kPageTokens + 1], count = 0;  // of the pieces that share a mean, at most as many as rows_ holds
    for (int t = 0; t < tiles_ * kPageTokens;) {
      const int64_t block = (span + t) / format_.block, tile = t / kPageTokens;
      const int end = static_cast<int>(std::min((block + 1) * format_.block - span, (tile + 1) * kPageTokens));
      if ((low_any_[tile] & Range(t - tile * kPageTokens, end - tile * kPageTokens)) != 0) {
        begins[count] = t;
        rows_[count++] = cache_.block_means[block - cache_.mean_begin] + int64_t{args_.kv_head} * format_.key.dim;
      }
      begins[count] = t = end;
      if (count < kPageTokens && t < tiles_ * kPageTokens) continue;
      AddMeans(queries, n, begins, count);
      count = 0;
    }
  }

  // Pieces that lie apart have nothing low-bit between them, so that it does not matter what is written there.
  void AddMeans(const TileQuery* queries, int n, const int* begins, int count) {
    if (count == 0) return;
    const float* rows[Isa::kQueries];
    float* dots[Isa::kQueries];
    for (int i = 0; i < n; ++i) rows[i] = queries[i].exact, dots[i] = means_ + i * kPageTokens;
    Isa::template DotBatch<uint16_t>(rows_, Range(0, count), rows, n, format_.key.dim, dots);
    for (int i = 0; i < n; ++i)
      for (int piece = 0; piece < count; ++piece)
        std::fill(Addend(i) + begins[piece], Addend(i) + begins[piece + 1], step_.scale * dots[i][piece]);
  }

  void LowValues(TileQuery* queries, int n, int64_t span) {
    const SideFormat& side = format_.value;
    SpanBytes bytes{};
    for (int k = 0; k < tiles_; ++k) {
      const int64_t tile = span + k * kPageTokens;
      if (low_any_[k] != 0) bytes.tiles[k] = Side(false, tile), bytes.next[k] = Ahead(false, tile);
    }
    if (!Fits(side)) {
      for (int k = 0; k < tiles_; ++k)
        if (low_any_[k] != 0) RowValues(queries, n, bytes.tiles[k], k);
      return;
    }
    const bool integers = !ExactWeights();
    float *sums[Isa::kQueries], factors[Isa::kQueries], sizes[Isa::kQueries];
    int kept[Isa::kQueries], count = 0;  // queries whose weights become integers
    {
      const profile::Timed timed(profile::kSplit);
      for (int i = 0; i < n; ++i)
        sizes[i] =
            integers && low_masks_[i].any() ? Isa::Largest(side, bytes, tiles_, low_masks_[i], Weights(i)) : 0.0f;
      for (int i = 0; i < n; ++i) {
        if (!low_masks_[i].any()) continue;
        if (integers && !(sizes[i] < kSmallest)) {
          sums[count] = RotatedSum(queries[i]);
          factors[count] = factors_[i] * (sizes[i] / kSteps);
          kept[count++] = i;
          continue;
        }
        for (int k = 0; k < tiles_; ++k)
          Isa::AddValues(side, bytes.tiles[k], low_masks_[i].words[k], Weights(i) + k * kPageTokens, factors_[i],
                         RotatedSum(queries[i]));
      }
      for (int j = 0; j < count; ++j)
        Isa::Split(side, bytes, tiles_, low_masks_[kept[j]], Weights(kept[j]), kSteps / sizes[kept[j]], j, planes_);
    }
    const profile::Timed timed(profile::kValues);
    if (count > 0) Isa::AddSplitValues(side, bytes, tiles_, planes_, count, factors, sums);
  }

  // Values in the reference's layout: halves, or a head size that fits no line.
  void RowValues(TileQuery* queries, int n, const uint8_t* bytes, int k) {
    const SideFormat& side = format_.value;
    for (int i = 0; i < n && !side.scaled(); ++i) {
      const uint64_t mask = low_masks_[i].words[k];
      LowRows(bytes, side.row_bytes(), mask);
      Isa::template AddRows<uint16_t>(rows_, mask, Weights(i) + k * kPageTokens, factors_[i], queries[i].result.exact,
                                      side.dim);
    }
    for (uint64_t left = side.scaled() ? low_any_[k] : 0; left != 0; left &= left - 1) {
      const int t = __builtin_ctzll(left);
      low_row_.Read(side, bytes + int64_t{t} * side.row_bytes());
      const void* row = low_row_.values.data();
      for (int i = 0; i < n; ++i)
        if ((low_masks_[i].words[k] >> t & 1) != 0)
          Isa::template AddRows<float>(&row, 1, Weights(i) + k * kPageTokens + t, factors_[i], RotatedSum(queries[i]),
                                       side.dim);
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

  // [kSpanTokens] of the span at work.
  float* Low(int i) const { return low_ + i * kSpanTokens; }
  float* Exact(int i) const { return exact_ + i * kSpanTokens; }
  float* Addend(int i) const { return addend_ + i * kSpanTokens; }
  float* Weights(int i) const { return weights_ + i * kSpanTokens; }

  const AttendArgs& args_;
  const StepArgs& step_;
  const CacheView& cache_;
  const CacheFormat& format_;
  Workspace::Scope scope_;
  TileQuery* queries_ = nullptr;
  int count_ = 0;
  // Of the span at work:
  int tiles_ = 0;
  uint64_t attended_[kTiles] = {};  // tokens that padding lets through
  uint64_t low_any_[kTiles] = {};
  SpanMask low_masks_[Isa::kQueries] = {}, exact_masks_[Isa::kQueries] = {};
  float factors_[Isa::kQueries] = {};
  float* row_;                                // [max dim]
  float *low_, *exact_, *addend_, *weights_;  // [kQueries][kSpanTokens]
  float* means_;                              // [kQueries][kPageTokens]: q . mean
  Planes* planes_;                            // [value groups]
  const void* rows_[kPageTokens];             // of the tokens at work
  LowBitRow low_row_;
};

}  // namespace kvfuse::tiles
