#include "kvfuse/sequence.h"

#include <algorithm>

#include "kvfuse/error.h"

namespace kvfuse {

std::vector<LayerCache*> Sequence::Layers() {
  std::vector<LayerCache*> layers;
  for (auto& [name, layer] : layers_) layers.push_back(layer.get());
  return layers;
}

int64_t Sequence::LengthLocked() {
  if (layers_.empty() || layers_.size() < layer_names_.size()) return 0;  // a layer that never ran holds nothing
  int64_t length = INT64_MAX;
  for (LayerCache* layer : Layers()) {
    std::lock_guard<std::mutex> lock(layer->mutex);
    length = std::min(length, layer->length());
  }
  return length;
}

int64_t Sequence::Length() {
  std::lock_guard<std::mutex> lock(mutex_);
  return LengthLocked();
}

int64_t Sequence::ExactBegin() {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t begin = 0;
  for (LayerCache* layer : Layers()) {
    std::lock_guard<std::mutex> layer_lock(layer->mutex);
    begin = std::max(begin, layer->exact_begin());
  }
  return std::min(begin, LengthLocked());
}

std::map<std::string, int64_t> Sequence::Bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, int64_t> bytes;
  for (auto& [name, layer] : layers_) {
    std::lock_guard<std::mutex> layer_lock(layer->mutex);
    bytes[name] = layer->nbytes();
  }
  return bytes;
}

std::map<std::string, double> Sequence::KeyErrors() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, double> errors;
  for (auto& [name, layer] : layers_) {
    std::lock_guard<std::mutex> layer_lock(layer->mutex);
    errors[name] = layer->key_error();
  }
  return errors;
}

void Sequence::ReadLayer(const std::string& layer, const std::function<void(const LayerCache&)>& read) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = layers_.find(layer);
  if (found == layers_.end()) Fail("[sequence ", id_, "] expected a layer that has run; found '", layer, "'");
  std::lock_guard<std::mutex> layer_lock(found->second->mutex);
  read(*found->second);
}

void Sequence::TruncateLocked(int64_t length) {
  for (LayerCache* layer : Layers()) {
    std::lock_guard<std::mutex> lock(layer->mutex);
    layer->CheckTruncate(length);
  }
  for (LayerCache* layer : Layers()) {
    std::lock_guard<std::mutex> lock(layer->mutex);
    layer->Truncate(length);
  }
}

void Sequence::CheckTruncate(int64_t length) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (LayerCache* layer : Layers()) {
    std::lock_guard<std::mutex> layer_lock(layer->mutex);
    layer->CheckTruncate(length);
  }
}

void Sequence::Truncate(int64_t length) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t present = LengthLocked();
  if (length < 0 || length > present)
    Fail("[sequence ", id_, "] expected a length from 0 to ", present, " to truncate to; found ", length);
  run_.fetch_add(1);  // a run under way must not write after this
  pending_.reset();
  TruncateLocked(length);
}

// A sequence belongs to the model that filled it, until it is empty or started again.
bool Sequence::Bound(const std::string& fingerprint, const std::vector<std::string>& layers) const {
  return fingerprint_ == fingerprint && layer_names_ == layers;
}

void Sequence::SetLimits(int64_t max_tokens, int64_t max_bytes) {
  if (max_tokens < -1 || max_bytes < -1)
    Fail("[sequence ", id_, "] expected limits of -1 (none) or more; found ", max_tokens, " tokens and ", max_bytes,
         " bytes");
  std::lock_guard<std::mutex> lock(mutex_);
  max_tokens_ = max_tokens;
  max_bytes_ = max_bytes;
}

void Sequence::CopyFrom(Sequence& other) {
  std::scoped_lock lock(mutex_, other.mutex_);
  const int64_t length = other.LengthLocked();
  fingerprint_ = other.fingerprint_;
  layer_names_ = other.layer_names_;
  max_tokens_ = other.max_tokens_;
  max_bytes_ = other.max_bytes_;
  for (auto& [name, layer] : other.layers_) {
    std::lock_guard<std::mutex> layer_lock(layer->mutex);
    layers_[name] = layer->Fork();
  }
  TruncateLocked(length);  // a run under way on the other is not part of the copy
}

void Sequence::CheckBegin(const std::string& fingerprint, const std::vector<std::string>& layers, int64_t past) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!Bound(fingerprint, layers) && past != 0 && LengthLocked() > 0)
    Fail("[sequence ", id_, "] expected the model it was started with (fingerprint ", fingerprint_, ", ",
         layer_names_.size(), " layers); found another (fingerprint ", fingerprint, ", ", layers.size(), " layers)");
  const int64_t present = LengthLocked();
  if (past < -1 || past > present)
    Fail("[sequence ", id_, "] expected a kv_past_length from -1 to the present length ", present, "; found ", past);
  if (past < 0) return;
  for (LayerCache* layer : Layers()) {
    std::lock_guard<std::mutex> layer_lock(layer->mutex);
    layer->CheckTruncate(past);
  }
}

std::pair<int64_t, int64_t> Sequence::Begin(const std::string& fingerprint, const std::vector<std::string>& layers,
                                            int64_t past) {
  std::lock_guard<std::mutex> lock(mutex_);
  // From here on every layer refuses the older run; one that is inside a layer now is waited for below.
  const int64_t run = run_.fetch_add(1) + 1;
  const int64_t present = Bound(fingerprint, layers) ? LengthLocked() : 0;
  const int64_t start = past < 0 ? present : std::min(past, present);
  pending_ = Pending{start, fingerprint, layers};
  return {start, run};
}

void Sequence::CheckLayer(int64_t run, const std::string& layer, const CacheFormat& format, int64_t total,
                          int64_t count, CacheDevice& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  CheckRun(run, layer);
  if (max_tokens_ >= 0 && total > max_tokens_)
    FailMemory("[layer '", layer, "'] expected at most ", max_tokens_, " tokens in sequence ", id_, "; found ", total);
  if (max_bytes_ >= 0) CheckBytes(layer, format, count, device);
  const std::vector<std::string>& names = pending_ ? pending_->layers : layer_names_;
  if (!names.empty() && std::find(names.begin(), names.end(), layer) == names.end())
    Fail("[layer '", layer, "'] expected a layer key that the graph's KvCacheBegin lists; found none of its ",
         names.size(), " keys equal");
  if (pending_ && (pending_->start == 0 || !Bound(pending_->fingerprint, pending_->layers))) return;  // starts empty
  const auto found = layers_.find(layer);
  if (found == layers_.end() || found->second->format() == format) return;
  std::lock_guard<std::mutex> layer_lock(found->second->mutex);
  if (found->second->length() > 0)
    Fail("[layer '", layer, "'] expected what sequence ", id_, " already holds, ", found->second->format().Describe(),
         "; found ", format.Describe());
}

void Sequence::CheckBytes(const std::string& layer, const CacheFormat& format, int64_t count, CacheDevice& device) {
  int64_t bytes = layers_.count(layer) == 0 ? device.Make(format)->GrowthBytes(count) : 0;
  for (auto& [name, cache] : layers_) {
    std::lock_guard<std::mutex> layer_lock(cache->mutex);
    bytes += cache->nbytes() + (name == layer ? cache->GrowthBytes(count) : 0);
  }
  if (bytes > max_bytes_)
    FailMemory("[layer '", layer, "'] expected at most ", max_bytes_, " bytes in sequence ", id_, "; found a need for ",
               bytes);
}

std::shared_ptr<LayerCache> Sequence::StartLayer(int64_t run, const std::string& layer, const CacheFormat& format,
                                                 CacheDevice& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  CheckRun(run, layer);
  if (pending_) {
    if (!Bound(pending_->fingerprint, pending_->layers)) {
      layers_.clear();
      fingerprint_ = pending_->fingerprint;
      layer_names_ = pending_->layers;
    }
    TruncateLocked(pending_->start);
    pending_.reset();
    finished_layers_ = 0;
  }
  std::shared_ptr<LayerCache>& cache = layers_[layer];
  if (cache == nullptr || !(cache->format() == format)) cache = device.Make(format);
  if (&cache->device() != &device) cache = device.Adopt(cache->Snapshot());
  return cache;
}

void Sequence::FinishLayer(int64_t run) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (run_.load() != run || ++finished_layers_ < layer_names_.size()) return;
  for (LayerCache* layer : Layers()) {
    std::lock_guard<std::mutex> layer_lock(layer->mutex);
    layer->Settle();
  }
}

void Sequence::CheckRun(int64_t run, const std::string& layer) const {
  if (run_.load() != run)
    Fail("[layer '", layer, "'] sequence in use: expected run ", run, " to be the only one on sequence ", id_,
         "; found that run ", run_.load(), " has begun, and stopped the older one");
}

SequenceTable& SequenceTable::Global() {
  static SequenceTable* table = new SequenceTable;  // never destroyed: sessions may outlive static destructors
  return *table;
}

std::shared_ptr<Sequence> SequenceTable::Create() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto sequence = std::make_shared<Sequence>(next_id_++);
  sequences_[sequence->id()] = sequence;
  return sequence;
}

void SequenceTable::Destroy(int64_t id) {
  std::shared_ptr<Sequence> last;  // freed outside the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) Fail("[sequence] expected the handle of a live sequence; found ", id);
  last = std::move(found->second);
  sequences_.erase(found);
}

std::shared_ptr<Sequence> SequenceTable::Find(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) Fail("[sequence] expected the handle of a live sequence; found ", id);
  return found->second;
}

std::shared_ptr<Sequence> SequenceTable::Fork(int64_t id) {
  const std::shared_ptr<Sequence> source = Find(id), fork = Create();
  try {
    fork->CopyFrom(*source);
  } catch (...) {
    Destroy(fork->id());
    throw;
  }
  return fork;
}

std::shared_ptr<Sequence> SequenceTable::Unfreeze(std::string_view bytes) {
  const std::shared_ptr<Sequence> sequence = Create();
  try {
    sequence->Unfreeze(bytes);
  } catch (...) {
    Destroy(sequence->id());
    throw;
  }
  return sequence;
}

std::vector<int64_t> SequenceTable::Reorder(const std::vector<int64_t>& handles, const std::vector<int64_t>& index) {
  for (const int64_t handle : handles) {
    Find(handle);
    if (std::count(handles.begin(), handles.end(), handle) != 1)
      Fail("[reorder] expected each sequence once; found ", handle, " twice");
  }
  for (const int64_t i : index)
    if (i < 0 || i >= static_cast<int64_t>(handles.size()))
      Fail("[reorder] expected indices from 0 to ", static_cast<int64_t>(handles.size()) - 1, "; found ", i);
  std::vector<int64_t> result, forks;
  std::vector<bool> used(handles.size(), false);
  try {
    for (const int64_t i : index) {
      if (used[i]) forks.push_back(Fork(handles[i])->id());
      result.push_back(used[i] ? forks.back() : handles[i]);
      used[i] = true;
    }
  } catch (...) {
    for (const int64_t fork : forks) Destroy(fork);
    throw;
  }
  for (size_t i = 0; i < handles.size(); ++i)
    if (!used[i]) Destroy(handles[i]);
  return result;
}

size_t SequenceTable::size() {
  std::lock_guard<std::mutex> lock(mutex_);
  return sequences_.size();
}

void SequenceTable::Publish(const std::string& token, std::shared_ptr<std::vector<int64_t>> rows) {
  std::lock_guard<std::mutex> lock(published_mutex_);
  for (auto it = published_.begin(); it != published_.end();)
    it = it->second.expired() ? published_.erase(it) : std::next(it);
  published_[token] = std::move(rows);
}

std::shared_ptr<std::vector<int64_t>> SequenceTable::Published(const std::string& token) {
  std::lock_guard<std::mutex> lock(published_mutex_);
  const auto found = published_.find(token);
  return found == published_.end() ? nullptr : found->second.lock();
}

void SequenceTable::Grow(std::vector<int64_t>& rows, size_t count) {
  while (rows.size() < count) rows.push_back(Create()->id());
}

}  // namespace kvfuse
