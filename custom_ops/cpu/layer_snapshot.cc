// Reading a layer cache back: its canonical bytes, and its rows as floats.
#include <algorithm>
#include <cstring>

#include "cpu_layer_cache.h"
#include "snapshot_rows.h"

namespace kvfuse {
namespace {

struct SideOut {
  std::vector<uint8_t>* codes;
  std::vector<float>* scales;
};

void CopySide(const SideFormat& side, const uint8_t* row, const SideOut& out) {
  out.codes->insert(out.codes->end(), row, row + side.code_bytes());
  for (int g = 0; g < side.groups(); ++g) out.scales->push_back(reference::ScaleOf(side, row + side.code_bytes(), g));
}

}  // namespace

// The canonical bytes of one row: codes, then scales.
std::vector<uint8_t> CpuLayerCache::StoredRow(bool key, int head, int64_t position) const {
  const SideFormat& side = key ? format_.key : format_.value;
  std::vector<uint8_t> row(side.row_bytes());
  Kernels().load_row(side, key, pages_[position / kPageTokens].data() + format_.side_offset(key, head),
                     static_cast<int>(position % kPageTokens), row.data());
  return row;
}

void CpuLayerCache::ReadRow(bool key, int head, int64_t position, float* out) const {
  const SideFormat& side = key ? format_.key : format_.value;
  if (position < format_.n_sink || position >= span_.exact_begin) {
    const float* row = position < format_.n_sink ? SinkRow(key, head, position) : ExactRow(key, head, position);
    std::copy(row, row + side.dim, out);
  } else if (position < span_.pages_begin) {
    std::fill(out, out + side.dim, 0.0f);  // a sliding window has freed it: no query sees it any more
  } else {
    DecodeStored(key, head, position, out);
  }
}

void CpuLayerCache::DecodeStored(bool key, int head, int64_t position, float* out) const {
  const SideFormat& side = key ? format_.key : format_.value;
  const uint16_t* mean = nullptr;
  if (key && format_.centered())
    mean = reinterpret_cast<const uint16_t*>(means_[position / format_.block].data()) + int64_t{head} * side.dim;
  DecodeRow(side, StoredRow(key, head, position).data(), mean, out);
}

LayerSnapshot CpuLayerCache::Snapshot(bool canonical) const {
  LayerSnapshot shot;
  shot.format = format_;
  shot.length = span_.length;
  shot.begin = span_.pages_begin;
  shot.encoded_end = span_.encoded_end;
  shot.exact_begin = span_.exact_begin;
  // Without the slack, which depends on how the tokens came.
  if (canonical) shot.exact_begin = std::max(span_.exact_begin, format_.WindowBegin(span_.length));
  const int64_t sinks = std::min(format_.n_sink, span_.length);
  for (int head = 0; head < format_.kv_num_heads; ++head) {
    for (int64_t j = span_.pages_begin; j < span_.encoded_end; ++j) {
      CopySide(format_.key, StoredRow(true, head, j).data(), {&shot.key_codes, &shot.key_scales});
      CopySide(format_.value, StoredRow(false, head, j).data(), {&shot.value_codes, &shot.value_scales});
    }
    if (format_.centered())
      for (int64_t b = span_.pages_begin / format_.block; b < (span_.encoded_end + format_.block - 1) / format_.block;
           ++b) {
        const auto* mean = reinterpret_cast<const uint16_t*>(means_[b].data()) + int64_t{head} * format_.key.dim;
        for (int i = 0; i < format_.key.dim; ++i) shot.key_means.push_back(HalfToFloat(mean[i]));
      }
    for (const bool key : {true, false}) {
      const int dim = key ? format_.key.dim : format_.value.dim;
      const auto append = [dim](std::vector<float>& rows, const float* row) {
        rows.insert(rows.end(), row, row + dim);
      };
      for (int64_t j = shot.exact_begin; j < span_.length; ++j)
        append(key ? shot.exact_key : shot.exact_value, ExactRow(key, head, j));
      for (int64_t j = 0; j < sinks; ++j) append(key ? shot.sink_key : shot.sink_value, SinkRow(key, head, j));
    }
  }
  return shot;
}

}  // namespace kvfuse
