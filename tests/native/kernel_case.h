// Generated attention problems for kernel_vectors.cc: a cache of one layer in a kernel's own layout, and a chunk of
// queries over it. Nothing here depends on the machine: the random numbers are its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kvfuse/half.h"
#include "kvfuse/kernels.h"

namespace kvfuse::vectors {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
  uint32_t Bits() {  // the upper half of a 64-bit linear congruential generator
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }
  int Below(int limit) { return static_cast<int>(Bits() % static_cast<uint32_t>(limit)); }
  int Between(int low, int high) { return low + Below(high - low + 1); }
  bool OneIn(int n) { return Below(n) == 0; }
  template <typename T>
  T Pick(std::initializer_list<T> from) {
    return from.begin()[Below(static_cast<int>(from.size()))];
  }
  float Uniform() { return static_cast<float>(Bits() >> 8) * 0x1p-24f; }
  float Normal() {  // the sum of 12 uniform numbers: variance 1
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) sum += Uniform();
    return sum;
  }

 private:
  uint64_t state_;
};

enum class Poison { kNone, kKey, kValue, kQuery };

inline std::string Describe(const SideFormat& side) {
  return std::to_string(side.dim) + " channels, " + std::to_string(side.bits) + " bits, group_size " +
         std::to_string(side.group_size) + (side.full ? ", full" : "") + (side.rotate ? ", rotated" : "");
}

// One attention problem, in full.
struct Case {
  uint64_t seed = 0;
  CacheFormat format;
  int group = 1;                // query heads of a kv head
  int64_t past = 0, count = 1;  // cached tokens, tokens of the chunk
  float scale = 1.0f, softcap = 0.0f;
  bool causal = true, padding = false, head_sink = false, outlier_key = false;
  bool exact_weights = false;  // as KVFUSE_WEIGHTS=exact
  int bias = 0;                // 0 none; 1 per head, query and key; 2 the same for all heads and queries
  Poison poison = Poison::kNone;

  int64_t total() const { return past + count; }
  int num_heads() const { return group * format.kv_num_heads; }
  std::string Describe() const {
    return "seed " + std::to_string(seed) + ": keys of " + vectors::Describe(format.key) + "; values of " +
           vectors::Describe(format.value) + "; " + std::to_string(format.kv_num_heads) + " kv heads, n_recent " +
           std::to_string(format.n_recent) + ", block " + std::to_string(format.block) + ", n_sink " +
           std::to_string(format.n_sink) + ", window_left " + std::to_string(format.window_left) +
           (format.center_keys ? ", centred" : "") + ", group " + std::to_string(group) + ", past " +
           std::to_string(past) + ", count " + std::to_string(count) + (causal ? ", causal" : "") +
           (padding ? ", padding" : "") + (head_sink ? ", head sink" : "") + (outlier_key ? ", outlier key" : "") +
           (exact_weights ? ", exact weights" : "") + ", bias " + std::to_string(bias) + ", softcap " +
           std::to_string(softcap) + ", poison " + std::to_string(static_cast<int>(poison));
  }
};

// Rows [heads][tokens][dim].
struct Tensor {
  Tensor() = default;
  Tensor(int heads_, int64_t tokens_, int dim_)
      : heads(heads_), tokens(tokens_), dim(dim_), data(static_cast<size_t>(heads_) * tokens_ * dim_) {}
  float* at(int head, int64_t token) { return data.data() + (head * tokens + token) * dim; }
  const float* at(int head, int64_t token) const { return data.data() + (head * tokens + token) * dim; }
  Rows rows(int64_t from = 0) const { return {data.data() + from * dim, tokens * dim, dim}; }

  int heads = 0;
  int64_t tokens = 0;
  int dim = 0;
  std::vector<float> data;
};

// The tensors of one problem.
struct Problem {
  explicit Problem(const Case& c)
      : what(c),
        key(c.format.kv_num_heads, c.total(), c.format.key.dim),
        value(c.format.kv_num_heads, c.total(), c.format.value.dim),
        query(c.num_heads(), c.count, c.format.key.dim) {
    Random random(c.seed);
    for (Tensor* tensor : {&key, &value, &query})
      for (float& x : tensor->data) x = random.Normal();
    if (c.outlier_key)  // one key takes nearly all the weight of every query, as attention sinks do
      for (int head = 0; head < key.heads; ++head)
        for (int i = 0; i < key.dim; ++i) key.at(head, c.total() / 3)[i] = 3.0f * query.at(head * c.group, 0)[i];
    if (c.padding)
      for (int64_t j = 0; j < c.total(); ++j) padding.push_back(!random.OneIn(4));
    if (c.bias == 1) bias.resize(c.num_heads() * c.count * c.total());
    if (c.bias == 2) bias.resize(c.total());
    for (float& x : bias) x = random.OneIn(8) ? -std::numeric_limits<float>::infinity() : random.Normal();
    if (c.head_sink)
      for (int head = 0; head < c.num_heads(); ++head) sink.push_back(random.Normal());
    const float bad =
        random.Pick({std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()});
    Tensor& spoiled = c.poison == Poison::kKey ? key : c.poison == Poison::kValue ? value : query;
    if (c.poison != Poison::kNone)
      spoiled.at(random.Below(spoiled.heads),
                 random.Below(static_cast<int>(spoiled.tokens)))[random.Below(spoiled.dim)] = bad;
  }

  StepArgs Step(std::vector<float>& output) const {
    const int64_t width = what.format.value.dim;
    output.assign(what.num_heads() * what.count * width, -12345.0f);
    StepArgs args;
    args.query = query.rows();
    args.output = output.data();  // [tokens][heads][dim]: not the order of the query
    args.output_head_stride = width;
    args.output_token_stride = what.num_heads() * width;
    args.num_heads = what.num_heads();
    args.sequence_length = what.count;
    args.scale = what.scale;
    args.softcap = what.softcap;
    args.causal = what.causal;
    args.padding = what.padding ? padding.data() : nullptr;
    args.bias = what.bias == 0 ? nullptr : bias.data();
    args.bias_head_stride = what.bias == 1 ? what.count * what.total() : 0;
    args.bias_query_stride = what.bias == 1 ? what.total() : 0;
    args.bias_key_stride = what.bias == 0 ? 0 : 1;
    args.head_sink = what.head_sink ? sink.data() : nullptr;
    return args;
  }

  Case what;
  Tensor key, value, query;
  std::vector<uint8_t> padding;
  std::vector<float> bias, sink;
};

// The cache of a problem as one kernel lays it out, with what a layer cache has freed left out. Every page is an
// allocation of exactly its size, so that AddressSanitizer sees a read beyond it.
class Cache {
 public:
  Cache(const KernelTable& table, const Problem& problem)
      : table_(table), problem_(problem), format_(problem.what.format) {
    const Case& c = problem.what;
    // What no query sees is gone, by whole pages.
    const int64_t seen = format_.window_left < 0 ? 0 : std::max<int64_t>(0, c.past - format_.window_left);
    const int64_t oldest = seen / kPageTokens * kPageTokens;
    view_.format = &format_;
    view_.encoded_end = format_.EncodedEnd(c.total());
    view_.past = c.past;
    view_.total = c.total();
    view_.key = problem.key.rows(c.past);
    view_.value = problem.value.rows(c.past);
    view_.page_begin = oldest / kPageTokens;
    view_.mean_begin = format_.centered() ? oldest / format_.block : 0;
    const int64_t window = std::max<int64_t>(0, format_.WindowBegin(c.past));
    view_.exact_begin = format_.has_exact_window() ? window / kExactPageTokens * kExactPageTokens : c.past;
    view_.exact_page_begin = view_.exact_begin / kExactPageTokens;
    FillExact();
    FillMeans(oldest);
    FillPages(oldest);
  }
  Cache(const Cache&) = delete;

  const CacheView& view() const { return view_; }

 private:
  void FillExact() {
    const Case& c = problem_.what;
    for (const bool key : {true, false}) {
      const Tensor& from = key ? problem_.key : problem_.value;
      const int64_t sinks = std::min(format_.n_sink, c.total());
      std::vector<float>& sink = key ? sink_key_ : sink_value_;
      for (int64_t j = 0; j < sinks; ++j)
        for (int head = 0; head < from.heads; ++head)
          sink.insert(sink.end(), from.at(head, j), from.at(head, j) + from.dim);
      std::vector<const float*>& pointers = key ? exact_key_pointers_ : exact_value_pointers_;
      for (int64_t page = view_.exact_page_begin; page * kExactPageTokens < c.past; ++page) {
        auto rows = std::make_unique<float[]>(from.heads * kExactPageTokens * from.dim);
        for (int64_t j = page * kExactPageTokens; j < std::min((page + 1) * kExactPageTokens, c.past); ++j)
          for (int head = 0; head < from.heads; ++head)
            std::copy(from.at(head, j), from.at(head, j) + from.dim,
                      &rows[(head * kExactPageTokens + j % kExactPageTokens) * from.dim]);
        pointers.push_back(rows.get());
        floats_.push_back(std::move(rows));
      }
    }
    view_.sink_key = sink_key_.data();
    view_.sink_value = sink_value_.data();
    view_.exact_key_pages = exact_key_pointers_.data();
    view_.exact_value_pages = exact_value_pointers_.data();
  }

  // Means of the closed blocks; any number would do, since attention adds back what was subtracted.
  void FillMeans(int64_t oldest) {
    const int64_t blocks = format_.centered() ? format_.EncodedEnd(problem_.what.total()) / format_.block : 0;
    for (int64_t block = oldest / format_.block; block < blocks; ++block) {
      auto mean = std::make_unique<uint16_t[]>(format_.kv_num_heads * format_.key.dim);
      for (int head = 0; head < format_.kv_num_heads; ++head)
        for (int i = 0; i < format_.key.dim; ++i) {
          float sum = 0.0f, rows = 0.0f;
          for (int64_t j = block * format_.block; j < (block + 1) * format_.block; ++j) {
            const float x = problem_.key.at(head, j)[i];
            if (std::isfinite(x)) sum += x, rows += 1.0f;
          }
          mean[head * format_.key.dim + i] = FloatToHalfSaturated(sum / std::max(1.0f, rows));
        }
      mean_pointers_.push_back(mean.get());
      means_.push_back(std::move(mean));
    }
    view_.block_means = mean_pointers_.data();
  }

  void FillPages(int64_t oldest) {
    const int64_t end = format_.EncodedEnd(problem_.what.total());
    for (int64_t page = oldest / kPageTokens; page * kPageTokens < end; ++page) {
      // The library's pages begin at cache lines and are zero when made.
      auto* bytes = static_cast<uint8_t*>(::operator new(format_.page_bytes(), std::align_val_t{64}));
      pages_.emplace_back(bytes);
      page_pointers_.push_back(bytes);
      std::memset(bytes, 0, format_.page_bytes());
      for (int64_t j = page * kPageTokens; j < std::min(end, (page + 1) * kPageTokens); ++j)
        for (int head = 0; head < format_.kv_num_heads; ++head)
          for (const bool key : {true, false}) Encode(key, head, j, bytes + format_.side_offset(key, head));
    }
    view_.pages = page_pointers_.data();
  }

  void Encode(bool key, int head, int64_t j, uint8_t* side_bytes) const {
    const SideFormat& side = key ? format_.key : format_.value;
    const float* from = (key ? problem_.key : problem_.value).at(head, j);
    std::vector<float> row(from, from + side.dim);
    if (key && format_.centered())
      for (int i = 0; i < side.dim; ++i)
        row[i] -= HalfToFloat(mean_pointers_[j / format_.block - view_.mean_begin][head * side.dim + i]);
    if (side.rotated()) table_.rotate(row.data(), side.dim);
    std::vector<uint8_t> stored(side.row_bytes());
    table_.quantize_row(side, row.data(), stored.data(), stored.data() + side.code_bytes());
    table_.store_row(side, key, side_bytes, static_cast<int>(j % kPageTokens), stored.data());
  }

  struct AlignedDelete {
    void operator()(uint8_t* bytes) const { ::operator delete(bytes, std::align_val_t{64}); }
  };

  const KernelTable& table_;
  const Problem& problem_;
  const CacheFormat format_;
  CacheView view_;
  std::vector<std::unique_ptr<uint8_t, AlignedDelete>> pages_;
  std::vector<std::unique_ptr<float[]>> floats_;
  std::vector<std::unique_ptr<uint16_t[]>> means_;
  std::vector<const uint8_t*> page_pointers_;
  std::vector<const uint16_t*> mean_pointers_;
  std::vector<const float*> exact_key_pointers_, exact_value_pointers_;
  std::vector<float> sink_key_, sink_value_;
};

}  // namespace kvfuse::vectors
