// A device's layer cache read back, and made from what another one held.
#include <algorithm>
#include <cstring>

#include "cpu/snapshot_rows.h"
#include "device/layer_cache.h"

namespace kvfuse {

const uint8_t* DeviceLayerCache::Read(HostCopy& copy, const DevicePool& pool, const SlotRun& run,
                                      int64_t number) const {
  if (copy.number != number) {
    copy.number = -1;
    copy.bytes.resize(pool.slot_bytes());
    std::lock_guard<std::mutex> lock(memory_->mutex);
    context_.device().Download(copy.bytes.data(), *pool.buffer(), run[number] * pool.slot_bytes(), pool.slot_bytes());
    copy.number = number;
  }
  return copy.bytes.data();
}

const uint8_t* DeviceLayerCache::ReadPage(int64_t number) const { return Read(read_page_, memory_->low, low_, number); }

const float* DeviceLayerCache::ReadExact(int64_t number) const {
  return reinterpret_cast<const float*>(Read(read_exact_, memory_->exact, exact_, number));
}

const uint16_t* DeviceLayerCache::ReadMean(int64_t number) const {
  return reinterpret_cast<const uint16_t*>(Read(read_mean_, memory_->means, means_, number));
}

const float* DeviceLayerCache::ReadSinks() const {
  if (read_sinks_.number < 0) {
    read_sinks_.bytes.resize(sink_floats(sink_capacity_) * 4);
    context_.device().Download(read_sinks_.bytes.data(), *sinks_, 0, static_cast<int64_t>(read_sinks_.bytes.size()));
    read_sinks_.number = 0;
  }
  return reinterpret_cast<const float*>(read_sinks_.bytes.data());
}

void DeviceLayerCache::ReadRow(bool key, int head, int64_t position, float* out) const {
  const SideFormat& side = key ? format_.key : format_.value;
  if (position < format_.n_sink) {
    const float* row = ReadSinks() + layout_.SinkRow(format_.kv_num_heads, sink_capacity_, key, head, position);
    std::copy(row, row + side.dim, out);
  } else if (position >= span_.exact_begin) {
    const float* row =
        ReadExact(position / kExactPageTokens) + layout_.ExactRow(format_.kv_num_heads, key, head, position);
    std::copy(row, row + side.dim, out);
  } else if (position < span_.pages_begin) {
    std::fill(out, out + side.dim, 0.0f);  // a sliding window has freed it: no query sees it any more
  } else {
    std::vector<uint8_t> row(side.row_bytes());
    layout_.LoadRow(side, key, ReadPage(position / kPageTokens) + int64_t{head} * layout_.head_bytes,
                    static_cast<int>(position % kPageTokens), row.data());
    const bool centered = key && format_.centered();
    DecodeRow(side, row.data(), centered ? ReadMean(position / format_.block) + int64_t{head} * side.dim : nullptr,
              out);
  }
}

LayerSnapshot DeviceLayerCache::Snapshot(bool canonical) const {
  LayerSnapshot shot;
  shot.format = format_;
  shot.length = span_.length;
  shot.begin = span_.pages_begin;
  shot.encoded_end = span_.encoded_end;
  shot.exact_begin = span_.exact_begin;
  // Without the slack, which depends on how the tokens came.
  if (canonical) shot.exact_begin = std::max(span_.exact_begin, format_.WindowBegin(span_.length));
  const SnapshotSizes n(shot);
  for (const bool key : {true, false}) {
    const SideFormat& side = key ? format_.key : format_.value;
    std::vector<uint8_t>& codes = key ? shot.key_codes : shot.value_codes;
    std::vector<float>& scales = key ? shot.key_scales : shot.value_scales;
    codes.resize(n.heads * n.encoded * side.code_bytes());
    scales.resize(n.heads * n.encoded * side.groups());
    std::vector<float>& exact = key ? shot.exact_key : shot.exact_value;
    std::vector<float>& sinks = key ? shot.sink_key : shot.sink_value;
    exact.resize(n.heads * n.exact * side.dim);
    sinks.resize(n.heads * n.sinks * side.dim);
    std::vector<uint8_t> row(side.row_bytes());
    // Page by page, since each is one download.
    for (int64_t j = shot.begin; j < shot.encoded_end; ++j)
      for (int head = 0; head < format_.kv_num_heads; ++head) {
        layout_.LoadRow(side, key, ReadPage(j / kPageTokens) + int64_t{head} * layout_.head_bytes,
                        static_cast<int>(j % kPageTokens), row.data());
        const int64_t index = head * n.encoded + j - shot.begin;
        std::memcpy(codes.data() + index * side.code_bytes(), row.data(), side.code_bytes());
        for (int g = 0; g < side.groups(); ++g)
          scales[index * side.groups() + g] = reference::ScaleOf(side, row.data() + side.code_bytes(), g);
      }
    for (int64_t j = shot.exact_begin; j < shot.length; ++j)
      for (int head = 0; head < format_.kv_num_heads; ++head) {
        const float* from = ReadExact(j / kExactPageTokens) + layout_.ExactRow(format_.kv_num_heads, key, head, j);
        std::copy(from, from + side.dim, exact.data() + (head * n.exact + j - shot.exact_begin) * side.dim);
      }
    for (int64_t j = 0; j < n.sinks; ++j)
      for (int head = 0; head < format_.kv_num_heads; ++head) {
        const float* from = ReadSinks() + layout_.SinkRow(format_.kv_num_heads, sink_capacity_, key, head, j);
        std::copy(from, from + side.dim, sinks.data() + (head * n.sinks + j) * side.dim);
      }
  }
  if (!format_.centered()) return shot;
  shot.key_means.resize(n.heads * n.blocks * format_.key.dim);
  for (int64_t b = 0; b < n.blocks; ++b)
    for (int64_t head = 0; head < n.heads; ++head) {
      const uint16_t* mean = ReadMean(shot.begin / format_.block + b) + head * format_.key.dim;
      float* to = shot.key_means.data() + (head * n.blocks + b) * format_.key.dim;
      for (int i = 0; i < format_.key.dim; ++i) to[i] = HalfToFloat(mean[i]);
    }
  return shot;
}

DeviceLayerCache::DeviceLayerCache(DeviceContext& context, const LayerSnapshot& s)
    : DeviceLayerCache(context, s.format) {
  span_.length = s.length;
  span_.encoded_end = s.encoded_end;
  span_.pages_begin = s.begin;
  span_.exact_begin = s.exact_begin;
  const SnapshotSizes n(s);
  Device& to = context_.device();
  std::lock_guard<std::mutex> lock(memory_->mutex);

  std::vector<uint8_t> page(layout_.page_bytes);
  for (int64_t number = s.begin / kPageTokens; number < CeilDiv(s.encoded_end, kPageTokens); ++number) {
    std::fill(page.begin(), page.end(), uint8_t{0});
    for (int64_t j = number * kPageTokens; j < std::min(s.encoded_end, (number + 1) * kPageTokens); ++j)
      for (const bool key : {true, false})
        for (int64_t head = 0; head < n.heads; ++head) {
          const SideFormat& side = key ? format_.key : format_.value;
          const std::vector<uint8_t> row =
              CanonicalRow(side, key ? s.key_codes : s.value_codes, key ? s.key_scales : s.value_scales,
                           head * n.encoded + (j - s.begin));
          layout_.StoreRow(side, key, page.data() + head * layout_.head_bytes, static_cast<int>(j % kPageTokens),
                           row.data());
        }
    low_.MakeWritable(memory_->low, number);
    to.Upload(*memory_->low.buffer(), low_[number] * layout_.page_bytes, page.data(), layout_.page_bytes);
  }

  std::vector<uint16_t> means(n.heads * format_.key.dim);
  for (int64_t b = 0; format_.centered() && b < n.blocks; ++b) {
    for (int64_t head = 0; head < n.heads; ++head)
      for (int i = 0; i < format_.key.dim; ++i)
        means[head * format_.key.dim + i] = FloatToHalf(s.key_means[(head * n.blocks + b) * format_.key.dim + i]);
    const int64_t number = s.begin / format_.block + b;
    means_.MakeWritable(memory_->means, number);
    to.Upload(*memory_->means.buffer(), means_[number] * layout_.mean_bytes, means.data(), layout_.mean_bytes);
  }

  std::vector<float> exact(layout_.exact_floats);
  for (int64_t j = s.exact_begin; j < s.length; ++j) {
    for (const bool key : {true, false})
      for (int head = 0; head < format_.kv_num_heads; ++head) {
        const int64_t dim = key ? format_.key.dim : format_.value.dim;
        const std::vector<float>& rows = key ? s.exact_key : s.exact_value;
        const float* from = rows.data() + (head * n.exact + (j - s.exact_begin)) * dim;
        std::copy(from, from + dim, exact.data() + layout_.ExactRow(format_.kv_num_heads, key, head, j));
      }
    const int64_t number = j / kExactPageTokens;
    if (j + 1 < s.length && (j + 1) % kExactPageTokens != 0) continue;
    exact_.MakeWritable(memory_->exact, number);
    const int64_t bytes = memory_->exact.slot_bytes();
    to.Upload(*memory_->exact.buffer(), exact_[number] * bytes, exact.data(), bytes);
    std::fill(exact.begin(), exact.end(), 0.0f);
  }

  if (n.sinks == 0) return;
  sink_capacity_ = n.sinks;
  std::vector<float> sinks(sink_floats(sink_capacity_));
  for (const bool key : {true, false})
    for (int64_t j = 0; j < n.sinks; ++j)
      for (int head = 0; head < format_.kv_num_heads; ++head) {
        const int64_t dim = key ? format_.key.dim : format_.value.dim;
        const float* from = (key ? s.sink_key : s.sink_value).data() + (head * n.sinks + j) * dim;
        std::copy(from, from + dim, sinks.data() + layout_.SinkRow(format_.kv_num_heads, sink_capacity_, key, head, j));
      }
  sinks_ = to.Allocate(static_cast<int64_t>(sinks.size()) * 4);
  to.Upload(*sinks_, 0, sinks.data(), static_cast<int64_t>(sinks.size()) * 4);
}

}  // namespace kvfuse
