// K and V of one layer of one sequence, and the memory that holds them: who owns the bytes, on which device.
//
// A layer cache is addressed by position. A run writes at its past length and commits at the end, so a run
// that fails in between leaves nothing torn: what lies beyond the committed length is not there.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "kvfuse/export.h"
#include "kvfuse/format.h"
#include "kvfuse/rows.h"

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

// Attention of one chunk of one sequence over the cache that the chunk is being added to.
struct StepArgs {
  Rows query;  // head 0 .. num_heads - 1, token 0 .. sequence_length - 1 at positions past + token
  float* output = nullptr;
  ptrdiff_t output_head_stride = 0, output_token_stride = 0;
  int num_heads = 0;
  int64_t sequence_length = 0;
  float scale = 1.0f, softcap = 0.0f;
  bool causal = false;
  const uint8_t* padding = nullptr;  // [total], 0 = not attended; null: all attended
  const float* bias = nullptr;       // null: none
  ptrdiff_t bias_head_stride = 0, bias_query_stride = 0, bias_key_stride = 0;
  const float* head_sink = nullptr;  // [num_heads], null: none
  bool guard = false;                // look at what the first low-bit keys do to the output, see key_error
};

// One stage of a step: the pieces 0 .. pieces - 1 may run at once, on any threads.
struct Phase {
  size_t pieces = 0;
  std::function<void(size_t)> run;
  bool small = false;  // all pieces together take less time than waking another thread
};

// A layer whose key_error is above this is known to fail. The default format gives 0.001-0.15 on real models; layers
// that need 8-bit keys to keep their text give 0.3 and more (docs/quality-auto.md).
constexpr double kKeyErrorLimit = 0.25;

class LayerCache;

// Where layer caches live: makes empty ones, and takes over the state of others.
class CacheDevice {
 public:
  virtual ~CacheDevice() = default;
  virtual std::shared_ptr<LayerCache> Make(const CacheFormat& format) = 0;
  virtual std::shared_ptr<LayerCache> Adopt(const LayerSnapshot& snapshot) = 0;
};

// The memory of this process, and the CPU's kernels.
KVFUSE_EXPORT CacheDevice& CpuDevice();

// K and V of one layer of one sequence. Not synchronized: callers hold `mutex`.
class KVFUSE_EXPORT LayerCache {
 public:
  virtual ~LayerCache() = default;
  virtual CacheDevice& device() const = 0;
  // The same committed tokens, sharing all pages; an unsettled chunk is part of them.
  virtual std::shared_ptr<LayerCache> Fork() const = 0;

  std::mutex mutex;

  virtual const CacheFormat& format() const = 0;
  virtual int64_t length() const = 0;
  virtual int64_t exact_begin() const = 0;  // exact rows are held from here on
  virtual int64_t nbytes() const = 0;
  // New page bytes that a chunk of `count` tokens takes.
  virtual int64_t GrowthBytes(int64_t count) const = 0;

  // A chunk in three steps. Prepare allocates all memory and copies what stays exact (may throw; nothing
  // visible changes); the phases of Step, run one after another, write the chunk's low-bit rows and attend over cache
  // and chunk (key, value and `args` must live until then); Commit makes the chunk part of the cache (never throws).
  // Until Settle the chunk can be dropped again without a trace, as when the run fails in a later layer; Settle frees
  // what no later query sees, the slack apart (never throws).
  virtual void Prepare(int64_t past, int64_t count, const Rows& key, const Rows& value) = 0;
  virtual std::vector<Phase> Step(const StepArgs& args) = 0;
  virtual void Commit() = 0;
  virtual void Settle() = 0;

  // Drops tokens from `length` on. CheckTruncate throws Error when a sliding window has freed what is needed then.
  virtual void Truncate(int64_t length) = 0;
  virtual void CheckTruncate(int64_t length) const = 0;

  // Canonical: what any run over the same tokens holds; otherwise with the slack as it is.
  virtual LayerSnapshot Snapshot(bool canonical = false) const = 0;
  // One row as floats: exact where it is held exactly, else decoded; zeros where a sliding window has freed it.
  virtual void ReadRow(bool key, int head, int64_t position, float* out) const = 0;
  // The relative error that low-bit keys make in the attention's output, from a look at the first ones of the
  // sequence; NaN when there was none (yet, or on a device that does not look).
  virtual double key_error() const { return std::numeric_limits<double>::quiet_NaN(); }
};

}  // namespace kvfuse
