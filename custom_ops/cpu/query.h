// What attention of every kernel begins and ends with: the queries of one kv head, the rows they meet, the output.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "partial.h"
#include "reference.h"

namespace kvfuse {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

inline float Dot(const float* a, const float* b, int count) {
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// One row of the low-bit store, unpacked once for all queries of a tile.
struct LowBitRow {
  std::vector<int8_t> codes;
  std::vector<float> scales, values;  // values: scale * code, or the halves of a 16-bit side

  void Read(const SideFormat& side, const uint8_t* row) {
    const uint8_t* stored = row + side.code_bytes();
    values.resize(side.dim);
    if (!side.scaled()) {
      for (int i = 0; i < side.dim; ++i) {
        uint16_t half;
        std::memcpy(&half, row + 2 * i, sizeof half);
        values[i] = HalfToFloat(half);
      }
      return;
    }
    codes.resize(side.dim);
    scales.resize(side.groups());
    reference::UnpackCodes(side, row, codes.data());
    for (int g = 0; g < side.groups(); ++g) {
      scales[g] = reference::ScaleOf(side, stored, g);
      const int first = g * side.group_width(), last = std::min(side.dim, first + side.group_width());
      for (int i = first; i < last; ++i) values[i] = scales[g] * static_cast<float>(codes[i]);
    }
  }
};

// One query head at one position, with its running softmax.
struct Query {
  const float* exact;         // [dim], as given
  std::vector<int8_t> codes;  // int8 codes of the rotated query
  float scale = 1.0f;         // of those codes
  int64_t begin, end, exact_from;
  const float* bias;
  float mean_score = 0.0f;  // q . mean of `mean_block`
  int64_t mean_block = -1;
  float maximum = kNegativeInfinity, sum = 0.0f;
  std::vector<float> rotated_sum, exact_sum;  // weighted values in the two bases

  void Quantize(const SideFormat& side) {
    std::vector<float> row(exact, exact + side.dim);
    if (side.rotated()) reference::Rotate(row.data(), side.dim);
    codes.assign(side.dim, 0);
    if (!reference::AllFinite(row.data(), side.dim)) {
      scale = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    float largest = 0.0f;
    for (float x : row) largest = std::max(largest, std::fabs(x));
    scale = largest == 0.0f ? 1.0f : largest / 127.0f;
    if (scale == 0.0f) scale = 1.0f;  // a subnormal row may underflow
    for (int i = 0; i < side.dim; ++i) codes[i] = static_cast<int8_t>(reference::Code(row[i], scale, -127.0f, 127.0f));
  }

  // q . mean of the block of key j
  float MeanScore(const CacheView& cache, int kv_head, int64_t j) {
    const int dim = cache.format->key.dim;
    if (mean_block != j / cache.format->block) {
      mean_block = j / cache.format->block;
      const uint16_t* halves = cache.block_means[mean_block - cache.mean_begin] + int64_t{kv_head} * dim;
      mean_score = 0.0f;
      for (int i = 0; i < dim; ++i) mean_score += exact[i] * HalfToFloat(halves[i]);
    }
    return mean_score;
  }

  // Makes `score` the maximum when it is larger; what was summed so far shrinks.
  void Raise(float score) {
    if (!(score > maximum)) return;
    const float shrink = std::exp(maximum - score);
    sum *= shrink;
    for (float& x : rotated_sum) x *= shrink;
    for (float& x : exact_sum) x *= shrink;
    maximum = score;
  }
};

// sum over groups of s_k * (int32 dot)
inline float GroupDots(const SideFormat& side, const int8_t* query, const LowBitRow& key) {
  float score = 0.0f;
  for (int g = 0; g < side.groups(); ++g) {
    const int first = g * side.group_width(), last = std::min(side.dim, first + side.group_width());
    int32_t dot = 0;
    for (int i = first; i < last; ++i) dot += int32_t{query[i]} * int32_t{key.codes[i]};
    score += key.scales[g] * static_cast<float>(dot);
  }
  return score;
}

inline float LowBitScore(const SideFormat& side, const Query& query, const LowBitRow& key) {
  if (!side.scaled()) return Dot(query.exact, key.values.data(), side.dim);
  return query.scale * GroupDots(side, query.codes.data(), key);
}

// The keys that a query token sees, [begin, end), and from where on it uses them exactly (sinks apart).
struct QueryRange {
  int64_t begin, end, exact_from;
};
inline QueryRange RangeOf(const AttendArgs& args, int64_t token) {
  const CacheFormat& format = *args.cache.format;
  const int64_t position = args.cache.past + token;
  return {format.window_left < 0 ? 0 : std::max<int64_t>(0, position - format.window_left),
          args.step.causal ? position + 1 : args.cache.total,
          std::max(args.cache.exact_begin, format.ExactFrom(position))};
}

inline const float* BiasRow(const AttendArgs& args, int head, int64_t token) {
  const StepArgs& step = args.step;
  return step.bias == nullptr ? nullptr : step.bias + head * step.bias_head_stride + token * step.bias_query_stride;
}

inline Query MakeQuery(const AttendArgs& args, int head, int64_t token) {
  const CacheFormat& format = *args.cache.format;
  const QueryRange seen = RangeOf(args, token);
  Query query;
  query.exact = args.step.query.at(head, token);
  query.begin = seen.begin, query.end = seen.end, query.exact_from = seen.exact_from;
  query.bias = BiasRow(args, head, token);
  query.Quantize(format.key);
  query.rotated_sum.assign(format.value.dim, 0.0f);
  query.exact_sum.assign(format.value.dim, 0.0f);
  if (args.step.head_sink != nullptr && args.step.head_sink[head] != kNegativeInfinity) {
    query.maximum = args.step.head_sink[head];
    query.sum = 1.0f;
  }
  return query;
}

// The queries of this piece of work: token by token, the heads of the kv head in order.
inline std::vector<Query> MakeQueries(const AttendArgs& args) {
  const int group = args.step.num_heads / args.cache.format->kv_num_heads;
  std::vector<Query> queries;
  for (int64_t token = args.query_begin; token < args.query_end; ++token)
    for (int head = args.kv_head * group; head < (args.kv_head + 1) * group; ++head)
      queries.push_back(MakeQuery(args, head, token));
  return queries;
}

inline const float* ExactRow(const CacheView& cache, bool key, int head, int64_t j) {
  const CacheFormat& format = *cache.format;
  const int dim = key ? format.key.dim : format.value.dim;
  if (j >= cache.past) return (key ? cache.key : cache.value).at(head, j - cache.past);
  if (j < format.n_sink) return (key ? cache.sink_key : cache.sink_value) + (j * format.kv_num_heads + head) * dim;
  const float* const* pages = key ? cache.exact_key_pages : cache.exact_value_pages;
  const float* page = pages[j / kExactPageTokens - cache.exact_page_begin];
  return page + (int64_t{head} * kExactPageTokens + j % kExactPageTokens) * dim;
}

// The head and the output of query i of a piece of work.
inline int HeadOf(const AttendArgs& args, int i) {
  const int group = args.step.num_heads / args.cache.format->kv_num_heads;
  return args.kv_head * group + i % group;
}
inline float* OutputOf(const AttendArgs& args, int i) {
  const StepArgs& step = args.step;
  const int64_t token = args.query_begin + i / (step.num_heads / args.cache.format->kv_num_heads);
  return step.output + HeadOf(args, i) * step.output_head_stride + token * step.output_token_stride;
}

// output = (rotated sum, rotated back, + exact sum) / sum; a query that sees nothing gives zeros.
inline void Divide(const float* rotated, const float* exact, float sum, int dim, float* output) {
  for (int c = 0; c < dim; ++c) output[c] = sum == 0.0f ? 0.0f : (rotated[c] + exact[c]) / sum;
}

inline void WriteOutputs(const AttendArgs& args, std::vector<Query>& queries) {
  const SideFormat& side = args.cache.format->value;
  for (size_t i = 0; i < queries.size(); ++i) {
    Query& query = queries[i];
    if (side.rotated()) reference::Rotate(query.rotated_sum.data(), side.dim);
    Divide(query.rotated_sum.data(), query.exact_sum.data(), query.sum, side.dim, OutputOf(args, static_cast<int>(i)));
  }
}

// The same for query i of a piece of work, from its one partial: the head's sink joins first.
inline void FinishQuery(const AttendArgs& args, int i, const Partial& result) {
  const SideFormat& side = args.cache.format->value;
  const int head = HeadOf(args, i);
  if (args.step.head_sink != nullptr && args.step.head_sink[head] != kNegativeInfinity) {
    result.Raise(args.step.head_sink[head]);
    *result.sum += std::exp(args.step.head_sink[head] - *result.maximum);
  }
  if (side.rotated()) Kernels().rotate(result.rotated, side.dim);
  Divide(result.rotated, result.exact, *result.sum, side.dim, OutputOf(args, i));
}

}  // namespace kvfuse
