// The specification, second half: score -> softmax -> weighted sum -> rotate back. Scalar code; everything
// faster must give the same integer scores, while float stages may add in another order.
#include <limits>
#include <vector>

#include "reference.h"

namespace kvfuse::reference {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

float Dot(const float* a, const float* b, int count) {
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
    UnpackCodes(side, row, codes.data());
    for (int g = 0; g < side.groups(); ++g) {
      scales[g] = ScaleOf(side, stored, g);
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
  int64_t position, begin, end, exact_from;
  const float* bias;
  float mean_score = 0.0f;  // q . mean of `mean_block`
  int64_t mean_block = -1;
  float maximum = kNegativeInfinity, sum = 0.0f;
  std::vector<float> rotated_sum, exact_sum;  // weighted values in the two bases

  void Quantize(const SideFormat& side) {
    std::vector<float> row(exact, exact + side.dim);
    if (side.rotated()) Rotate(row.data(), side.dim);
    codes.assign(side.dim, 0);
    if (!AllFinite(row.data(), side.dim)) {
      scale = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    float largest = 0.0f;
    for (float x : row) largest = std::max(largest, std::fabs(x));
    scale = largest == 0.0f ? 1.0f : largest / 127.0f;
    if (scale == 0.0f) scale = 1.0f;  // a subnormal row may underflow
    for (int i = 0; i < side.dim; ++i) codes[i] = static_cast<int8_t>(Code(row[i], scale, -127.0f, 127.0f));
  }

  // s_q * sum over groups of s_k * (int32 dot)
  float LowBitScore(const SideFormat& side, const LowBitRow& key) const {
    if (!side.scaled()) return Dot(exact, key.values.data(), side.dim);
    float score = 0.0f;
    for (int g = 0; g < side.groups(); ++g) {
      const int first = g * side.group_width(), last = std::min(side.dim, first + side.group_width());
      int32_t dot = 0;
      for (int i = first; i < last; ++i) dot += static_cast<int32_t>(codes[i]) * static_cast<int32_t>(key.codes[i]);
      score += key.scales[g] * static_cast<float>(dot);
    }
    return scale * score;
  }

  // Streaming softmax: output = sum exp(s - max) v / sum exp(s - max).
  void Add(float score, const float* value, std::vector<float>& into) {
    if (score > maximum) {
      const float shrink = std::exp(maximum - score);
      sum *= shrink;
      for (float& x : rotated_sum) x *= shrink;
      for (float& x : exact_sum) x *= shrink;
      maximum = score;
    }
    const float weight = std::exp(score - maximum);
    sum += weight;
    for (size_t i = 0; i < into.size(); ++i) into[i] += weight * value[i];
  }
};

Query MakeQuery(const AttendArgs& args, int head, int64_t token) {
  const CacheView& cache = args.cache;
  const CacheFormat& format = *cache.format;
  Query query;
  query.exact = args.query.at(head, token);
  query.position = cache.past + token;
  query.begin = format.window_left < 0 ? 0 : std::max<int64_t>(0, query.position - format.window_left);
  query.end = args.causal ? query.position + 1 : cache.total;
  query.exact_from = std::max(cache.exact_begin, format.ExactFrom(query.position));
  query.bias =
      args.bias == nullptr ? nullptr : args.bias + head * args.bias_head_stride + token * args.bias_query_stride;
  query.Quantize(format.key);
  query.rotated_sum.assign(format.value.dim, 0.0f);
  query.exact_sum.assign(format.value.dim, 0.0f);
  if (args.head_sink != nullptr && args.head_sink[head] != kNegativeInfinity) {
    query.maximum = args.head_sink[head];
    query.sum = 1.0f;
  }
  return query;
}

const float* ExactRow(const CacheView& cache, bool key, int head, int64_t j) {
  const CacheFormat& format = *cache.format;
  const int dim = key ? format.key.dim : format.value.dim;
  if (j >= cache.past) return (key ? cache.key : cache.value).at(head, j - cache.past);
  if (j < format.n_sink) return (key ? cache.sink_key : cache.sink_value) + (j * format.kv_num_heads + head) * dim;
  const float* const* pages = key ? cache.exact_key_pages : cache.exact_value_pages;
  const float* page = pages[j / kExactPageTokens - cache.exact_page_begin];
  return page + (int64_t{head} * kExactPageTokens + j % kExactPageTokens) * dim;
}

}  // namespace

void Attend(const AttendArgs& args) {
  const CacheView& cache = args.cache;
  const CacheFormat& format = *cache.format;
  const int group = args.num_heads / format.kv_num_heads;
  std::vector<Query> queries;
  for (int64_t token = args.query_begin; token < args.query_end; ++token)
    for (int head = args.kv_head * group; head < (args.kv_head + 1) * group; ++head)
      queries.push_back(MakeQuery(args, head, token));
  int64_t begin = cache.total, end = 0;
  for (const Query& query : queries) begin = std::min(begin, query.begin), end = std::max(end, query.end);

  LowBitRow low_key, low_value;
  std::vector<float> mean(format.key.dim);
  for (int64_t j = begin; j < end; ++j) {
    if (args.padding != nullptr && args.padding[j] == 0) continue;
    bool unpacked = false;
    for (Query& query : queries) {
      if (j < query.begin || j >= query.end) continue;
      const bool exact = j < format.n_sink || j >= query.exact_from;
      float score;
      if (exact) {
        score = args.scale * Dot(query.exact, ExactRow(cache, true, args.kv_head, j), format.key.dim);
      } else {
        if (!unpacked) {
          const uint8_t* page = cache.pages[j / kPageTokens - cache.page_begin];
          const int64_t token = j % kPageTokens;
          low_key.Read(format.key, page + format.side_offset(true, args.kv_head) + token * format.key.row_bytes());
          low_value.Read(format.value,
                         page + format.side_offset(false, args.kv_head) + token * format.value.row_bytes());
          unpacked = true;
        }
        score = args.scale * query.LowBitScore(format.key, low_key);
        if (format.centered()) {
          if (query.mean_block != j / format.block) {
            query.mean_block = j / format.block;
            const uint16_t* halves =
                cache.block_means[query.mean_block - cache.mean_begin] + args.kv_head * format.key.dim;
            for (int i = 0; i < format.key.dim; ++i) mean[i] = HalfToFloat(halves[i]);
            query.mean_score = Dot(query.exact, mean.data(), format.key.dim);
          }
          score += args.scale * query.mean_score;
        }
      }
      if (args.softcap > 0.0f) score = args.softcap * std::tanh(score / args.softcap);
      if (query.bias != nullptr) score += query.bias[j * args.bias_key_stride];
      if (score == kNegativeInfinity) continue;
      if (exact)
        query.Add(score, ExactRow(cache, false, args.kv_head, j), query.exact_sum);
      else
        query.Add(score, low_value.values.data(), format.value.rotated() ? query.rotated_sum : query.exact_sum);
    }
  }

  size_t index = 0;
  for (int64_t token = args.query_begin; token < args.query_end; ++token)
    for (int head = args.kv_head * group; head < (args.kv_head + 1) * group; ++head) {
      Query& query = queries[index++];
      float* output = args.output + head * args.output_head_stride + token * args.output_token_stride;
      if (format.value.rotated()) Rotate(query.rotated_sum.data(), format.value.dim);
      for (int i = 0; i < format.value.dim; ++i)  // a row that sees nothing is zero
        output[i] = query.sum == 0.0f ? 0.0f : (query.rotated_sum[i] + query.exact_sum[i]) / query.sum;
    }
}

}  // namespace kvfuse::reference
