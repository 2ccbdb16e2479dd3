// Who owns the bytes: sequences, their layer caches, and the table of handles. No arithmetic here.
//
// A layer cache is addressed by position. A run writes at its past length and commits at the end, so a run
// that fails in between leaves nothing torn: what lies beyond the committed length is not there.
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
#include "kvfuse/kernels.h"
#include "kvfuse/page.h"

namespace kvfuse {

// A copy of what one layer of one sequence holds, in the canonical order, for tests and for saving.
struct LayerSnapshot {
  CacheFormat format;
  int64_t length = 0, begin = 0, encoded_end = 0, exact_begin = 0;
  std::vector<uint8_t> key_codes, value_codes;  // [kv_num_heads][encoded_end - begin][code bytes]
  std::vector<float> key_scales, value_scales;  // [kv_num_heads][encoded_end - begin][groups]
  std::vector<float> key_means;                 // [kv_num_heads][blocks][key dim]; empty unless centred
  std::vector<float> exact_key, exact_value;    // [kv_num_heads][length - exact_begin][dim]
  std::vector<float> sink_key, sink_value;      // [kv_num_heads][min(n_sink, length)][dim]
};

// K and V of one layer of one sequence. Not synchronized: callers hold `mutex`.
class KVFUSE_EXPORT LayerCache {
 public:
  explicit LayerCache(const CacheFormat& format) : format_(format) {}
  // From a checked snapshot; see frozen.cc.
  explicit LayerCache(const LayerSnapshot& snapshot);
  // The same committed tokens, sharing all pages; an unsettled chunk is part of them.
  std::shared_ptr<LayerCache> Fork() const;

  std::mutex mutex;

  const CacheFormat& format() const { return format_; }
  int64_t length() const { return length_; }
  int64_t exact_begin() const { return exact_begin_; }
  int64_t nbytes() const;
  // New page bytes that a chunk of `count` tokens takes.
  int64_t GrowthBytes(int64_t count) const;

  // A chunk in three steps. Prepare allocates all memory and copies what stays exact (may throw; nothing
  // visible changes), EncodeHead writes the low-bit rows of one kv head (heads in parallel), Commit makes
  // the chunk part of the cache (never throws). Until Settle the chunk can be dropped again without a trace, as
  // when the run fails in a later layer; Settle frees what no later query sees, the slack apart (never throws).
  // View is what attention reads between Prepare and Commit.
  void Prepare(int64_t past, int64_t count, const Rows& key, const Rows& value);
  void EncodeHead(int head);
  CacheView View() const;
  void Commit();
  void Settle();

  // Drops tokens from `length` on. Throws Error when a sliding window has freed what is needed then.
  void Truncate(int64_t length);
  void CheckTruncate(int64_t length) const;

  // Canonical: what any run over the same tokens holds; otherwise with the slack as it is.
  LayerSnapshot Snapshot(bool canonical = false) const;
  // One row as floats: exact where it is held exactly, else decoded; zeros where a sliding window has freed it.
  void ReadRow(bool key, int head, int64_t position, float* out) const;

 private:
  struct Chunk {
    int64_t past = 0, total = 0;
    Rows key, value;
    int64_t encode_from = 0, encode_to = 0;  // positions that enter the low-bit store
  };

  int64_t KeepExactFrom(int64_t length) const;
  int64_t ExactPageBytes(bool key) const {
    return int64_t{format_.kv_num_heads} * kExactPageTokens * (key ? format_.key.dim : format_.value.dim) * 4;
  }
  int64_t mean_bytes() const { return int64_t{format_.kv_num_heads} * format_.key.dim * 2; }
  const float* ExactRow(bool key, int head, int64_t position) const;
  const float* SinkRow(bool key, int head, int64_t position) const;
  std::vector<uint8_t> StoredRow(bool key, int head, int64_t position) const;
  const float* FloatRow(bool key, int head, int64_t position) const;
  void StoreExact(int64_t from);
  void StoreSinks();
  void RefreshPointers();

  CacheFormat format_;
  int64_t length_ = 0;
  int64_t encoded_end_ = 0;                 // the low-bit store holds [pages_begin_, encoded_end_)
  int64_t pages_begin_ = 0;                 // a sliding window has freed what lies before
  int64_t exact_begin_ = 0;                 // f32 rows are held from here to length_
  int64_t undo_begin_ = 0, undo_end_ = -1;  // and here, in case the last chunk is dropped again
  PageRun pages_, means_;                   // per kPageTokens tokens; per block
  PageRun exact_keys_, exact_values_;       // per kExactPageTokens tokens
  Page sink_key_, sink_value_;              // [tokens][kv_num_heads][dim]
  Chunk chunk_;
  // The same pages as plain pointers, for the kernels.
  std::vector<const uint8_t*> page_pointers_;
  std::vector<const uint16_t*> mean_pointers_;
  std::vector<const float*> exact_key_pointers_, exact_value_pointers_;
};

// One token sequence through all layers of one model.
class KVFUSE_EXPORT Sequence {
 public:
  explicit Sequence(int64_t id) : id_(id) {}

  int64_t id() const { return id_; }

  // Smallest committed length over the layers of the bound model; 0 before the first run.
  int64_t Length();
  // First position whose exact rows are still held in every layer.
  int64_t ExactBegin();
  std::map<std::string, int64_t> Bytes();
  void Truncate(int64_t length);
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
  // the run starts without, once, and returns the layer's cache, made on first use.
  void CheckLayer(int64_t run, const std::string& layer, const CacheFormat& format, int64_t total, int64_t count);
  std::shared_ptr<LayerCache> StartLayer(int64_t run, const std::string& layer, const CacheFormat& format);
  // After a layer's commit, its mutex released: once all layers of the run have come here, they are settled.
  void FinishLayer(int64_t run);
  // Throws Error when a newer run has begun; call it with the layer's mutex held.
  void CheckRun(int64_t run, const std::string& layer) const;

 private:
  std::vector<LayerCache*> Layers();
  bool Bound(const std::string& fingerprint, const std::vector<std::string>& layers) const;
  void CheckBytes(const std::string& layer, const CacheFormat& format, int64_t count);
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
