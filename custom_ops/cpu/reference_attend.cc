// The specification, second half: score -> softmax -> weighted sum -> rotate back. Scalar code; everything
// faster must give the same integer scores, while float stages may add in another order.
#include "query.h"

namespace kvfuse::reference {
namespace {

// Streaming softmax: output = sum exp(s - max) v / sum exp(s - max).
void Add(Query& query, float score, const float* value, std::vector<float>& into) {
  query.Raise(score);
  const float weight = std::exp(score - query.maximum);
  query.sum += weight;
  for (size_t i = 0; i < into.size(); ++i) into[i] += weight * value[i];
}

}  // namespace

void Attend(const AttendArgs& args) {
  const CacheView& cache = args.cache;
  const CacheFormat& format = *cache.format;
  std::vector<Query> queries = MakeQueries(args);
  int64_t begin = cache.total, end = 0;
  for (const Query& query : queries) begin = std::min(begin, query.begin), end = std::max(end, query.end);

  LowBitRow low_key, low_value;
  for (int64_t j = begin; j < end; ++j) {
    if (args.step.padding != nullptr && args.step.padding[j] == 0) continue;
    bool unpacked = false;
    for (Query& query : queries) {
      if (j < query.begin || j >= query.end) continue;
      const bool exact = j < format.n_sink || j >= query.exact_from;
      float score;
      if (exact) {
        score = args.step.scale * Dot(query.exact, ExactRow(cache, true, args.kv_head, j), format.key.dim);
      } else {
        if (!unpacked) {
          const uint8_t* page = cache.pages[j / kPageTokens - cache.page_begin];
          const int64_t token = j % kPageTokens;
          low_key.Read(format.key, page + format.side_offset(true, args.kv_head) + token * format.key.row_bytes());
          low_value.Read(format.value,
                         page + format.side_offset(false, args.kv_head) + token * format.value.row_bytes());
          unpacked = true;
        }
        score = args.step.scale * LowBitScore(format.key, query, low_key);
        if (format.centered()) score += args.step.scale * query.MeanScore(cache, args.kv_head, j);
      }
      if (args.step.softcap > 0.0f) score = args.step.softcap * std::tanh(score / args.step.softcap);
      if (query.bias != nullptr) score += query.bias[j * args.step.bias_key_stride];
      if (score == kNegativeInfinity) continue;
      if (exact)
        Add(query, score, ExactRow(cache, false, args.kv_head, j), query.exact_sum);
      else
        Add(query, score, low_value.values.data(), format.value.rotated() ? query.rotated_sum : query.exact_sum);
    }
  }
  WriteOutputs(args, queries);
}

}  // namespace kvfuse::reference
