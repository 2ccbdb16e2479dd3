#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "kvfuse/error.h"
#include "kvfuse/half.h"
#include "kvfuse/sequence.h"

namespace kvfuse {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Makes the page exist and be ours alone, copying it when another sequence shares it.
void MakeWritable(Page& page, int64_t bytes) {
  if (page == nullptr)
    page = std::make_shared<std::vector<uint8_t>>(bytes);
  else if (page.use_count() > 1)
    page = std::make_shared<std::vector<uint8_t>>(*page);
}

void MakeWritable(std::vector<Page>& pages, int64_t index, int64_t bytes) {
  if (static_cast<int64_t>(pages.size()) <= index) pages.resize(index + 1);
  MakeWritable(pages[index], bytes);
}

float* Floats(const Page& page) { return reinterpret_cast<float*>(page->data()); }

void Shrink(std::vector<Page>& pages, int64_t count) {
  if (static_cast<int64_t>(pages.size()) > count) pages.resize(count);
}

// Frees pages [0, count) but keeps their places.
void FreeFront(std::vector<Page>& pages, int64_t count) {
  for (int64_t i = std::min<int64_t>(count, pages.size()) - 1; i >= 0 && pages[i] != nullptr; --i) pages[i].reset();
}

int64_t TotalBytes(const std::vector<Page>& pages) {
  int64_t bytes = 0;
  for (const Page& page : pages) bytes += page == nullptr ? 0 : static_cast<int64_t>(page->size());
  return bytes;
}

template <typename T>
void FillPointers(const std::vector<Page>& pages, std::vector<const T*>& pointers) {
  pointers.resize(pages.size());
  for (size_t i = 0; i < pages.size(); ++i)
    pointers[i] = pages[i] == nullptr ? nullptr : reinterpret_cast<const T*>(pages[i]->data());
}

// The f16 mean of a block's rows, per channel, over the rows that are finite throughout: one bad token must
// not reach its neighbours' bytes.
void BlockMean(const std::vector<const float*>& rows, int dim, uint16_t* mean) {
  std::vector<float> sum(dim, 0.0f);
  float count = 0.0f;
  for (const float* row : rows) {
    if (!std::all_of(row, row + dim, [](float x) { return std::isfinite(x); })) continue;
    for (int i = 0; i < dim; ++i) sum[i] += row[i];
    count += 1.0f;
  }
  for (int i = 0; i < dim; ++i) mean[i] = FloatToHalfSaturated(count == 0.0f ? 0.0f : sum[i] / count);
}

void EncodeRow(const SideFormat& side, const float* row, const uint16_t* mean, uint8_t* stored) {
  std::vector<float> work(row, row + side.dim);
  if (mean != nullptr)
    for (int i = 0; i < side.dim; ++i) work[i] -= HalfToFloat(mean[i]);
  if (side.rotated()) Kernels().rotate(work.data(), side.dim);
  Kernels().quantize_row(side, work.data(), stored, stored + side.code_bytes());
}

}  // namespace

std::string CacheFormat::Describe() const {
  std::ostringstream text;
  text << kv_num_heads << " kv heads of " << key.dim << "/" << value.dim << " channels, key/value bits " << key.bits
       << "/" << value.bits << ", group_size " << key.group_size << ", codes " << (key.full ? "full" : "symmetric")
       << ", rotation " << (key.rotate ? "hadamard" : "none") << ", n_recent " << n_recent << ", block " << block
       << ", n_sink " << n_sink << ", window_left " << window_left << ", key_center "
       << (center_keys ? "block" : "none");
  return text.str();
}

int64_t LayerCache::nbytes() const {
  int64_t bytes = TotalBytes(pages_) + TotalBytes(means_) + TotalBytes(exact_keys_) + TotalBytes(exact_values_);
  for (const Page* sink : {&sink_key_, &sink_value_})
    if (*sink != nullptr) bytes += static_cast<int64_t>((*sink)->size());
  return bytes;
}

// Exact rows that a later query, or a block still to be encoded, may need; plus the slack.
int64_t LayerCache::KeepExactFrom(int64_t length) const {
  if (!format_.has_exact_window()) return length;
  const int64_t window = format_.block == 1 ? length - format_.n_recent : format_.EncodedEnd(length);
  const int64_t from = std::max<int64_t>(0, window - kRollbackSlack);
  return from / kExactPageTokens * kExactPageTokens;
}

void LayerCache::Prepare(int64_t past, int64_t count, const Rows& key, const Rows& value) {
  chunk_ = {past, past + count, key, value, 0, 0};
  const int64_t encoded = std::min(encoded_end_, past);
  chunk_.encode_from = encoded;
  chunk_.encode_to = std::max(encoded, format_.EncodedEnd(chunk_.total));
  for (int64_t i = encoded / kPageTokens; i < CeilDiv(chunk_.encode_to, kPageTokens); ++i)
    if (chunk_.encode_to > encoded) MakeWritable(pages_, i, format_.page_bytes());
  if (format_.centered())
    for (int64_t i = encoded / format_.block; i < CeilDiv(chunk_.encode_to, format_.block); ++i)
      MakeWritable(means_, i, int64_t{format_.kv_num_heads} * format_.key.dim * 2);
  StoreSinks();
  StoreExact(std::max(past, KeepExactFrom(chunk_.total)));
  RefreshPointers();
}

void LayerCache::StoreSinks() {
  const int64_t end = std::min(format_.n_sink, chunk_.total);
  if (chunk_.past >= end) return;
  for (const bool key : {true, false}) {
    const int dim = key ? format_.key.dim : format_.value.dim;
    Page& sink = key ? sink_key_ : sink_value_;
    MakeWritable(sink, format_.kv_num_heads * format_.n_sink * dim * 4);
    for (int head = 0; head < format_.kv_num_heads; ++head)
      for (int64_t j = chunk_.past; j < end; ++j)
        std::memcpy(Floats(sink) + (head * format_.n_sink + j) * dim,
                    (key ? chunk_.key : chunk_.value).at(head, j - chunk_.past), dim * sizeof(float));
  }
}

void LayerCache::StoreExact(int64_t from) {
  if (exact_keys_.empty()) exact_page_begin_ = from / kExactPageTokens;
  for (const bool key : {true, false}) {
    const int dim = key ? format_.key.dim : format_.value.dim;
    std::vector<Page>& pages = key ? exact_keys_ : exact_values_;
    const int64_t page_bytes = int64_t{format_.kv_num_heads} * kExactPageTokens * dim * 4;
    for (int64_t j = from; j < chunk_.total; ++j) {
      if (j == from || j % kExactPageTokens == 0) MakeWritable(pages, ExactPage(j), page_bytes);
      float* page = Floats(pages[ExactPage(j)]);
      for (int head = 0; head < format_.kv_num_heads; ++head)
        std::memcpy(page + (int64_t{head} * kExactPageTokens + j % kExactPageTokens) * dim,
                    (key ? chunk_.key : chunk_.value).at(head, j - chunk_.past), dim * sizeof(float));
    }
  }
}

void LayerCache::RefreshPointers() {
  FillPointers(pages_, page_pointers_);
  FillPointers(means_, mean_pointers_);
  FillPointers(exact_keys_, exact_key_pointers_);
  FillPointers(exact_values_, exact_value_pointers_);
}

// An f32 row of this chunk or of the exact pages; null where the floats are gone.
const float* LayerCache::FloatRow(bool key, int head, int64_t position) const {
  if (position >= chunk_.past) return (key ? chunk_.key : chunk_.value).at(head, position - chunk_.past);
  if (position < exact_begin_) return nullptr;
  const int dim = key ? format_.key.dim : format_.value.dim;
  const Page& page = (key ? exact_keys_ : exact_values_)[ExactPage(position)];
  return Floats(page) + (int64_t{head} * kExactPageTokens + position % kExactPageTokens) * dim;
}

void LayerCache::EncodeHead(int head) {
  int64_t block_of_mean = -1;
  std::vector<const float*> rows;
  for (int64_t j = chunk_.encode_from; j < chunk_.encode_to; ++j) {
    const uint16_t* mean = nullptr;
    if (format_.centered()) {
      const int64_t block = j / format_.block;
      auto* means = reinterpret_cast<uint16_t*>(means_[block]->data()) + int64_t{head} * format_.key.dim;
      if (block != block_of_mean) {
        block_of_mean = block;
        rows.clear();
        for (int64_t i = block * format_.block; i < (block + 1) * format_.block; ++i)
          rows.push_back(FloatRow(true, head, i));
        // After a rollback beyond the slack the block's first rows exist as codes only: their mean stays.
        if (rows.front() != nullptr) BlockMean(rows, format_.key.dim, means);
      }
      mean = means;
    }
    uint8_t* page = pages_[j / kPageTokens]->data();
    EncodeRow(format_.key, FloatRow(true, head, j), mean, page + format_.key_row_offset(head, j % kPageTokens));
    EncodeRow(format_.value, FloatRow(false, head, j), nullptr, page + format_.value_row_offset(head, j % kPageTokens));
  }
}

CacheView LayerCache::View() const {
  CacheView view;
  view.format = &format_;
  view.pages = page_pointers_.data();
  view.exact_key_pages = exact_key_pointers_.data();
  view.exact_value_pages = exact_value_pointers_.data();
  view.sink_key = sink_key_ == nullptr ? nullptr : Floats(sink_key_);
  view.sink_value = sink_value_ == nullptr ? nullptr : Floats(sink_value_);
  view.block_means = mean_pointers_.data();
  view.exact_page_begin = exact_page_begin_;
  view.exact_begin = exact_begin_;
  view.past = chunk_.past;
  view.total = chunk_.total;
  view.key = chunk_.key;
  view.value = chunk_.value;
  return view;
}

void LayerCache::Commit() {
  undo_begin_ = exact_begin_;
  undo_end_ = chunk_.past;
  length_ = chunk_.total;
  encoded_end_ = chunk_.encode_to;
  exact_begin_ = std::max(exact_begin_, KeepExactFrom(length_));
  chunk_ = {};
}

void LayerCache::Settle() {
  undo_end_ = -1;
  const int64_t gone = std::clamp<int64_t>(exact_begin_ / kExactPageTokens - exact_page_begin_, 0, exact_keys_.size());
  for (std::vector<Page>* pages : {&exact_keys_, &exact_values_}) pages->erase(pages->begin(), pages->begin() + gone);
  exact_page_begin_ += gone;
  if (format_.window_left < 0) return;
  const int64_t unseen = std::max<int64_t>(0, length_ - format_.window_left - kRollbackSlack);
  const int64_t pages = std::min(unseen, encoded_end_) / kPageTokens;
  pages_begin_ = std::max(pages_begin_, pages * kPageTokens);
  FreeFront(pages_, pages);
  FreeFront(means_, pages_begin_ / format_.block);
}

void LayerCache::CheckTruncate(int64_t length) const {
  if (length > 0 && length < length_ && length - format_.window_left < pages_begin_ && pages_begin_ > 0)
    Fail("[truncate] expected a length of 0 or at least ", pages_begin_ + format_.window_left,
         ", since the sliding window has freed older tokens; found ", length);
}

void LayerCache::Truncate(int64_t length) {
  if (length >= length_) return;
  CheckTruncate(length);
  length_ = length;
  if (length <= undo_end_) exact_begin_ = undo_begin_;
  undo_end_ = -1;
  exact_begin_ = std::min(exact_begin_, length);
  // A block that is open again counts as not encoded while its floats are there; else it stays low-bit.
  encoded_end_ = std::min(encoded_end_, std::max(format_.EncodedEnd(length), exact_begin_));
  if (length == 0) pages_begin_ = 0;
  Shrink(pages_, CeilDiv(encoded_end_, kPageTokens));
  Shrink(means_, CeilDiv(encoded_end_, format_.block));
  const int64_t exact_pages = std::max<int64_t>(0, CeilDiv(length, kExactPageTokens) - exact_page_begin_);
  Shrink(exact_keys_, exact_pages);
  Shrink(exact_values_, exact_pages);
}

}  // namespace kvfuse
