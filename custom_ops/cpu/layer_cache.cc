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

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

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
  const int64_t total = length_ + count, encoded = std::max(encoded_end_, format_.EncodedEnd(total));
  const int64_t exact_from = std::max(length_, KeepExactFrom(total));
  int64_t bytes = added(pages_, encoded_end_ / kPageTokens, CeilDiv(encoded, kPageTokens)) * format_.page_bytes();
  if (format_.centered())
    bytes += added(means_, encoded_end_ / format_.block, CeilDiv(encoded, format_.block)) * mean_bytes();
  for (const bool key : {true, false})
    bytes += added(key ? exact_keys_ : exact_values_, exact_from / kExactPageTokens,
                   exact_from < total ? CeilDiv(total, kExactPageTokens) : 0) *
             ExactPageBytes(key);
  const int64_t sinks = std::max<int64_t>(0, std::min(format_.n_sink, total) - length_);
  return bytes + sinks * format_.kv_num_heads * (format_.key.dim + format_.value.dim) * 4;
}

std::shared_ptr<LayerCache> CpuLayerCache::Fork() const {
  auto fork = std::make_shared<CpuLayerCache>(format_);
  fork->length_ = length_;
  fork->encoded_end_ = encoded_end_;
  fork->pages_begin_ = pages_begin_;
  fork->exact_begin_ = exact_begin_;
  fork->undo_begin_ = undo_begin_;
  fork->undo_end_ = undo_end_;
  fork->pages_ = pages_;
  fork->means_ = means_;
  fork->exact_keys_ = exact_keys_;
  fork->exact_values_ = exact_values_;
  fork->sink_key_ = sink_key_;
  fork->sink_value_ = sink_value_;
  fork->guard_ = guard_;
  return fork;
}

// Exact rows that a later query, or a block still to be encoded, may need; plus the slack.
int64_t CpuLayerCache::KeepExactFrom(int64_t length) const {
  if (!format_.has_exact_window()) return length;
  const int64_t from = std::max<int64_t>(0, format_.WindowBegin(length) - kRollbackSlack);
  return from / kExactPageTokens * kExactPageTokens;
}

void CpuLayerCache::Prepare(int64_t past, int64_t count, const Rows& key, const Rows& value) {
  const profile::Timed timed(profile::kPrepare);
  chunk_ = {past, past + count, key, value, 0, 0};
  const int64_t encoded = std::min(encoded_end_, past);
  chunk_.encode_from = encoded;
  chunk_.encode_to = std::max(encoded, format_.EncodedEnd(chunk_.total));
  if (chunk_.encode_to > encoded) {
    for (int64_t i = encoded / kPageTokens; i < CeilDiv(chunk_.encode_to, kPageTokens); ++i)
      pages_.Writable(i, format_.page_bytes());
    for (int64_t i = encoded / format_.block; format_.centered() && i < CeilDiv(chunk_.encode_to, format_.block); ++i)
      means_.Writable(i, mean_bytes());
  }
  StoreSinks();
  StoreExact(std::max(past, KeepExactFrom(chunk_.total)));
  RefreshPointers();
}

// The sinks grow token by token until all are there; each time into new pages, which a fork does not share.
void CpuLayerCache::StoreSinks() {
  const int64_t end = std::min(format_.n_sink, chunk_.total);
  if (chunk_.past >= end) return;
  for (const bool key : {true, false}) {
    const int64_t dim = key ? format_.key.dim : format_.value.dim, row_bytes = dim * 4;
    Page& sink = key ? sink_key_ : sink_value_;
    Page grown = Page::Make(end * format_.kv_num_heads * row_bytes);
    if (chunk_.past > 0) std::memcpy(grown.data(), sink.data(), chunk_.past * format_.kv_num_heads * row_bytes);
    for (int64_t j = chunk_.past; j < end; ++j)
      for (int head = 0; head < format_.kv_num_heads; ++head)
        std::memcpy(grown.data() + (j * format_.kv_num_heads + head) * row_bytes,
                    (key ? chunk_.key : chunk_.value).at(head, j - chunk_.past), row_bytes);
    sink = std::move(grown);
  }
}

void CpuLayerCache::StoreExact(int64_t from) {
  for (const bool key : {true, false}) {
    const int64_t row_bytes = (key ? format_.key.dim : format_.value.dim) * 4;
    uint8_t* page = nullptr;
    for (int64_t j = from; j < chunk_.total; ++j) {
      if (j == from || j % kExactPageTokens == 0)
        page = (key ? exact_keys_ : exact_values_).Writable(j / kExactPageTokens, ExactPageBytes(key));
      for (int head = 0; head < format_.kv_num_heads; ++head)
        std::memcpy(page + (int64_t{head} * kExactPageTokens + j % kExactPageTokens) * row_bytes,
                    (key ? chunk_.key : chunk_.value).at(head, j - chunk_.past), row_bytes);
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
  if (position >= chunk_.past) return (key ? chunk_.key : chunk_.value).at(head, position - chunk_.past);
  return position < exact_begin_ ? nullptr : ExactRow(key, head, position);
}

void CpuLayerCache::EncodeHead(int head) {
  const profile::Timed timed(profile::kEncode);
  int64_t block_of_mean = -1;
  std::vector<const float*> rows;
  std::vector<float> mean;
  for (int64_t j = chunk_.encode_from; j < chunk_.encode_to; ++j) {
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
  const int64_t first = format_.window_left < 0 ? 0 : std::max<int64_t>(0, chunk_.past - format_.window_left);
  cut->query_tiles = CeilDiv(step.sequence_length, kQueryTile);
  cut->key_begin = first / kSplitTokens * kSplitTokens;
  cut->key_parts = CeilDiv(chunk_.total - cut->key_begin, kSplitTokens);
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
  phases.back().small = span.empty() && heads * (chunk_.encode_to - chunk_.encode_from) <= kSmall / 2;
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
  view.exact_begin = exact_begin_;
  view.encoded_end = chunk_.encode_to;
  view.past = chunk_.past;
  view.total = chunk_.total;
  view.key = chunk_.key;
  view.value = chunk_.value;
  return view;
}

void CpuLayerCache::Commit() {
  undo_begin_ = exact_begin_;
  undo_end_ = chunk_.past;
  length_ = chunk_.total;
  encoded_end_ = chunk_.encode_to;
  exact_begin_ = std::max(exact_begin_, KeepExactFrom(length_));
  chunk_ = {};
}

void CpuLayerCache::Settle() {
  undo_end_ = -1;
  exact_keys_.FreeBefore(exact_begin_ / kExactPageTokens);
  exact_values_.FreeBefore(exact_begin_ / kExactPageTokens);
  if (format_.window_left < 0) return;
  const int64_t unseen = std::max<int64_t>(0, length_ - format_.window_left - kRollbackSlack);
  pages_begin_ = std::max(pages_begin_, std::min(unseen, encoded_end_) / kPageTokens * kPageTokens);
  pages_.FreeBefore(pages_begin_ / kPageTokens);
  means_.FreeBefore(pages_begin_ / format_.block);
}

void CpuLayerCache::CheckTruncate(int64_t length) const {
  if (length > 0 && length < length_ && length - format_.window_left < pages_begin_ && pages_begin_ > 0)
    Fail("[truncate] expected a length of 0 or at least ", pages_begin_ + format_.window_left,
         ", since the sliding window has freed older tokens; found ", length);
}

void CpuLayerCache::Truncate(int64_t length) {
  if (length >= length_) return;
  CheckTruncate(length);
  length_ = length;
  if (length <= undo_end_) exact_begin_ = undo_begin_;
  undo_end_ = -1;
  exact_begin_ = std::min(exact_begin_, length);
  // A block that is open again counts as not encoded while its floats are there; else it stays low-bit.
  encoded_end_ = std::min(encoded_end_, std::max(format_.EncodedEnd(length), exact_begin_));
  if (length == 0) pages_begin_ = 0, guard_.Reset();
  pages_.FreeFrom(CeilDiv(encoded_end_, kPageTokens));
  means_.FreeFrom(CeilDiv(encoded_end_, format_.block));
  exact_keys_.FreeFrom(CeilDiv(length, kExactPageTokens));
  exact_values_.FreeFrom(CeilDiv(length, kExactPageTokens));
}

}  // namespace kvfuse
