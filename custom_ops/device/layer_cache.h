// A layer cache in the memory of a device: metal/kernels.metal writes and reads it, this class keeps the books.
//
// A step is one upload (the new rows, the query, masks), three launches (append, attend, merge) and one download. What
// is cached stays where it is: pages in pools that the forks of a layer share, and a table of page numbers, of which
// only changed entries are uploaded.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/layout.h"
#include "device/pool.h"
#include "kvfuse/layer_cache.h"
#include "kvfuse/layer_span.h"

namespace kvfuse {

struct DeviceOptions {
  bool simd = true;  // four codes a word in the integer dots, or one at a time
  int splits = 0;    // of the tokens, for tests; 0: as many as fill the device
};

// Layer caches on a device; the same object for the same device and options, kept for the life of the process.
KVFUSE_EXPORT CacheDevice& DeviceCaches(Device& device, const DeviceOptions& options = {});

// Buffers of one step, used again by later ones: `host` is what goes up to `staging`.
struct DeviceWorkspace {
  std::vector<uint8_t> host;
  std::shared_ptr<DeviceBuffer> staging, scratch;
};

// A device with its options, and the workspaces that no step uses now.
class DeviceContext final : public CacheDevice {
 public:
  DeviceContext(Device& device, const DeviceOptions& options) : device_(device), options_(options) {}
  std::shared_ptr<LayerCache> Make(const CacheFormat& format) override;
  std::shared_ptr<LayerCache> Adopt(const LayerSnapshot& snapshot) override;

  Device& device() const { return device_; }
  const DeviceOptions& options() const { return options_; }
  DeviceWorkspace TakeWorkspace(int64_t staging_bytes, int64_t scratch_bytes);
  void ReturnWorkspace(DeviceWorkspace workspace);

 private:
  Device& device_;
  const DeviceOptions options_;
  std::mutex mutex_;
  std::vector<DeviceWorkspace> idle_;
};

// What the forks of a layer share. Who changes a pool, or launches kernels on its buffer, holds the mutex.
struct DeviceMemory {
  DeviceMemory(Device& device, const DeviceLayout& layout)
      : low(device, layout.page_bytes),
        exact(device, int64_t{layout.exact_floats} * 4),
        means(device, layout.mean_bytes) {}

  std::mutex mutex;
  DevicePool low, exact, means;
};

// The device's copy of page numbers: a section for each run of pages.
class DeviceTable {
 public:
  // Makes the device's copy what the runs say, in one upload of what differs.
  void Sync(Device& device, const SlotRun& low, const SlotRun& exact, const SlotRun& means);
  Dispatch::Argument argument() const {
    Dispatch::Argument argument;
    argument.buffer = buffer_.get();
    return argument;
  }
  // To add to a page's number for its entry.
  int offset(int section) const { return static_cast<int>(sections_[section].at - sections_[section].base); }

 private:
  struct Section {
    int64_t at = 0, base = 0, capacity = 0;  // first entry, the page it is for, entries
  };

  std::shared_ptr<DeviceBuffer> buffer_;
  std::vector<int32_t> held_;
  Section sections_[3];
};

class KVFUSE_EXPORT DeviceLayerCache final : public LayerCache {
 public:
  DeviceLayerCache(DeviceContext& context, const CacheFormat& format);
  // From a checked snapshot.
  DeviceLayerCache(DeviceContext& context, const LayerSnapshot& snapshot);
  ~DeviceLayerCache() override;
  CacheDevice& device() const override { return context_; }
  std::shared_ptr<LayerCache> Fork() const override;

  const CacheFormat& format() const override { return format_; }
  int64_t length() const override { return span_.length; }
  int64_t exact_begin() const override { return span_.exact_begin; }
  int64_t nbytes() const override;
  int64_t GrowthBytes(int64_t count) const override;

  void Prepare(int64_t past, int64_t count, const Rows& key, const Rows& value) override;
  std::vector<Phase> Step(const StepArgs& args) override;
  void Commit() override;
  void Settle() override;

  void Truncate(int64_t length) override;
  void CheckTruncate(int64_t length) const override { span_.CheckTruncate(format_, length); }

  LayerSnapshot Snapshot(bool canonical = false) const override;
  void ReadRow(bool key, int head, int64_t position, float* out) const override;

  // For benchmarks: seconds of this step's kernels, queued again and again; between Prepare and Commit.
  double TimeStep(const StepArgs& args, int repeats);
  // For tests: the int32 dots [kv heads][tokens * heads per kv head][encoded][key groups] of queries with the tokens of
  // the low-bit store (no sliding window), as attention computes them. The cache stays as it is.
  std::vector<int32_t> IntegerScores(const Rows& query, int num_heads, int64_t sequence_length);

 private:
  struct Launch;  // step.cc

  int64_t sink_floats(int64_t capacity) const {
    return capacity * format_.kv_num_heads * (layout_.key.pitch + layout_.value.pitch);
  }
  int64_t sinks_held(int64_t length) const { return std::min(format_.n_sink, length); }
  void GrowSinks(int64_t tokens);
  void Run(const StepArgs& args);
  void Plan(const StepArgs& args, Launch& launch);
  void Queue(Launch& launch);
  kvfuse_abi::Cache CacheArgs() const;
  // The bytes of a low-bit page, of an exact page, of the sinks, of a mean; kept until the cache changes.
  const uint8_t* ReadPage(int64_t number) const;
  const float* ReadExact(int64_t number) const;
  const float* ReadSinks() const;
  const uint16_t* ReadMean(int64_t number) const;
  void Forget() const;

  DeviceContext& context_;
  const CacheFormat format_;
  const DeviceLayout layout_;
  std::shared_ptr<DeviceMemory> memory_;
  LayerSpan span_;
  SlotRun low_, exact_, means_;          // per kPageTokens tokens; per kExactPageTokens tokens; per block
  std::shared_ptr<DeviceBuffer> sinks_;  // shared with forks until it is written
  int64_t sink_capacity_ = 0;
  Rows chunk_key_, chunk_value_;
  DeviceTable table_;

  struct HostCopy {
    int64_t number = -1;
    std::vector<uint8_t> bytes;
  };
  const uint8_t* Read(HostCopy& copy, const DevicePool& pool, const SlotRun& run, int64_t number) const;
  mutable HostCopy read_page_, read_exact_, read_mean_, read_sinks_;
};

}  // namespace kvfuse
