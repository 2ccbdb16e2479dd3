#include "key_guard.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu_layer_cache.h"

namespace kvfuse {
namespace {

// Eight sums side by side, so that the compiler may use vectors without reordering one sum.
float Dot(const float* a, const float* b, int count) {
  float lanes[8] = {};
  int i = 0;
  for (; i + 8 <= count; i += 8)
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// Softmax weights, in place; a row that sees nothing is zero.
void Softmax(std::vector<float>& scores) {
  const float top = *std::max_element(scores.begin(), scores.end());
  float sum = 0.0f;
  for (float& score : scores) sum += score = std::isinf(top) ? 0.0f : std::exp(score - top);
  if (sum > 0.0f)
    for (float& score : scores) score /= sum;
}

}  // namespace

GuardSums OutputError(const float* query, const std::vector<GuardedToken>& tokens, int key_dim, int value_dim,
                      float scale, float softcap) {
  if (tokens.empty()) return {};
  std::vector<float> exact(tokens.size()), stored(tokens.size());
  const auto score = [&](const float* key, float bias) {
    const float raw = scale * Dot(query, key, key_dim);
    return (softcap > 0.0f ? softcap * std::tanh(raw / softcap) : raw) + bias;
  };
  for (size_t j = 0; j < tokens.size(); ++j) {
    exact[j] = score(tokens[j].key, tokens[j].bias);
    stored[j] = tokens[j].stored == tokens[j].key ? exact[j] : score(tokens[j].stored, tokens[j].bias);
  }
  Softmax(exact);
  Softmax(stored);
  std::vector<float> output(value_dim), change(value_dim);
  for (size_t j = 0; j < tokens.size(); ++j) {
    const float weight = exact[j], difference = stored[j] - exact[j];
    if (weight == 0.0f && difference == 0.0f) continue;  // a hidden token's value may be anything
    for (int i = 0; i < value_dim; ++i) {
      output[i] += weight * tokens[j].value[i];
      change[i] += difference * tokens[j].value[i];
    }
  }
  return {Dot(change.data(), change.data(), value_dim), Dot(output.data(), output.data(), value_dim)};
}

KeyGuard::Span KeyGuard::Claim(int64_t from, int64_t to, int64_t sinks, int heads) {
  Span span{std::max({from, sinks, seen_}), std::min(to, kGuardTokens)};
  span.to = std::min(span.to, (span.from / kGuardAtOnce + 1) * kGuardAtOnce);
  if (span.to - span.from < kGuardAtLeast) return {};
  seen_ = std::min(to, kGuardTokens);
  heads_.resize(heads);
  return span;
}

void KeyGuard::Add(int head, const GuardSums& sums) {
  if (!std::isfinite(sums.error) || !std::isfinite(sums.norm)) return;  // NaN in, no verdict
  heads_[head].error += sums.error;
  heads_[head].norm += sums.norm;
}

double KeyGuard::error() const {
  GuardSums all;
  for (const GuardSums& sums : heads_) all.error += sums.error, all.norm += sums.norm;
  return all.norm > 0.0 ? std::sqrt(all.error / all.norm) : std::numeric_limits<double>::quiet_NaN();
}

KeyGuard::Span CpuLayerCache::GuardSpan() {
  const int64_t low = format_.has_exact_window() ? format_.WindowBegin(span_.chunk.total) : span_.chunk.total;
  return guard_.Claim(span_.chunk.encode_from, std::min(span_.chunk.encode_to, low), format_.n_sink,
                      format_.kv_num_heads);
}

// One query head for each kv head and query, in turn: all of a group read the same keys.
void CpuLayerCache::GuardHead(const StepArgs& step, const KeyGuard::Span& span, int head) {
  const int64_t group = step.num_heads / format_.kv_num_heads;
  // The first query to whom all of the span is low-bit.
  const int64_t blocks = (span.to + format_.block - 1) / format_.block * format_.block;
  int64_t first = format_.has_exact_window() ? blocks + format_.n_recent - 1 : span.to - 1;
  first = std::min(std::max(first, span_.chunk.past), span_.chunk.total - 1);
  int64_t last = span_.chunk.total - 1;
  if (format_.window_left >= 0) last = std::clamp(span.from + format_.window_left, first, last);

  const int dim = format_.key.dim;
  std::vector<float> decoded((span.to - span.from) * dim), newest(kGuardNewest * dim);
  for (int64_t j = span.from; j < span.to; ++j) DecodeStored(true, head, j, decoded.data() + (j - span.from) * dim);

  const int64_t count = std::min(kGuardQueries, last - first + 1);
  std::vector<GuardedToken> tokens;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = count == 1 ? last : first + (last - first) * i / (count - 1);
    const int64_t query_head = head * group + i % group, query_token = position - span_.chunk.past;
    tokens.clear();
    const auto see = [&](int64_t j, const float* key, const float* stored, const float* value) {
      float bias = 0.0f;
      if (format_.window_left >= 0 && j < position - format_.window_left) return;
      if (step.padding != nullptr && step.padding[j] == 0) return;
      if (step.bias != nullptr)
        bias = step.bias[query_head * step.bias_head_stride + query_token * step.bias_query_stride +
                         j * step.bias_key_stride];
      if (key != nullptr && value != nullptr) tokens.push_back({key, stored, value, bias});
    };
    for (int64_t j = 0; j < std::min(format_.n_sink, span_.chunk.total); ++j)
      see(j, SinkRow(true, head, j), SinkRow(true, head, j), SinkRow(false, head, j));
    for (int64_t j = span.from; j < span.to; ++j)
      see(j, FloatRow(true, head, j), decoded.data() + (j - span.from) * dim, FloatRow(false, head, j));
    for (int64_t j = std::max(span.to, position - kGuardNewest + 1); j <= position; ++j) {
      const float* key = FloatRow(true, head, j);
      float* stored = newest.data() + (position - j) * dim;
      if (!format_.has_exact_window()) DecodeStored(true, head, j, stored);
      see(j, key, format_.has_exact_window() ? key : stored, FloatRow(false, head, j));
    }
    guard_.Add(head, OutputError(step.query.at(query_head, query_token), tokens, dim, format_.value.dim, step.scale,
                                 step.softcap));
  }
}

}  // namespace kvfuse
