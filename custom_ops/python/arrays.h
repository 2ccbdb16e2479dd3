// Arrays and snapshots for the parts of the Python module.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <vector>

#include "kvfuse/error.h"
#include "kvfuse/layer_cache.h"

template <typename T>
pybind11::array_t<T> Array(const std::vector<T>& values, std::vector<pybind11::ssize_t> shape) {
  pybind11::array_t<T> array(shape);
  if (array.size() != static_cast<pybind11::ssize_t>(values.size()))
    throw kvfuse::Error("[native] expected matching sizes");
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

inline pybind11::dict SnapshotDict(const kvfuse::LayerSnapshot& shot) {
  namespace py = pybind11;
  const kvfuse::CacheFormat& f = shot.format;
  const py::ssize_t heads = f.kv_num_heads, encoded = shot.encoded_end - shot.begin;
  const py::ssize_t exact = shot.length - shot.exact_begin, sinks = std::min(f.n_sink, shot.length);
  py::dict out;
  out["length"] = shot.length;
  out["begin"] = shot.begin;
  out["encoded_end"] = shot.encoded_end;
  out["exact_begin"] = shot.exact_begin;
  out["key_codes"] = Array(shot.key_codes, {heads, encoded, f.key.code_bytes()});
  out["value_codes"] = Array(shot.value_codes, {heads, encoded, f.value.code_bytes()});
  out["key_scales"] = Array(shot.key_scales, {heads, encoded, f.key.groups()});
  out["value_scales"] = Array(shot.value_scales, {heads, encoded, f.value.groups()});
  if (f.centered()) {
    const py::ssize_t blocks = static_cast<py::ssize_t>(shot.key_means.size()) / (heads * f.key.dim);
    out["key_means"] = Array(shot.key_means, {heads, blocks, f.key.dim});
  }
  out["exact_key"] = Array(shot.exact_key, {heads, exact, f.key.dim});
  out["exact_value"] = Array(shot.exact_value, {heads, exact, f.value.dim});
  out["sink_key"] = Array(shot.sink_key, {heads, sinks, f.key.dim});
  out["sink_value"] = Array(shot.sink_value, {heads, sinks, f.value.dim});
  return out;
}
