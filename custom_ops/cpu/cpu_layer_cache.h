// A layer cache in the memory of this process.
#pragma once

#include <memory>
#include <vector>

#include "key_guard.h"
#include "kvfuse/kernels.h"
#include "kvfuse/layer_cache.h"
#include "kvfuse/layer_span.h"
#include "kvfuse/page.h"

namespace kvfuse {

class KVFUSE_EXPORT CpuLayerCache final : public LayerCache {
 public:
  explicit CpuLayerCache(const CacheFormat& format) : format_(format) {}
  // From a checked snapshot; see frozen.cc.
  explicit CpuLayerCache(const LayerSnapshot& snapshot);
  CacheDevice& device() const override { return CpuDevice(); }
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
  void CheckTruncate(int64_t length) const override;

  LayerSnapshot Snapshot(bool canonical = false) const override;
  void ReadRow(bool key, int head, int64_t position, float* out) const override;
  double key_error() const override { return guard_.error(); }

 private:
  struct Cut;

  int64_t ExactPageBytes(bool key) const {
    return int64_t{format_.kv_num_heads} * kExactPageTokens * (key ? format_.key.dim : format_.value.dim) * 4;
  }
  int64_t mean_bytes() const { return int64_t{format_.kv_num_heads} * format_.key.dim * 2; }
  const float* ExactRow(bool key, int head, int64_t position) const;
  const float* SinkRow(bool key, int head, int64_t position) const;
  std::vector<uint8_t> StoredRow(bool key, int head, int64_t position) const;
  const float* FloatRow(bool key, int head, int64_t position) const;
  // A row of the low-bit store as floats.
  void DecodeStored(bool key, int head, int64_t position, float* out) const;
  // Writes the low-bit rows of one kv head.
  void EncodeHead(int head);
  // In key_guard.cc: the tokens to look at in this step, and the look at them for one kv head, once it is encoded.
  KeyGuard::Span GuardSpan();
  void GuardHead(const StepArgs& step, const KeyGuard::Span& span, int head);
  // What attention reads between Prepare and Commit.
  CacheView View() const;
  void StoreExact();
  void StoreSinks();
  void RefreshPointers();

  CacheFormat format_;
  LayerSpan span_;
  Rows chunk_key_, chunk_value_;       // of the chunk between Prepare and Commit
  PageRun pages_, means_;              // per kPageTokens tokens; per block
  PageRun exact_keys_, exact_values_;  // per kExactPageTokens tokens
  Page sink_key_, sink_value_;         // [tokens][kv_num_heads][dim]
  KeyGuard guard_;
  // The same pages as plain pointers, for the kernels.
  std::vector<const uint8_t*> page_pointers_;
  std::vector<const uint16_t*> mean_pointers_;
  std::vector<const float*> exact_key_pointers_, exact_value_pointers_;
};

}  // namespace kvfuse
