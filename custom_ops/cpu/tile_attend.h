// Attention tile by tile, for every instruction set: an Isa supplies the inner loops over 16 lanes or one row.
// Scores of low-bit keys are bit-equal to the reference's; exponentials, sums and weighted values are floats in
// another order (tests/ops state the tolerance).
#pragma once

#include <cstring>

#include "query.h"
#include "tiles.h"

namespace kvfuse::tiles {

// One tile's scores of one query; kNegativeInfinity where the key is not seen.
struct TileScores {
  alignas(64) float score[kPageTokens];
  int low_begin = 0, low_end = 0;  // tokens of the tile that are seen as low-bit; the other visible ones are exact
};

template <typename Isa>
class TileAttention {
 public:
  explicit TileAttention(const AttendArgs& args)
      : args_(args), cache_(args.cache), format_(*args.cache.format), queries_(MakeQueries(args)) {}

  void Run() {
    int64_t begin = cache_.total, end = 0;
    for (const Query& query : queries_) begin = std::min(begin, query.begin), end = std::max(end, query.end);
    if (begin >= end) return WriteOutputs(args_, queries_);
    for (Query& query : queries_) query.codes.resize((query.codes.size() + 63) / 64 * 64);
    scores_.resize(queries_.size());
    row_.resize((format_.value.dim + 15) / 16 * 16);
    for (int64_t tile = begin / kPageTokens; tile <= (end - 1) / kPageTokens; ++tile) {
      bool seen = false;
      for (size_t i = 0; i < queries_.size(); ++i) seen |= Score(queries_[i], scores_[i], tile * kPageTokens);
      if (seen) Accumulate(tile * kPageTokens);
    }
    WriteOutputs(args_, queries_);
  }

 private:
  const uint8_t* Side(bool key, int64_t tile) const {
    return cache_.pages[tile / kPageTokens - cache_.page_begin] + format_.side_offset(key, args_.kv_head);
  }

  // Scores of the tile's visible keys, turned into softmax weights; false when there is none.
  bool Score(Query& query, TileScores& out, int64_t tile) {
    const int64_t begin = std::max(tile, query.begin), end = std::min(tile + kPageTokens, query.end);
    out.low_begin = out.low_end = 0;
    std::fill(out.score, out.score + kPageTokens, kNegativeInfinity);
    if (begin >= end) return false;
    const int64_t low_begin = std::clamp(format_.n_sink, begin, end);
    const int64_t low_end = std::clamp(query.exact_from, low_begin, end);
    if (low_begin < low_end) LowBitScores(query, out, tile, low_begin, low_end);
    for (int64_t j = begin; j < end; ++j) {
      if (j == low_begin) j = low_end;
      if (j >= end) break;
      out.score[j - tile] =
          args_.step.scale * Isa::Dot(query.exact, ExactRow(cache_, true, args_.kv_head, j), format_.key.dim);
    }
    Adjust(query, out, tile, begin, end);
    float maximum = kNegativeInfinity;
    bool seen = false;
    for (int64_t t = begin - tile; t < end - tile; ++t) {
      seen |= out.score[t] != kNegativeInfinity;
      if (out.score[t] > maximum) maximum = out.score[t];
    }
    if (!seen) return false;
    query.Raise(maximum);
    query.sum += Isa::Weights(out.score, query.maximum);
    return true;
  }

  void LowBitScores(Query& query, TileScores& out, int64_t tile, int64_t begin, int64_t end) {
    const uint8_t* side = Side(true, tile);
    if (KeyFits(format_.key)) {
      alignas(64) float low[kPageTokens];
      Isa::KeyScores(format_.key, side, query.codes.data(), static_cast<int>(begin - tile),
                     static_cast<int>(end - tile), low);
      for (int64_t j = begin; j < end; ++j) out.score[j - tile] = args_.step.scale * (query.scale * low[j - tile]);
    } else {
      for (int64_t j = begin; j < end; ++j) {
        low_row_.Read(format_.key, side + (j - tile) * format_.key.row_bytes());
        out.score[j - tile] = args_.step.scale * LowBitScore(format_.key, query, low_row_);
      }
    }
    if (format_.centered())
      for (int64_t j = begin; j < end; ++j)
        out.score[j - tile] += args_.step.scale * query.MeanScore(cache_, args_.kv_head, j);
    out.low_begin = static_cast<int>(begin - tile);
    out.low_end = static_cast<int>(end - tile);
  }

  // Soft cap, bias, padding: in this order.
  void Adjust(const Query& query, TileScores& out, int64_t tile, int64_t begin, int64_t end) const {
    for (int64_t j = begin; args_.step.softcap > 0.0f && j < end; ++j)
      out.score[j - tile] = args_.step.softcap * std::tanh(out.score[j - tile] / args_.step.softcap);
    for (int64_t j = begin; query.bias != nullptr && j < end; ++j)
      out.score[j - tile] += query.bias[j * args_.step.bias_key_stride];
    for (int64_t j = begin; args_.step.padding != nullptr && j < end; ++j)
      if (args_.step.padding[j] == 0) out.score[j - tile] = kNegativeInfinity;
  }

  // Adds the tile's values under their weights; a row is unpacked once for all queries.
  void Accumulate(int64_t tile) {
    const int dim = format_.value.dim;
    for (int t = 0; t < kPageTokens; ++t) {
      const float* exact = nullptr;
      bool unpacked = false;
      for (size_t i = 0; i < queries_.size(); ++i) {
        const float weight = scores_[i].score[t];
        if (weight == kNegativeInfinity) continue;
        Query& query = queries_[i];
        if (t >= scores_[i].low_begin && t < scores_[i].low_end) {
          if (!unpacked) UnpackValue(Side(false, tile), t);
          unpacked = true;
          Isa::Add(weight, row_.data(), format_.value.rotated() ? query.rotated_sum.data() : query.exact_sum.data(),
                   dim);
        } else {
          if (exact == nullptr) exact = ExactRow(cache_, false, args_.kv_head, tile + t);
          Isa::Add(weight, exact, query.exact_sum.data(), dim);
        }
      }
    }
  }

  void UnpackValue(const uint8_t* side, int token) {
    if (ValueFits(format_.value)) return Isa::ValueRow(format_.value, side, token, row_.data());
    low_row_.Read(format_.value, side + int64_t{token} * format_.value.row_bytes());
    std::copy(low_row_.values.begin(), low_row_.values.end(), row_.begin());
  }

  const AttendArgs& args_;
  const CacheView& cache_;
  const CacheFormat& format_;
  std::vector<Query> queries_;
  std::vector<TileScores> scores_;  // scores, then weights, one tile at a time
  std::vector<float> row_;
  LowBitRow low_row_;
};

}  // namespace kvfuse::tiles
