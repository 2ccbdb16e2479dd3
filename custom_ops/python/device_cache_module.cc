// Single layer caches for Python, on the CPU or on a device: for tests and benchmarks. No logic here.
#include "python/device_cache_module.h"

#include <pybind11/stl.h>

#include <optional>

#include "device/layer_cache.h"
#include "kvfuse/error.h"
#include "python/arrays.h"

namespace py = pybind11;
using kvfuse::CacheDevice;
using kvfuse::LayerCache;

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

CacheDevice& DeviceNamed(const std::string& name, bool simd, int splits) {
  if (name == "cpu") return kvfuse::CpuDevice();
  return kvfuse::DeviceCaches(kvfuse::GetDevice(name), {simd, splits});
}

struct PyLayerCache {
  std::shared_ptr<LayerCache> cache;
};

PyLayerCache Make(const std::string& device, int kv_num_heads, int head_dim, int value_dim, int key_bits,
                  int value_bits, int group_size, const std::string& codes, const std::string& rotation,
                  int64_t n_recent, int64_t block, int64_t n_sink, int64_t window_left, const std::string& key_center,
                  bool simd, int splits) {
  kvfuse::CacheFormat format;
  format.kv_num_heads = kv_num_heads;
  format.key = {head_dim, key_bits, group_size, codes == "full", rotation == "hadamard"};
  format.value = {value_dim, value_bits, group_size, codes == "full", rotation == "hadamard"};
  format.n_recent = n_recent;
  format.block = block;
  format.n_sink = n_sink;
  format.window_left = window_left;
  format.center_keys = key_center == "block";
  return {DeviceNamed(device, simd, splits).Make(format)};
}

void CheckShape(const char* name, const Floats& array, std::vector<py::ssize_t> shape) {
  if (std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()) != shape)
    kvfuse::Fail("[layer cache] expected ", name, " of the other arguments' shape; found another");
}

kvfuse::Rows RowsOf(const Floats& array) { return {array.data(), array.shape(1) * array.shape(2), array.shape(2)}; }

// Output [H, S, V] of query [H, S, D] with new key [K, S, D] and value [K, S, V]; padding [total], bias [H, S, total].
py::array_t<float> Step(PyLayerCache& self, const Floats& query, const Floats& key, const Floats& value, float scale,
                        bool causal, float softcap, std::optional<py::array_t<uint8_t, py::array::c_style>> padding,
                        std::optional<Floats> bias, std::optional<Floats> head_sink, bool commit, bool settle) {
  LayerCache& cache = *self.cache;
  const kvfuse::CacheFormat& format = cache.format();
  if (query.ndim() != 3) kvfuse::Fail("[layer cache] expected query of 3 dimensions; found ", query.ndim());
  const py::ssize_t heads = query.shape(0), tokens = query.shape(1);
  const int64_t total = cache.length() + tokens;
  CheckShape("query", query, {heads, tokens, format.key.dim});
  CheckShape("key", key, {format.kv_num_heads, tokens, format.key.dim});
  CheckShape("value", value, {format.kv_num_heads, tokens, format.value.dim});
  if (bias) CheckShape("bias", *bias, {heads, tokens, total});
  if (head_sink) CheckShape("head_sink", *head_sink, {heads});
  if (padding && padding->size() != total) kvfuse::Fail("[layer cache] expected padding of ", total, " tokens");
  py::array_t<float> output({heads, tokens, py::ssize_t{format.value.dim}});
  kvfuse::StepArgs args;
  args.query = RowsOf(query);
  args.output = output.mutable_data();
  args.output_head_stride = tokens * format.value.dim;
  args.output_token_stride = format.value.dim;
  args.num_heads = static_cast<int>(heads);
  args.sequence_length = tokens;
  args.scale = scale;
  args.softcap = softcap;
  args.causal = causal;
  args.padding = padding ? padding->data() : nullptr;
  if (bias) {
    args.bias = bias->data();
    args.bias_head_stride = tokens * total;
    args.bias_query_stride = total;
    args.bias_key_stride = 1;
  }
  args.head_sink = head_sink ? head_sink->data() : nullptr;
  {
    py::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(cache.mutex);
    cache.Prepare(cache.length(), tokens, RowsOf(key), RowsOf(value));
    for (const kvfuse::Phase& phase : cache.Step(args))
      for (size_t i = 0; i < phase.pieces; ++i) phase.run(i);
    if (commit) cache.Commit();
    if (commit && settle) cache.Settle();
  }
  return output;
}

// Seconds of the kernels of one causal decode step without masks, repeated on the device; nothing is appended.
double TimeStep(PyLayerCache& self, const Floats& query, const Floats& key, const Floats& value, float scale,
                int repeats) {
  auto* cache = dynamic_cast<kvfuse::DeviceLayerCache*>(self.cache.get());
  if (cache == nullptr) kvfuse::Fail("[time step] expected a layer cache on a device; found one on the CPU");
  const kvfuse::CacheFormat& format = cache->format();
  if (query.ndim() != 3 || repeats < 1) kvfuse::Fail("[time step] expected a query of 3 dimensions and repeats");
  const py::ssize_t heads = query.shape(0), tokens = query.shape(1);
  CheckShape("query", query, {heads, tokens, format.key.dim});
  CheckShape("key", key, {format.kv_num_heads, tokens, format.key.dim});
  CheckShape("value", value, {format.kv_num_heads, tokens, format.value.dim});
  kvfuse::StepArgs args;
  args.query = RowsOf(query);
  args.num_heads = static_cast<int>(heads);
  args.sequence_length = tokens;
  args.scale = scale;
  args.causal = true;
  py::gil_scoped_release release;
  std::lock_guard<std::mutex> lock(cache->mutex);
  cache->Prepare(cache->length(), tokens, RowsOf(key), RowsOf(value));
  return cache->TimeStep(args, repeats);
}

py::array_t<float> ReadRows(const PyLayerCache& self, bool key) {
  const kvfuse::CacheFormat& format = self.cache->format();
  const py::ssize_t dim = key ? format.key.dim : format.value.dim, length = self.cache->length();
  py::array_t<float> rows({py::ssize_t{format.kv_num_heads}, length, dim});
  for (int head = 0; head < format.kv_num_heads; ++head)
    for (int64_t j = 0; j < length; ++j) self.cache->ReadRow(key, head, j, rows.mutable_data(head, j, 0));
  return rows;
}

// The int32 dots [K, S * H / K, encoded, groups] of query [H, S, D], its rows token by token.
py::array_t<int32_t> IntegerScores(PyLayerCache& self, const Floats& query) {
  auto* cache = dynamic_cast<kvfuse::DeviceLayerCache*>(self.cache.get());
  if (cache == nullptr) kvfuse::Fail("[integer scores] expected a layer cache on a device; found one on the CPU");
  const kvfuse::CacheFormat& format = cache->format();
  if (query.ndim() != 3) kvfuse::Fail("[integer scores] expected query of 3 dimensions; found ", query.ndim());
  CheckShape("query", query, {query.shape(0), query.shape(1), format.key.dim});
  const std::vector<int32_t> scores =
      cache->IntegerScores(RowsOf(query), static_cast<int>(query.shape(0)), query.shape(1));
  const py::ssize_t rows = query.shape(1) * (query.shape(0) / format.kv_num_heads), groups = format.key.groups();
  const auto all = static_cast<py::ssize_t>(scores.size());
  return Array(scores, {format.kv_num_heads, rows, all / (format.kv_num_heads * rows * groups), groups});
}

}  // namespace

void AddDeviceCaches(py::module_& module) {
  py::class_<PyLayerCache>(module, "LayerCache")
      .def(py::init(&Make), py::kw_only(), py::arg("device"), py::arg("kv_num_heads"), py::arg("head_dim"),
           py::arg("value_dim"), py::arg("key_bits") = 4, py::arg("value_bits") = 4, py::arg("group_size") = 0,
           py::arg("codes") = "symmetric", py::arg("rotation") = "hadamard", py::arg("n_recent") = 0,
           py::arg("block") = 1, py::arg("n_sink") = 0, py::arg("window_left") = -1, py::arg("key_center") = "none",
           py::arg("simd") = true, py::arg("splits") = 0)
      .def("step", &Step, py::arg("query"), py::arg("key"), py::arg("value"), py::kw_only(), py::arg("scale"),
           py::arg("causal") = true, py::arg("softcap") = 0.0f, py::arg("padding") = py::none(),
           py::arg("bias") = py::none(), py::arg("head_sink") = py::none(), py::arg("commit") = true,
           py::arg("settle") = true)
      .def("time_step", &TimeStep, py::arg("query"), py::arg("key"), py::arg("value"), py::kw_only(), py::arg("scale"),
           py::arg("repeats"))
      .def("fork", [](const PyLayerCache& self) { return PyLayerCache{self.cache->Fork()}; })
      .def("truncate", [](PyLayerCache& self, int64_t length) { self.cache->Truncate(length); })
      .def("settle", [](PyLayerCache& self) { self.cache->Settle(); })
      .def(
          "snapshot",
          [](const PyLayerCache& self, bool canonical) { return SnapshotDict(self.cache->Snapshot(canonical)); },
          py::arg("canonical") = false)
      .def(
          "moved_to",
          [](const PyLayerCache& self, const std::string& device, bool simd, int splits) {
            return PyLayerCache{DeviceNamed(device, simd, splits).Adopt(self.cache->Snapshot())};
          },
          py::arg("device"), py::arg("simd") = true, py::arg("splits") = 0)
      .def("read", &ReadRows, py::arg("key"))
      .def("integer_scores", &IntegerScores, py::arg("query"))
      .def("growth_nbytes", [](const PyLayerCache& self, int64_t count) { return self.cache->GrowthBytes(count); })
      .def_property_readonly("length", [](const PyLayerCache& self) { return self.cache->length(); })
      .def_property_readonly("exact_begin", [](const PyLayerCache& self) { return self.cache->exact_begin(); })
      .def_property_readonly("nbytes", [](const PyLayerCache& self) { return self.cache->nbytes(); });
}
