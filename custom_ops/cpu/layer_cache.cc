#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <thread>

#include "cpu_layer_cache.h"
#include "kvfuse/error.h"
#include "kvfuse/half.h"
#include "profile.h"
#include "query.h"
#include "workspace.h"

namespace kvfuse {
namespace {

constexpr int64_t kSplitTokens = 256;  // keys are split at multiples of this: a span of the tile kernels
constexpr int64_t kQueryTile = 16;     // query tokens that share each unpacked row

const float* Floats(const Page& page) { return reinterpret_cast<const float*>(page.data()); }

// The f16 mean of a block's rows, per channel, over the rows that are finite throughout: one bad token must
// not reach its neighbours' bytes.
void BlockMean(const std::vector<const float*>& rows, int dim, uint16_t* mean) {
  std::vector<float> sum(dim, 0.0f);
  float count = 0.0f;
  for (const float* row : rows) {
    if (!reference::AllFinite(row, dim)) continue;
    for (int i = 0; i < dim; ++i) sum[i] += row[i];
    count += 1.0f;
  }
  for (int i = 0; i < dim; ++i) mean[i] = FloatToHalfSaturated(count == 0.0f ? 0.0f : sum[i] / count);
}

void EncodeRow(const SideFormat& side, bool key, const float* row, const std::vector<float>& mean, uint8_t* side_bytes,
               int token) {
  Workspace::Scope scope;
  float* work = Workspace::OfThread().Take<float>(side.dim);
  std::copy(row, row + side.dim, work);
  for (size_t i = 0; i < mean.size(); ++i) work[i] -= mean[i];
  Kernels().encode_row(side, key, work, side_bytes, token);
}

// Pieces that a step wants to be cut into, so that threads have enough to share.
int64_t WantedPieces() {
  static const int64_t wanted = std::max<int64_t>(8, 2 * std::thread::hardware_concurrency());
  return wanted;
}

class Cpu final : public CacheDevice {
  std::shared_ptr<LayerCache> Make(const CacheFormat& format) override {
    return std::make_shared<CpuLayerCache>(format);
  }
  std::shared_ptr<LayerCache> Adopt(const LayerSnapshot& snapshot) override {
    return std::make_shared<CpuLayerCache>(snapshot);
  }
};

}  // namespace

CacheDevice& CpuDevice() {
  static Cpu device;
  return device;
}

std::string CacheFormat::Describe() const {
  std::ostringstream text;
  text << kv_num_heads << " kv heads of " << key.dim << "/" << value.dim << " channels, key/value bits " << key.bits
       << "/" << value.bits << ", group_size " << key.group_size << ", codes " << (key.full ? "full" : "symmetric")
       << ", rotation " << (key.rotate ? "hadamard" : "none") << ", n_recent " << n_recent << ", block " << block
       << ", n_sink " << n_sink << ", window_left " << window_left << ", key_center "
       << (center_keys ? "block" : "none");
  return text.str();
}

int64_t CpuLayerCache::nbytes() const {
  int64_t bytes = pages_.nbytes() + means_.nbytes() + exact_keys_.nbytes() + exact_values_.nbytes();
  for (const Page* sink : {&sink_key_, &sink_value_}) bytes += *sink ? sink->size() : 0;
  return bytes;
}

int64_t CpuLayerCache::GrowthBytes(int64_t count) const {
  const auto added = [](const PageRun& run, int64_t from, int64_t end) {
    return std::max<int64_t>(0, end - std::max(from, run.end()));
  };
  LayerSpan after = span_;
  after.Prepare(format_, span_.length, count);
  const LayerSpan::Chunk& chunk = after.chunk;
  int64_t bytes =
      added(pages_, chunk.encode_from / kPageTokens, CeilDiv(chunk.encode_to, kPageTokens)) * format_.page_bytes();
  if (format_.centered())
    bytes += added(means_, chunk.encode_from / format_.block, CeilDiv(chunk.encode_to, format_.block)) * mean_bytes();
  for (const bool key : {true, false})
    bytes += added(key ? exact_keys_ : exact_values_, chunk.store_from / kExactPageTokens,
                   chunk.store_from < chunk.total ? CeilDiv(chunk.total, kExactPageTokens) : 0) *
             ExactPageBytes(key);
  const int64_t sinks = std::max<int64_t>(0, std::min(format_.n_sink, chunk.total) - span_.length);
  return bytes + sinks * format_.kv_num_heads * (format_.key.dim + format_.value.dim) * 4;
}

std::shared_ptr<LayerCache> CpuLayerCache::Fork() const {
  auto fork = std::make_shared<CpuLayerCache>(format_);
  fork->span_ = span_;
  fork->span_.chunk = {};
  fork->pages_ = pages_;
  fork->means_ = means_;
  fork->exact_keys_ = exact_keys_;
  fork->exact_values_ = exact_values_;
  fork->sink_key_ = sink_key_;
  fork->sink_value_ = sink_value_;
  fork->guard_ = guard_;
  return fork;
}

void CpuLayerCache::Prepare(int64_t past, int64_t count, const Rows& key, const Rows& value) {
  const profile::Timed timed(profile::kPrepare);
  span_.Prepare(format_, past, count);
  chunk_key_ = key;
  chunk_value_ = value;
  const LayerSpan::Chunk& chunk = span_.chunk;
  if (chunk.encode_from < chunk.encode_to) {
    for (int64_t i = chunk.encode_from / kPageTokens; i < CeilDiv(chunk.encode_to, kPageTokens); ++i)
      pages_.Writable(i, format_.page_bytes());
    const int64_t end = format_.centered() ? CeilDiv(chunk.encode_to, format_.block) : 0;
    for (int64_t i = chunk.encode_from / format_.block; i < end; ++i) means_.Writable(i, mean_bytes());
  }
  StoreSinks();
  StoreExact();
  RefreshPointers();
}

// The sinks grow token by token until all are there; each time into new pages, which a fork does not share.
void CpuLayerCache::StoreSinks() {
  const int64_t end = std::min(format_.n_sink, span_.chunk.total);
  if (span_.chunk.past >= end) return;
  for (const bool key : {true, false}) {
    const int64_t dim = key ? format_.key.dim : format_.value.dim, row_bytes = dim * 4;
    Page& sink = key ? sink_key_ : sink_value_;
    Page grown = Page::Make(end * format_.kv_num_heads * row_bytes);
    if (span_.chunk.past > 0)
      std::memcpy(grown.data(), sink.data(), span_.chunk.past * format_.kv_num_heads * row_bytes);
    for (int64_t j = span_.chunk.past; j < end; ++j)
      for (int head = 0; head < format_.kv_num_heads; ++head)
        std::memcpy(grown.data() + (j * format_.kv_num_heads + head) * row_bytes,
                    (key ? chunk_key_ : chunk_value_).at(head, j - span_.chunk.past), row_bytes);
    sink = std::move(grown);
  }
}

void CpuLayerCache::StoreExact() {
  const int64_t from = span_.chunk.store_from;
  for (const bool key : {true, false}) {
    const int64_t row_bytes = (key ? format_.key.dim : format_.value.dim) * 4;
    uint8_t* page = nullptr;
    for (int64_t j = from; j < span_.chunk.total; ++j) {
      if (j == from || j % kExactPageTokens == 0)
        page = (key ? exact_keys_ : exact_values_).Writable(j / kExactPageTokens, ExactPageBytes(key));
      for (int head = 0; head < format_.kv_num_heads; ++head)
        std::memcpy(page + (int64_t{head} * kExactPageTokens + j % kExactPageTokens) * row_bytes,
                    (key ? chunk_key_ : chunk_value_).at(head, j - span_.chunk.past), row_bytes);
    }
  }
}

void CpuLayerCache::RefreshPointers() {
  pages_.FillPointers(page_pointers_);
  means_.FillPointers(mean_pointers_);
  exact_keys_.FillPointers(exact_key_pointers_);
  exact_values_.FillPointers(exact_value_pointers_);
}

const float* CpuLayerCache::ExactRow(bool key, int head, int64_t position) const {
  const Page& page = (key ? exact_keys_ : exact_values_)[position / kExactPageTokens];
  const int64_t row = int64_t{head} * kExactPageTokens + position % kExactPageTokens;
  return Floats(page) + row * (key ? format_.key.dim : format_.value.dim);
}

const float* CpuLayerCache::SinkRow(bool key, int head, int64_t position) const {
  const int64_t row = position * format_.kv_num_heads + head;
  return Floats(key ? sink_key_ : sink_value_) + row * (key ? format_.key.dim : format_.value.dim);
}

// An f32 row of this chunk or of the exact pages; null where the floats are gone.
const float* CpuLayerCache::FloatRow(bool key, int head, int64_t position) const {
  if (position >= span_.chunk.past) return (key ? chunk_key_ : chunk_value_).at(head, position - span_.chunk.past);
  return position < span_.exact_begin ? nullptr : ExactRow(key, head, position);
}

void CpuLayerCache::EncodeHead(int head) {
  const profile::Timed timed(profile::kEncode);
  int64_t block_of_mean = -1;
  std::vector<const float*> rows;
  std::vector<float> mean;
  for (int64_t j = span_.chunk.encode_from; j < span_.chunk.encode_to; ++j) {
    const int64_t block = j / format_.block;
    if (format_.centered() && block != block_of_mean) {
      auto* halves = reinterpret_cast<uint16_t*>(means_[block].data()) + int64_t{head} * format_.key.dim;
      block_of_mean = block;
      rows.clear();
      for (int64_t i = block * format_.block; i < (block + 1) * format_.block; ++i)
        rows.push_back(FloatRow(true, head, i));
      // After a rollback beyond the slack the block's first rows exist as codes only: their mean stays.
      if (rows.front() != nullptr) BlockMean(rows, format_.key.dim, halves);
      mean.resize(format_.key.dim);
      std::transform(halves, halves + format_.key.dim, mean.begin(), HalfToFloat);
    }
    uint8_t* page = pages_[j / kPageTokens].data();
    const int token = static_cast<int>(j % kPageTokens);
    EncodeRow(format_.key, true, FloatRow(true, head, j), mean, page + format_.side_offset(true, head), token);
    EncodeRow(format_.value, false, FloatRow(false, head, j), {}, page + format_.side_offset(false, head), token);
  }
}

// The attention of a step in pieces: by kv head and query tile, and for few queries by keys as well. How it is cut
// does not depend on the number of threads at work, so that results do not either.
struct CpuLayerCache::Cut {
  int64_t query_tiles, key_begin, key_parts, splits;
  int64_t queries;  // of a piece, when it is split
  std::unique_ptr<float[]> partials;

  AttendArgs Piece(const CpuLayerCache& cache, const StepArgs& step, size_t piece) const {
    AttendArgs args;
    args.step = step;
    args.cache = cache.View();
    const int64_t split = piece % splits, tile = piece / splits % query_tiles;
    args.kv_head = static_cast<int>(piece / splits / query_tiles);
    args.query_begin = tile * kQueryTile;
    args.query_end = std::min(step.sequence_length, args.query_begin + kQueryTile);
    if (splits == 1) return args;
    args.key_begin = key_begin + split * key_parts / splits * kSplitTokens;
    if (split + 1 < splits) args.key_end = key_begin + (split + 1) * key_parts / splits * kSplitTokens;
    args.partials = partials.get() + piece * queries * PartialFloats(cache.format_.value.dim);
    return args;
  }

  void Merge(const CpuLayerCache& cache, const StepArgs& step, size_t head) const {
    const profile::Timed timed(profile::kMerge);
    const int dim = cache.format_.value.dim;
    for (int64_t i = 0; i < queries; ++i) {
      const AttendArgs args = Piece(cache, step, head * splits);
      const auto partial = [&](int64_t split) {
        return PartialAt(args.partials + (split * queries + i) * PartialFloats(dim), dim);
      };
      Partial result = partial(0);
      for (int64_t split = 1; split < splits; ++split) result.Add(partial(split));
      FinishQuery(args, static_cast<int>(i), result);
    }
  }
};

std::vector<Phase> CpuLayerCache::Step(const StepArgs& step) {
  auto cut = std::make_shared<Cut>();
  const int64_t heads = format_.kv_num_heads;
  const int64_t first = format_.window_left < 0 ? 0 : std::max<int64_t>(0, span_.chunk.past - format_.window_left);
  cut->query_tiles = CeilDiv(step.sequence_length, kQueryTile);
  cut->key_begin = first / kSplitTokens * kSplitTokens;
  cut->key_parts = CeilDiv(span_.chunk.total - cut->key_begin, kSplitTokens);
  cut->queries = step.num_heads / heads * step.sequence_length;
  cut->splits = 1;
  if (cut->query_tiles == 1 && Kernels().splits)
    cut->splits = std::clamp<int64_t>(CeilDiv(WantedPieces(), heads), 1, std::max<int64_t>(1, cut->key_parts / 2));
  const size_t pieces = heads * cut->query_tiles * cut->splits;
  if (cut->splits > 1) cut->partials.reset(new float[pieces * cut->queries * PartialFloats(format_.value.dim)]);

  std::vector<Phase> phases;
  const KeyGuard::Span span = step.guard ? GuardSpan() : KeyGuard::Span{};
  phases.push_back({static_cast<size_t>(heads), [this, step, span](size_t head) {
                      EncodeHead(static_cast<int>(head));
                      if (!span.empty()) GuardHead(step, span, static_cast<int>(head));
                    }});
  // Some tenths of a microsecond a row: a decode step that closes no block, and what follows it.
  constexpr int64_t kSmall = 64;
  phases.back().small = span.empty() && heads * (span_.chunk.encode_to - span_.chunk.encode_from) <= kSmall / 2;
  phases.push_back({pieces, [this, step, cut](size_t piece) { Kernels().attend(cut->Piece(*this, step, piece)); }});
  if (cut->splits > 1)
    phases.push_back({static_cast<size_t>(heads), [this, step, cut](size_t head) { cut->Merge(*this, step, head); },
                      heads * cut->queries <= kSmall});
  return phases;
}

CacheView CpuLayerCache::View() const {
  CacheView view;
  view.format = &format_;
  view.pages = page_pointers_.data();
  view.exact_key_pages = exact_key_pointers_.data();
  view.exact_value_pages = exact_value_pointers_.data();
  view.sink_key = sink_key_ ? Floats(sink_key_) : nullptr;
  view.sink_value = sink_value_ ? Floats(sink_value_) : nullptr;
  view.block_means = mean_pointers_.data();
  view.page_begin = pages_.begin();
  view.mean_begin = means_.begin();
  view.exact_page_begin = exact_keys_.begin();
  view.exact_begin = span_.exact_begin;
  view.encoded_end = span_.chunk.encode_to;
  view.past = span_.chunk.past;
  view.total = span_.chunk.total;
  view.key = chunk_key_;
  view.value = chunk_value_;
  return view;
}

void CpuLayerCache::Commit() {
  span_.Commit(format_);
  chunk_key_ = chunk_value_ = {};
}

void CpuLayerCache::Settle() {
  span_.Settle(format_);
  exact_keys_.FreeBefore(span_.exact_begin / kExactPageTokens);
  exact_values_.FreeBefore(span_.exact_begin / kExactPageTokens);
  if (format_.window_left < 0) return;
  pages_.FreeBefore(span_.pages_begin / kPageTokens);
  means_.FreeBefore(span_.pages_begin / format_.block);
}

void CpuLayerCache::CheckTruncate(int64_t length) const { span_.CheckTruncate(format_, length); }

void CpuLayerCache::Truncate(int64_t length) {
  if (!span_.Truncate(format_, length)) return;
  if (length == 0) guard_.Reset();
  pages_.FreeFrom(CeilDiv(span_.encoded_end, kPageTokens));
  means_.FreeFrom(CeilDiv(span_.encoded_end, format_.block));
  exact_keys_.FreeFrom(CeilDiv(length, kExactPageTokens));
  exact_values_.FreeFrom(CeilDiv(length, kExactPageTokens));
}

}  // namespace kvfuse
