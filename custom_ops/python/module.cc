// kvfuse._native: sequences and kernels for Python. No logic here; errors are ValueError with our sentence.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kvfuse/error.h"
#include "kvfuse/half.h"
#include "kvfuse/kernels.h"
#include "kvfuse/page.h"
#include "kvfuse/registration.h"
#include "kvfuse/sequence.h"
#include "kvfuse/warnings.h"
#include "profile.h"
#include "python/arrays.h"
#include "python/device_cache_module.h"
#include "python/device_module.h"

namespace py = pybind11;
using kvfuse::SequenceTable;
using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;

namespace {

FloatArray Rotate(const FloatArray& rows) {
  FloatArray result(std::vector<py::ssize_t>(rows.shape(), rows.shape() + rows.ndim()));
  std::copy(rows.data(), rows.data() + rows.size(), result.mutable_data());
  const auto dim = static_cast<int>(rows.shape(rows.ndim() - 1));
  for (py::ssize_t i = 0; dim > 0 && i < rows.size() / dim; ++i)
    kvfuse::Kernels().rotate(result.mutable_data() + i * dim, dim);
  return result;
}

// (codes u8 [N, bytes], scales f32 [N, groups]) of rows f32 [N, D] that are rotated already.
py::tuple Quantize(const FloatArray& rows, int bits, int group_size, const std::string& codes) {
  if (rows.ndim() != 2) kvfuse::Fail("[quantize] expected rows of 2 dimensions; found ", rows.ndim());
  if (bits != 4 && bits != 8 && bits != 16) kvfuse::Fail("[quantize] expected bits 4, 8 or 16; found ", bits);
  if (group_size != 0 && group_size != 32 && group_size != 64)
    kvfuse::Fail("[quantize] expected group_size 0, 32 or 64; found ", group_size);
  if (codes != "symmetric" && codes != "full")
    kvfuse::Fail("[quantize] expected codes 'symmetric' or 'full'; found '", codes, "'");
  kvfuse::SideFormat side;
  side.dim = static_cast<int>(rows.shape(1));
  side.bits = bits;
  side.group_size = group_size;
  side.full = codes == "full";
  py::array_t<uint8_t> packed({rows.shape(0), py::ssize_t{side.code_bytes()}});
  FloatArray scales({rows.shape(0), py::ssize_t{side.groups()}});
  std::vector<uint8_t> stored(side.scale_bytes());
  for (py::ssize_t i = 0; i < rows.shape(0); ++i) {
    kvfuse::Kernels().quantize_row(side, rows.data(i, 0), packed.mutable_data(i, 0), stored.data());
    for (int g = 0; g < side.groups(); ++g) {
      if (group_size == 0)
        std::memcpy(scales.mutable_data(i, g), stored.data(), 4);
      else
        *scales.mutable_data(i, g) = kvfuse::HalfToFloat(reinterpret_cast<const uint16_t*>(stored.data())[g]);
    }
  }
  return py::make_tuple(packed, scales);
}

FloatArray HalfRound(const FloatArray& values) {
  FloatArray result(std::vector<py::ssize_t>(values.shape(), values.shape() + values.ndim()));
  for (py::ssize_t i = 0; i < values.size(); ++i)
    result.mutable_data()[i] = kvfuse::HalfToFloat(kvfuse::FloatToHalfSaturated(values.data()[i]));
  return result;
}

py::dict DumpLayer(int64_t id, const std::string& layer) {
  kvfuse::LayerSnapshot shot;
  {
    py::gil_scoped_release release;  // a run that is inside the layer is waited for
    SequenceTable::Global().Find(id)->ReadLayer(layer,
                                                [&](const kvfuse::LayerCache& cache) { shot = cache.Snapshot(); });
  }
  return SnapshotDict(shot);
}

// (key, value), f32 [kv_num_heads, count, dim] each: the first `count` tokens of a layer as floats.
py::tuple ReadLayer(int64_t id, const std::string& layer, int64_t count) {
  std::vector<float> rows[2];
  kvfuse::CacheFormat format;
  {
    py::gil_scoped_release release;
    SequenceTable::Global().Find(id)->ReadLayer(layer, [&](const kvfuse::LayerCache& cache) {
      if (count < 0 || count > cache.length())
        kvfuse::Fail("[layer '", layer, "'] expected at most its ", cache.length(), " tokens; found ", count);
      format = cache.format();
      for (const bool key : {true, false}) {
        const int64_t dim = key ? format.key.dim : format.value.dim;
        rows[key ? 0 : 1].resize(format.kv_num_heads * count * dim);
        float* row = rows[key ? 0 : 1].data();
        for (int head = 0; head < format.kv_num_heads; ++head)
          for (int64_t j = 0; j < count; ++j, row += dim) cache.ReadRow(key, head, j, row);
      }
    });
  }
  return py::make_tuple(Array(rows[0], {format.kv_num_heads, count, format.key.dim}),
                        Array(rows[1], {format.kv_num_heads, count, format.value.dim}));
}

py::object DefaultSequences(const std::string& token, size_t count) {
  std::vector<int64_t> ids;
  bool known = true;
  {
    py::gil_scoped_release release;
    SequenceTable& table = SequenceTable::Global();
    if (const auto rows = table.Published(token)) {
      std::lock_guard<std::mutex> lock(table.published_mutex());
      table.Grow(*rows, count);
      ids = *rows;
    } else {
      known = false;
    }
  }
  return known ? py::cast(ids) : py::object(py::none());
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  AddDevices(m);
  AddDeviceCaches(m);
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const kvfuse::Error& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    }
  });
  const auto find = [](int64_t id) { return SequenceTable::Global().Find(id); };
  m.def("version", [] { return KVFUSE_VERSION; });
  m.def("ort_api_version", [] { return kvfuse::NegotiatedApiVersion(); }, "0 before the ops were registered");
  m.def("create_sequence", [] { return SequenceTable::Global().Create()->id(); });
  m.def("destroy_sequence", [](int64_t id) { SequenceTable::Global().Destroy(id); });
  m.def("live_sequences", [] { return SequenceTable::Global().size(); });
  // These wait for a run that is inside a layer: let other Python threads go on meanwhile.
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.def("sequence_length", [find](int64_t id) { return find(id)->Length(); }, unlocked);
  m.def("sequence_exact_begin", [find](int64_t id) { return find(id)->ExactBegin(); }, unlocked);
  m.def("sequence_nbytes", [find](int64_t id) { return find(id)->Bytes(); }, unlocked);
  m.def("sequence_key_errors", [find](int64_t id) { return find(id)->KeyErrors(); }, unlocked);
  m.def("take_warnings", [](const std::string& session) { return kvfuse::Warnings::Global().Take(session); });
  m.def("fork_sequence", [](int64_t id) { return SequenceTable::Global().Fork(id)->id(); }, unlocked);
  m.def(
      "reorder_sequences",
      [](const std::vector<int64_t>& handles, const std::vector<int64_t>& index) {
        return SequenceTable::Global().Reorder(handles, index);
      },
      unlocked);
  m.def("set_sequence_limits",
        [find](int64_t id, int64_t max_tokens, int64_t max_bytes) { find(id)->SetLimits(max_tokens, max_bytes); });
  m.def("process_nbytes", [] { return kvfuse::Page::BytesInUse(); });
  m.def("set_process_limit", [](int64_t bytes) { kvfuse::Page::SetLimit(bytes); });
  m.def("freeze_sequence", [find](int64_t id) {
    std::string bytes;
    {
      py::gil_scoped_release release;
      bytes = find(id)->Freeze();
    }
    return py::bytes(bytes);
  });
  m.def("unfreeze_sequence",
        [](const py::bytes& bytes) { return SequenceTable::Global().Unfreeze(std::string_view(bytes))->id(); });
  m.def(
      "save_sequence", [find](int64_t id, const std::string& path) { kvfuse::SaveSequence(*find(id), path); },
      unlocked);
  m.def("load_sequence", [](const std::string& path) { return kvfuse::LoadSequence(path)->id(); }, unlocked);
  m.def("truncate_sequence", [find](int64_t id, int64_t length) { find(id)->Truncate(length); }, unlocked);
  m.def("default_sequences", DefaultSequences, py::arg("token"), py::arg("count") = 0);
  m.def("read_layer", ReadLayer, py::arg("id"), py::arg("layer"), py::arg("count"));
  m.def("dump_layer", DumpLayer, py::arg("id"), py::arg("layer"));
  m.def("kernel_name", [] { return kvfuse::Kernels().name; });
  m.def("profile", [] {
    std::vector<std::tuple<std::string, double, int64_t>> stages;
    for (const auto& [name, seconds, count] : kvfuse::profile::Report()) stages.emplace_back(name, seconds, count);
    return stages;
  });
  m.def("reset_profile", kvfuse::profile::Reset);
  m.def("exact_weights", kvfuse::ExactWeights);
  m.def("set_exact_weights", kvfuse::SetExactWeights);
  m.def("kernels", [] {
    py::list choices;
    for (const kvfuse::KernelChoice& choice : kvfuse::KernelChoices())
      choices.append(py::make_tuple(choice.name, choice.reason));
    return choices;
  });
  m.def("rotate", Rotate, py::arg("rows"));
  m.def("quantize", Quantize, py::arg("rows"), py::arg("bits"), py::arg("group_size"), py::arg("codes"));
  m.def("half_round", HalfRound, py::arg("values"));
}
