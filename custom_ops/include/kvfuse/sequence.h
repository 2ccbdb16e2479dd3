// Sequences, their layer caches, and the table of handles. No arithmetic here.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvfuse/export.h"
#include "kvfuse/format.h"
#include "kvfuse/layer_cache.h"

namespace kvfuse {

// One token sequence through all layers of one model.
class KVFUSE_EXPORT Sequence {
 public:
  explicit Sequence(int64_t id) : id_(id) {}

  int64_t id() const { return id_; }
  // The number of the present run: the only one that layers take part in.
  int64_t run() const { return run_.load(); }

  // Smallest committed length over the layers of the bound model; 0 before the first run.
  int64_t Length();
  // First position whose exact rows are still held in every layer.
  int64_t ExactBegin();
  std::map<std::string, int64_t> Bytes();
  // See LayerCache::key_error.
  std::map<std::string, double> KeyErrors();
  void Truncate(int64_t length);
  // Throws Error when a sliding window has freed what a truncation to `length` needs.
  void CheckTruncate(int64_t length);
  void Reset() { Truncate(0); }
  // -1 for none; checked before a run's layer appends.
  void SetLimits(int64_t max_tokens, int64_t max_bytes);
  // Makes this empty sequence a copy of another's committed tokens.
  void CopyFrom(Sequence& other);
  // The state in a safetensors container, and an empty sequence from one. Throws Error, and changes nothing, when
  // the bytes are not exactly what Freeze writes.
  std::string Freeze();
  void Unfreeze(std::string_view bytes);
  // Calls read(layer cache) with the layer's mutex held; throws Error for a layer that has not run.
  void ReadLayer(const std::string& layer, const std::function<void(const LayerCache&)>& read);

  // Starts a run at `past` (-1: at the present length) and returns {past length, run number}. Any run still
  // under way on this sequence is from now on refused. Check first with CheckBegin. Nothing is dropped before
  // the first layer has checked its inputs: a refused run leaves the sequence as it was.
  void CheckBegin(const std::string& fingerprint, const std::vector<std::string>& layers, int64_t past);
  std::pair<int64_t, int64_t> Begin(const std::string& fingerprint, const std::vector<std::string>& layers,
                                    int64_t past);

  // For each layer of that run: CheckLayer throws Error when the layer cannot join the run; StartLayer drops what
  // the run starts without, once, and returns the layer's cache on that device: made there on first use, moved there
  // when it lives on another.
  void CheckLayer(int64_t run, const std::string& layer, const CacheFormat& format, int64_t total, int64_t count,
                  CacheDevice& device);
  std::shared_ptr<LayerCache> StartLayer(int64_t run, const std::string& layer, const CacheFormat& format,
                                         CacheDevice& device);
  // After a layer's commit, its mutex released: once all layers of the run have come here, they are settled.
  void FinishLayer(int64_t run);
  // Throws Error when a newer run has begun; call it with the layer's mutex held.
  void CheckRun(int64_t run, const std::string& layer) const;

 private:
  std::vector<LayerCache*> Layers();
  bool Bound(const std::string& fingerprint, const std::vector<std::string>& layers) const;
  void CheckBytes(const std::string& layer, const CacheFormat& format, int64_t count, CacheDevice& device);
  int64_t LengthLocked();
  void TruncateLocked(int64_t length);

  // What a run has announced and not yet done.
  struct Pending {
    int64_t start = 0;
    std::string fingerprint;
    std::vector<std::string> layers;
  };

  const int64_t id_;
  std::atomic<int64_t> run_{0};
  std::mutex mutex_;  // guards all below, and is taken before any layer's mutex
  std::optional<Pending> pending_;
  int64_t max_tokens_ = -1, max_bytes_ = -1;
  size_t finished_layers_ = 0;  // of the present run
  std::string fingerprint_;
  std::vector<std::string> layer_names_;  // of the bound model; empty: not bound yet
  std::map<std::string, std::shared_ptr<LayerCache>> layers_;
};

// Handles of all sequences of this process.
class KVFUSE_EXPORT SequenceTable {
 public:
  static SequenceTable& Global();

  std::shared_ptr<Sequence> Create();
  void Destroy(int64_t id);                    // throws Error for an unknown handle
  std::shared_ptr<Sequence> Find(int64_t id);  // throws Error for an unknown handle
  size_t size();
  std::shared_ptr<Sequence> Fork(int64_t id);
  std::shared_ptr<Sequence> Unfreeze(std::string_view bytes);
  // Handles with the tokens of handles[index[i]]: the first use of each keeps its handle, later uses are forks,
  // those without a use are destroyed. Throws Error, and changes nothing, for a bad handle or index.
  std::vector<int64_t> Reorder(const std::vector<int64_t>& handles, const std::vector<int64_t>& index);

  // A session's own sequences, findable by the token in its options ("kvfuse.session").
  void Publish(const std::string& token, std::shared_ptr<std::vector<int64_t>> rows);
  std::shared_ptr<std::vector<int64_t>> Published(const std::string& token);
  // Makes the session's own sequences at least `count`; call it with published_mutex held.
  void Grow(std::vector<int64_t>& rows, size_t count);

  std::mutex& published_mutex() { return published_mutex_; }

 private:
  std::mutex mutex_, published_mutex_;
  int64_t next_id_ = 1;
  std::unordered_map<int64_t, std::shared_ptr<Sequence>> sequences_;
  std::unordered_map<std::string, std::weak_ptr<std::vector<int64_t>>> published_;
};

// Freeze to, and unfreeze from, a file. Throw FileError (an Error) when it cannot be read or written.
KVFUSE_EXPORT void SaveSequence(Sequence& sequence, const std::string& path);
KVFUSE_EXPORT std::shared_ptr<Sequence> LoadSequence(const std::string& path);

}  // namespace kvfuse
