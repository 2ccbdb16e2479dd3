#include "device/layer_cache.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "kvfuse/error.h"

namespace kvfuse {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 30;  // positions are int32 in the kernels
constexpr size_t kIdleWorkspaces = 4;

// At least `bytes`, from a power of two on, so that steps that grow little by little seldom allocate.
void Reserve(Device& device, std::shared_ptr<DeviceBuffer>& buffer, int64_t bytes) {
  if (buffer != nullptr && buffer->size() >= bytes) return;
  int64_t size = 1 << 16;
  while (size < bytes) size *= 2;
  buffer = device.Allocate(size);
}

}  // namespace

CacheDevice& DeviceCaches(Device& device, const DeviceOptions& options) {
  // Never destroyed: sequences may outlive static destructors.
  static auto* mutex = new std::mutex;
  static auto* contexts = new std::map<std::tuple<Device*, bool, int>, std::unique_ptr<DeviceContext>>;
  std::lock_guard<std::mutex> lock(*mutex);
  auto& context = (*contexts)[{&device, options.simd, options.splits}];
  if (context == nullptr) context = std::make_unique<DeviceContext>(device, options);
  return *context;
}

std::shared_ptr<LayerCache> DeviceContext::Make(const CacheFormat& format) {
  return std::make_shared<DeviceLayerCache>(*this, format);
}

std::shared_ptr<LayerCache> DeviceContext::Adopt(const LayerSnapshot& snapshot) {
  return std::make_shared<DeviceLayerCache>(*this, snapshot);
}

DeviceWorkspace DeviceContext::TakeWorkspace(int64_t staging_bytes, int64_t scratch_bytes) {
  DeviceWorkspace workspace;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      workspace = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  // Memory that is touched for the first time costs more than the copy into it, so it is kept.
  if (static_cast<int64_t>(workspace.host.size()) < staging_bytes) workspace.host.resize(staging_bytes);
  Reserve(device_, workspace.staging, staging_bytes);
  Reserve(device_, workspace.scratch, scratch_bytes);
  return workspace;
}

void DeviceContext::ReturnWorkspace(DeviceWorkspace workspace) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (idle_.size() < kIdleWorkspaces) idle_.push_back(std::move(workspace));
}

void DeviceTable::Sync(Device& device, const SlotRun& low, const SlotRun& exact, const SlotRun& means) {
  const SlotRun* runs[3] = {&low, &exact, &means};
  bool fits = buffer_ != nullptr;
  for (int i = 0; i < 3; ++i)
    fits = fits && runs[i]->begin() >= sections_[i].base && runs[i]->end() <= sections_[i].base + sections_[i].capacity;
  if (!fits) {
    constexpr int64_t kRoom = 16;
    int64_t at = 0;
    for (int i = 0; i < 3; ++i) {
      const int64_t count = runs[i]->end() - runs[i]->begin();
      sections_[i] = {at, runs[i]->begin(), std::max({sections_[i].capacity, 2 * count, kRoom})};
      at += sections_[i].capacity;
    }
    held_.assign(at, -1);
    buffer_ = device.Allocate(at * sizeof(int32_t));
  }
  int64_t first = static_cast<int64_t>(held_.size()), last = 0;  // entries that differ
  for (int i = 0; i < 3; ++i)
    for (int64_t number = runs[i]->begin(); number < runs[i]->end(); ++number) {
      int32_t& entry = held_[sections_[i].at + number - sections_[i].base];
      if (entry == (*runs[i])[number]) continue;
      entry = (*runs[i])[number];
      const int64_t at = &entry - held_.data();
      first = std::min(first, at);
      last = std::max(last, at + 1);
    }
  if (first < last)
    device.Upload(*buffer_, first * sizeof(int32_t), held_.data() + first, (last - first) * sizeof(int32_t));
}

DeviceLayerCache::DeviceLayerCache(DeviceContext& context, const CacheFormat& format)
    : context_(context),
      format_(format),
      layout_(format),
      memory_(std::make_shared<DeviceMemory>(context.device(), layout_)) {}

DeviceLayerCache::~DeviceLayerCache() {
  std::lock_guard<std::mutex> lock(memory_->mutex);
  low_.FreeFrom(memory_->low, 0);
  exact_.FreeFrom(memory_->exact, 0);
  means_.FreeFrom(memory_->means, 0);
}

std::shared_ptr<LayerCache> DeviceLayerCache::Fork() const {
  auto fork = std::make_shared<DeviceLayerCache>(context_, format_);
  fork->memory_ = memory_;
  fork->span_ = span_;
  fork->span_.chunk = {};
  fork->sinks_ = sinks_;
  fork->sink_capacity_ = sink_capacity_;
  std::lock_guard<std::mutex> lock(memory_->mutex);
  fork->low_.ShareAll(memory_->low, low_);
  fork->exact_.ShareAll(memory_->exact, exact_);
  fork->means_.ShareAll(memory_->means, means_);
  return fork;
}

int64_t DeviceLayerCache::nbytes() const {
  return low_.count() * memory_->low.slot_bytes() + exact_.count() * memory_->exact.slot_bytes() +
         means_.count() * memory_->means.slot_bytes() + sink_floats(sink_capacity_) * 4;
}

int64_t DeviceLayerCache::GrowthBytes(int64_t count) const {
  const auto added = [](const SlotRun& run, int64_t from, int64_t end) {
    return std::max<int64_t>(0, end - std::max(from, run.end()));
  };
  LayerSpan after = span_;
  after.Prepare(format_, span_.length, count);
  const LayerSpan::Chunk& chunk = after.chunk;
  int64_t bytes = 0;
  if (chunk.encode_from < chunk.encode_to) {
    bytes +=
        added(low_, chunk.encode_from / kPageTokens, CeilDiv(chunk.encode_to, kPageTokens)) * memory_->low.slot_bytes();
    if (format_.centered())
      bytes += added(means_, chunk.encode_from / format_.block, CeilDiv(chunk.encode_to, format_.block)) *
               memory_->means.slot_bytes();
  }
  if (chunk.store_from < chunk.total)
    bytes += added(exact_, chunk.store_from / kExactPageTokens, CeilDiv(chunk.total, kExactPageTokens)) *
             memory_->exact.slot_bytes();
  return bytes + sink_floats(std::max<int64_t>(0, sinks_held(chunk.total) - sink_capacity_)) * 4;
}

void DeviceLayerCache::Forget() const {
  for (HostCopy* copy : {&read_page_, &read_exact_, &read_mean_, &read_sinks_}) copy->number = -1;
}

// Room for the sinks of `tokens` tokens, not shared with a fork.
void DeviceLayerCache::GrowSinks(int64_t tokens) {
  const int64_t needed = sinks_held(tokens);
  if (needed <= sink_capacity_ && sinks_.use_count() == 1) return;
  Device& device = context_.device();
  const int64_t capacity =
      needed <= sink_capacity_ ? sink_capacity_ : std::max(needed, std::min(format_.n_sink, 2 * sink_capacity_));
  std::shared_ptr<DeviceBuffer> grown = device.Allocate(sink_floats(capacity) * 4);
  const int64_t row = int64_t{format_.kv_num_heads} * 4;
  if (sink_capacity_ > 0) {
    device.Copy(*grown, 0, *sinks_, 0, sink_capacity_ * row * layout_.key.pitch);
    device.Copy(*grown, capacity * row * layout_.key.pitch, *sinks_, sink_capacity_ * row * layout_.key.pitch,
                sink_capacity_ * row * layout_.value.pitch);
    device.Wait();  // the old buffer may go now
  }
  sinks_ = std::move(grown);
  sink_capacity_ = capacity;
}

void DeviceLayerCache::Prepare(int64_t past, int64_t count, const Rows& key, const Rows& value) {
  if (past + count > kMaxTokens)
    Fail("[device ", context_.device().name(), "] expected at most ", kMaxTokens, " tokens in a sequence; found ",
         past + count);
  Forget();
  span_.Prepare(format_, past, count);
  const LayerSpan::Chunk& chunk = span_.chunk;
  chunk_key_ = key;
  chunk_value_ = value;
  std::lock_guard<std::mutex> lock(memory_->mutex);
  if (chunk.encode_from < chunk.encode_to) {
    for (int64_t i = chunk.encode_from / kPageTokens; i < CeilDiv(chunk.encode_to, kPageTokens); ++i)
      low_.MakeWritable(memory_->low, i);
    const int64_t end = format_.centered() ? CeilDiv(chunk.encode_to, format_.block) : 0;
    for (int64_t i = chunk.encode_from / format_.block; i < end; ++i) means_.MakeWritable(memory_->means, i);
  }
  if (chunk.store_from < chunk.total)
    for (int64_t i = chunk.store_from / kExactPageTokens; i < CeilDiv(chunk.total, kExactPageTokens); ++i)
      exact_.MakeWritable(memory_->exact, i);
  if (past < sinks_held(chunk.total)) GrowSinks(chunk.total);
  table_.Sync(context_.device(), low_, exact_, means_);
}

void DeviceLayerCache::Commit() {
  span_.Commit(format_);
  chunk_key_ = chunk_value_ = {};
}

void DeviceLayerCache::Settle() {
  span_.Settle(format_);
  Forget();
  std::lock_guard<std::mutex> lock(memory_->mutex);
  exact_.FreeBefore(memory_->exact, span_.exact_begin / kExactPageTokens);
  if (format_.window_left < 0) return;
  low_.FreeBefore(memory_->low, span_.pages_begin / kPageTokens);
  means_.FreeBefore(memory_->means, span_.pages_begin / format_.block);
}

void DeviceLayerCache::Truncate(int64_t length) {
  if (!span_.Truncate(format_, length)) return;
  Forget();
  std::lock_guard<std::mutex> lock(memory_->mutex);
  low_.FreeFrom(memory_->low, CeilDiv(span_.encoded_end, kPageTokens));
  means_.FreeFrom(memory_->means, CeilDiv(span_.encoded_end, format_.block));
  exact_.FreeFrom(memory_->exact, CeilDiv(length, kExactPageTokens));
}

}  // namespace kvfuse
