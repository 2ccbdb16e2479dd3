// A sequence as bytes, independent of kernel and machine, and back.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "cpu_layer_cache.h"
#include "file.h"
#include "json.h"
#include "kvfuse/error.h"
#include "kvfuse/half.h"
#include "kvfuse/sequence.h"
#include "safetensors.h"
#include "snapshot_rows.h"

namespace kvfuse {
namespace {

constexpr char kFormat[] = "kvfuse-state";
constexpr int64_t kFormatVersion = 1;

// The numbers of a layer's format, under the names they are stored by.
struct FormatField {
  const char* name;
  int64_t least;
  int64_t (*get)(const CacheFormat&);
  void (*set)(CacheFormat&, int64_t);
};

const FormatField kFields[] = {
    {"kv_num_heads", 1, [](const CacheFormat& f) -> int64_t { return f.kv_num_heads; },
     [](CacheFormat& f, int64_t v) { f.kv_num_heads = static_cast<int>(v); }},
    {"head_dim", 1, [](const CacheFormat& f) -> int64_t { return f.key.dim; },
     [](CacheFormat& f, int64_t v) { f.key.dim = static_cast<int>(v); }},
    {"value_head_dim", 1, [](const CacheFormat& f) -> int64_t { return f.value.dim; },
     [](CacheFormat& f, int64_t v) { f.value.dim = static_cast<int>(v); }},
    {"key_bits", 4, [](const CacheFormat& f) -> int64_t { return f.key.bits; },
     [](CacheFormat& f, int64_t v) { f.key.bits = static_cast<int>(v); }},
    {"value_bits", 4, [](const CacheFormat& f) -> int64_t { return f.value.bits; },
     [](CacheFormat& f, int64_t v) { f.value.bits = static_cast<int>(v); }},
    {"group_size", 0, [](const CacheFormat& f) -> int64_t { return f.key.group_size; },
     [](CacheFormat& f, int64_t v) { f.key.group_size = f.value.group_size = static_cast<int>(v); }},
    {"full_codes", 0, [](const CacheFormat& f) -> int64_t { return f.key.full; },
     [](CacheFormat& f, int64_t v) { f.key.full = f.value.full = v == 1; }},
    {"rotation", 0, [](const CacheFormat& f) -> int64_t { return f.key.rotate; },
     [](CacheFormat& f, int64_t v) { f.key.rotate = f.value.rotate = v == 1; }},
    {"key_center", 0, [](const CacheFormat& f) -> int64_t { return f.center_keys; },
     [](CacheFormat& f, int64_t v) { f.center_keys = v == 1; }},
    {"n_recent", 0, [](const CacheFormat& f) { return f.n_recent; }, [](CacheFormat& f, int64_t v) { f.n_recent = v; }},
    {"block", 1, [](const CacheFormat& f) { return f.block; }, [](CacheFormat& f, int64_t v) { f.block = v; }},
    {"n_sink", 0, [](const CacheFormat& f) { return f.n_sink; }, [](CacheFormat& f, int64_t v) { f.n_sink = v; }},
    {"window_left", -1, [](const CacheFormat& f) { return f.window_left; },
     [](CacheFormat& f, int64_t v) { f.window_left = v; }},
};

bool In(int64_t value, std::initializer_list<int64_t> allowed) {
  return std::find(allowed.begin(), allowed.end(), value) != allowed.end();
}

CacheFormat ReadFormat(const SafetensorsReader& in, const std::string& prefix) {
  CacheFormat format;
  for (const FormatField& field : kFields) {
    const int64_t value = in.Number(prefix + field.name, field.least);
    const std::string name = field.name;
    const bool known = name == "key_bits" || name == "value_bits"                           ? In(value, {4, 8, 16})
                       : name == "group_size"                                               ? In(value, {0, 32, 64})
                       : name == "full_codes" || name == "rotation" || name == "key_center" ? In(value, {0, 1})
                       : name == "kv_num_heads" || name == "head_dim" || name == "value_head_dim" ? value <= 65536
                                                                                                  : true;
    if (!known) Fail("[state] expected a known value of '", prefix, field.name, "'; found ", value);
    field.set(format, value);
  }
  if (format.center_keys && format.block == 1)
    Fail("[state] expected '", prefix, "block' above 1 with centred keys; found 1");
  return format;
}

template <typename T>
void AddTensor(SafetensorsWriter& out, const std::string& name, const char* dtype, std::vector<int64_t> shape,
               const std::vector<T>& values) {
  out.Add(name, dtype, std::move(shape), values.data(), values.size() * sizeof(T));
}

template <typename T>
void CopyTensor(const SafetensorsReader& in, const std::string& name, const char* dtype,
                const std::vector<int64_t>& shape, std::vector<T>& values) {
  const std::string_view bytes = in.Tensor(name, dtype, shape).bytes;
  values.resize(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
}

// A scale of a group is stored as f32 and kept as half: it has to be one.
void CheckHalves(const std::string& name, const SideFormat& side, const std::vector<float>& scales) {
  if (side.group_size == 0) return;
  for (const float scale : scales)
    if (scale == scale && HalfToFloat(FloatToHalf(scale)) != scale)
      Fail("[state] expected half-precision scales in '", name, "'; found ", scale);
}

void WriteLayer(SafetensorsWriter& out, const std::string& prefix, const LayerSnapshot& s) {
  for (const FormatField& field : kFields) out.SetMetadata(prefix + field.name, std::to_string(field.get(s.format)));
  out.SetMetadata(prefix + "begin", std::to_string(s.begin));
  out.SetMetadata(prefix + "encoded_end", std::to_string(s.encoded_end));
  out.SetMetadata(prefix + "exact_begin", std::to_string(s.exact_begin));
  const SnapshotSizes n(s);
  const SideFormat &key = s.format.key, &value = s.format.value;
  AddTensor(out, prefix + "key_codes", "U8", {n.heads, n.encoded, key.code_bytes()}, s.key_codes);
  AddTensor(out, prefix + "key_scales", "F32", {n.heads, n.encoded, key.groups()}, s.key_scales);
  AddTensor(out, prefix + "value_codes", "U8", {n.heads, n.encoded, value.code_bytes()}, s.value_codes);
  AddTensor(out, prefix + "value_scales", "F32", {n.heads, n.encoded, value.groups()}, s.value_scales);
  if (s.format.centered()) {
    std::vector<uint16_t> halves;
    for (const float mean : s.key_means) halves.push_back(FloatToHalf(mean));
    AddTensor(out, prefix + "key_means", "F16", {n.heads, n.blocks, key.dim}, halves);
  }
  AddTensor(out, prefix + "exact_key", "F32", {n.heads, n.exact, key.dim}, s.exact_key);
  AddTensor(out, prefix + "exact_value", "F32", {n.heads, n.exact, value.dim}, s.exact_value);
  AddTensor(out, prefix + "sink_key", "F32", {n.heads, n.sinks, key.dim}, s.sink_key);
  AddTensor(out, prefix + "sink_value", "F32", {n.heads, n.sinks, value.dim}, s.sink_value);
}

// What a layer of this format and length can hold; anything else would be read out of bounds later.
void CheckExtents(const std::string& prefix, const LayerSnapshot& s) {
  const CacheFormat& f = s.format;
  const bool ordered =
      s.begin % kPageTokens == 0 && s.begin <= s.encoded_end && s.encoded_end <= s.length && s.exact_begin <= s.length;
  const bool complete = s.exact_begin <= s.encoded_end && s.encoded_end >= f.EncodedEnd(s.length) &&
                        s.encoded_end <= std::max(f.EncodedEnd(s.length), s.exact_begin);
  const bool windowed = s.begin == 0 || (f.window_left >= 0 && s.begin <= s.length - f.window_left);
  const bool exact = f.has_exact_window() || s.exact_begin == s.length;
  if (!ordered || !complete || !windowed || !exact)
    Fail("[state] expected '", prefix, "begin', 'encoded_end' and 'exact_begin' that fit length ", s.length, "; found ",
         s.begin, ", ", s.encoded_end, " and ", s.exact_begin);
}

LayerSnapshot ParseLayer(const SafetensorsReader& in, const std::string& prefix, int64_t length) {
  LayerSnapshot s;
  s.format = ReadFormat(in, prefix);
  s.length = length;
  s.begin = in.Number(prefix + "begin");
  s.encoded_end = in.Number(prefix + "encoded_end");
  s.exact_begin = in.Number(prefix + "exact_begin");
  CheckExtents(prefix, s);
  const SnapshotSizes n(s);
  const SideFormat &key = s.format.key, &value = s.format.value;
  CopyTensor(in, prefix + "key_codes", "U8", {n.heads, n.encoded, key.code_bytes()}, s.key_codes);
  CopyTensor(in, prefix + "key_scales", "F32", {n.heads, n.encoded, key.groups()}, s.key_scales);
  CopyTensor(in, prefix + "value_codes", "U8", {n.heads, n.encoded, value.code_bytes()}, s.value_codes);
  CopyTensor(in, prefix + "value_scales", "F32", {n.heads, n.encoded, value.groups()}, s.value_scales);
  CheckHalves(prefix + "key_scales", key, s.key_scales);
  CheckHalves(prefix + "value_scales", value, s.value_scales);
  if (s.format.centered()) {
    std::vector<uint16_t> halves;
    CopyTensor(in, prefix + "key_means", "F16", {n.heads, n.blocks, key.dim}, halves);
    for (const uint16_t half : halves) s.key_means.push_back(HalfToFloat(half));
  }
  CopyTensor(in, prefix + "exact_key", "F32", {n.heads, n.exact, key.dim}, s.exact_key);
  CopyTensor(in, prefix + "exact_value", "F32", {n.heads, n.exact, value.dim}, s.exact_value);
  CopyTensor(in, prefix + "sink_key", "F32", {n.heads, n.sinks, key.dim}, s.sink_key);
  CopyTensor(in, prefix + "sink_value", "F32", {n.heads, n.sinks, value.dim}, s.sink_value);
  return s;
}

}  // namespace

std::string Sequence::Freeze() {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t length = LengthLocked();
  if (length > 0 && layer_names_.empty())
    Fail("[sequence ", id_, "] expected a model whose KvCacheBegin lists its layers; found none listed");
  SafetensorsWriter out;
  out.SetMetadata("format", kFormat);
  out.SetMetadata("format_version", std::to_string(kFormatVersion));
  out.SetMetadata("fingerprint", fingerprint_);
  out.SetMetadata("length", std::to_string(length));
  out.SetMetadata("layers", std::to_string(length == 0 ? 0 : layer_names_.size()));
  int64_t position = 0;
  for (const std::string& name : layer_names_) {
    if (length == 0) break;
    LayerCache& layer = *layers_.at(name);
    std::unique_lock<std::mutex> layer_lock(layer.mutex);
    std::shared_ptr<LayerCache> copy = layer.Fork();
    layer_lock.unlock();
    copy->Truncate(length);  // a run under way is not part of it
    const std::string prefix = std::to_string(position++) + ".";
    out.SetMetadata(prefix + "layer", name);
    WriteLayer(out, prefix, copy->Snapshot(true));
  }
  return out.Finish();
}

void Sequence::Unfreeze(std::string_view bytes) {
  const SafetensorsReader in(bytes);
  if (in.Metadata("format") != kFormat)
    Fail("[state] expected the format '", kFormat, "'; found '", Shown(in.Metadata("format")), "'");
  if (in.Number("format_version") != kFormatVersion)
    Fail("[state] expected format_version ", kFormatVersion, "; found ", Shown(in.Metadata("format_version")));
  const int64_t length = in.Number("length"), count = in.Number("layers");
  if ((length == 0) != (count == 0))
    Fail("[state] expected layers exactly when there are tokens; found ", count, " layers and length ", length);
  // Besides the fields of WriteLayer: the layer's key and its three extents, and what the file says of itself.
  constexpr size_t kLayerTensors = 8, kLayerFields = std::size(kFields) + 4, kFileFields = 6;
  size_t tensors = 0;
  std::vector<std::string> names;
  std::map<std::string, std::shared_ptr<LayerCache>> layers;
  for (int64_t i = 0; i < count; ++i) {
    const std::string prefix = std::to_string(i) + ".";
    const std::string& name = in.Metadata(prefix + "layer");
    if (!layers.emplace(name, std::make_shared<CpuLayerCache>(ParseLayer(in, prefix, length))).second)
      Fail("[state] expected each layer once; found '", Shown(name), "' twice");
    names.push_back(name);
    tensors += layers.at(name)->format().centered() ? kLayerTensors + 1 : kLayerTensors;
  }
  if (in.tensor_count() != tensors || in.metadata().size() != kFileFields + count * kLayerFields)
    Fail("[state] expected ", tensors, " tensors and ", kFileFields + count * kLayerFields, " fields for ", count,
         " layers; found ", in.tensor_count(), " and ", in.metadata().size());
  std::lock_guard<std::mutex> lock(mutex_);
  fingerprint_ = in.Metadata("fingerprint");
  layer_names_ = std::move(names);
  layers_ = std::move(layers);
}

void SaveSequence(Sequence& sequence, const std::string& path) { WriteFile(path, sequence.Freeze()); }

std::shared_ptr<Sequence> LoadSequence(const std::string& path) {
  return SequenceTable::Global().Unfreeze(ReadFile(path));
}

CpuLayerCache::CpuLayerCache(const LayerSnapshot& s) : format_(s.format) {
  span_.length = s.length;
  span_.encoded_end = s.encoded_end;
  span_.pages_begin = s.begin;
  span_.exact_begin = s.exact_begin;
  const SnapshotSizes n(s);
  for (int64_t j = s.begin; j < s.encoded_end; ++j) {
    uint8_t* page = pages_.Writable(j / kPageTokens, format_.page_bytes());
    for (const bool key : {true, false})
      for (int head = 0; head < n.heads; ++head) {
        const SideFormat& side = key ? format_.key : format_.value;
        const std::vector<uint8_t> row =
            CanonicalRow(side, key ? s.key_codes : s.value_codes, key ? s.key_scales : s.value_scales,
                         head * n.encoded + (j - s.begin));
        Kernels().store_row(side, key, page + format_.side_offset(key, head), static_cast<int>(j % kPageTokens),
                            row.data());
      }
  }
  for (int64_t b = 0; format_.centered() && b < n.blocks; ++b) {
    auto* mean = reinterpret_cast<uint16_t*>(means_.Writable(s.begin / format_.block + b, mean_bytes()));
    for (int64_t head = 0; head < n.heads; ++head)
      for (int64_t i = 0; i < format_.key.dim; ++i)
        mean[head * format_.key.dim + i] = FloatToHalf(s.key_means[(head * n.blocks + b) * format_.key.dim + i]);
  }
  for (const bool key : {true, false}) {
    const int64_t dim = key ? format_.key.dim : format_.value.dim;
    const std::vector<float>& exact = key ? s.exact_key : s.exact_value;
    const std::vector<float>& sink = key ? s.sink_key : s.sink_value;
    for (int64_t j = s.exact_begin; j < s.length; ++j) {
      auto* page = reinterpret_cast<float*>(
          (key ? exact_keys_ : exact_values_).Writable(j / kExactPageTokens, ExactPageBytes(key)));
      for (int64_t head = 0; head < n.heads; ++head)
        std::memcpy(page + (head * kExactPageTokens + j % kExactPageTokens) * dim,
                    exact.data() + (head * n.exact + (j - s.exact_begin)) * dim, dim * sizeof(float));
    }
    if (n.sinks == 0) continue;
    Page& page = key ? sink_key_ : sink_value_;
    page = Page::Make(n.sinks * n.heads * dim * 4);
    for (int64_t j = 0; j < n.sinks; ++j)
      for (int64_t head = 0; head < n.heads; ++head)
        std::memcpy(page.data() + (j * n.heads + head) * dim * 4, sink.data() + (head * n.sinks + j) * dim, dim * 4);
  }
}

}  // namespace kvfuse
