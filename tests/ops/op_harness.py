"""Runs test models in onnxruntime and compares; tensors are always given and got as B H S D."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from op_graph import Graph, build_model
from reference import OpConfig, attend, canonical_state

from kvfuse import _native, library_path
from kvfuse.provider import add_device

Array = NDArray[Any]

# Where the sessions of this module keep their caches: the CPU, or a device of the execution provider, so that
# any test here also tests that device.
DEVICE = os.environ.get("KVFUSE_TEST_DEVICE", "cpu")
VARIANT = os.environ.get("KVFUSE_TEST_VARIANT")  # of the device's kernels; None: its default
# What counts bytes is of the CPU: a device's are not the process's, and pad rows to 16 bytes.
only_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="counts the bytes of the CPU's layout")
_tokens = itertools.count()


class OpSession:
    """One onnxruntime session of a test model."""

    def __init__(
        self,
        graph: Graph | OpConfig,
        *,
        threads: int = 1,
        device: str | None = None,
        variant: str | None = None,
    ) -> None:
        self.graph = Graph((graph,)) if isinstance(graph, OpConfig) else graph
        self.token = f"test-{next(_tokens)}"
        options = onnxruntime.SessionOptions()
        device = device or DEVICE
        if device == "cpu":
            options.register_custom_ops_library(library_path())
        add_device(options, device, None if device == "cpu" else variant or VARIANT)
        options.add_session_config_entry("kvfuse.session", self.token)
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # the errors asked for here are checked, not read
        model = build_model(self.graph).SerializeToString()
        providers = ["CPUExecutionProvider"] if device == "cpu" else None
        self.session = onnxruntime.InferenceSession(model, options, providers, enable_fallback=0)

    def run_all(
        self, query: Array, key: Array, value: Array, run_options: Any = None, **feeds: Any
    ) -> dict[str, Array]:
        """Runs the new tokens [B, H, S, D] and gives every graph output; `feeds` are the other inputs."""
        axis = self.graph.layers[0].axis
        dtype = np.dtype(self.graph.dtype)
        tensors = {"query": query, "key": key, "value": value}
        if axis == 1:
            tensors = {name: tensor.swapaxes(1, 2) for name, tensor in tensors.items()}
        inputs = {name: np.ascontiguousarray(tensor.astype(dtype)) for name, tensor in tensors.items()}
        for name, feed in feeds.items():
            floats = name in ("attention_bias", "head_sink")
            whole = name in ("kv_sequence", "kv_past_length", "rounds", "index")
            inputs[name] = np.asarray(feed, dtype if floats else np.int64 if whole else None)
        names = [output.name for output in self.session.get_outputs()]
        results = dict(zip(names, self.session.run(names, inputs, run_options), strict=True))
        if axis == 1:
            results |= {name: results[name].swapaxes(1, 2) for name in names if name.startswith("output_")}
        return results

    def run(self, query: Array, key: Array, value: Array, run_options: Any = None, **feeds: Any) -> Array:
        """Runs the new tokens and gives the first layer's output [B, H, S, Dv]."""
        return self.run_all(query, key, value, run_options, **feeds)["output_0"]

    def default_sequences(self) -> list[int]:
        """The ids of the session's own sequences, one per batch row."""
        found = _native.default_sequences(self.token)
        assert found is not None
        return list(found)

    def dump(self, row: int = 0, layer: int = 0) -> dict[str, Any]:
        """The canonical state of one layer of one of the session's own sequences."""
        return dict(_native.dump_layer(self.default_sequences()[row], self.graph.layers[layer].layer))


@dataclass(frozen=True)
class History:
    """Query [B, H, T, D], key [B, K, T, D], value [B, K, T, V] of sequences, in the graph's precision."""

    query: Array
    key: Array
    value: Array

    def part(self, begin: int, end: int) -> tuple[Array, Array, Array]:
        """The tokens [begin, end) of all three."""
        return self.query[:, :, begin:end], self.key[:, :, begin:end], self.value[:, :, begin:end]

    def row(self, row: int) -> History:
        """One batch row as a history of its own."""
        return History(*(tensor[row : row + 1] for tensor in (self.query, self.key, self.value)))


def random_history(
    seed: int,
    length: int,
    *,
    batch: int = 1,
    num_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: str = "float32",
) -> History:
    """Unit normal tokens, rounded to `dtype` and held as float32."""
    rng = np.random.default_rng(seed)
    shapes = ((num_heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim or head_dim))
    drawn = [rng.standard_normal((batch, heads, length, size)) for heads, size in shapes]
    return History(*(tensor.astype(np.dtype(dtype)).astype(np.float32) for tensor in drawn))


def feed(session: OpSession, history: History, chunks: Sequence[int], begin: int = 0, **feeds: Any) -> Array:
    """Feeds the tokens from `begin` in chunks and gives all outputs [B, H, sum(chunks), V]."""
    outputs = []
    for size in chunks:
        outputs.append(session.run(*history.part(begin, begin + size), **feeds))
        feeds.pop("kv_past_length", None)  # only the first chunk starts over
        begin += size
    return np.concatenate(outputs, axis=2)


@contextmanager
def sequences(count: int) -> Iterator[list[int]]:
    """Explicit handles that are destroyed at the end."""
    ids = [_native.create_sequence() for _ in range(count)]
    try:
        yield ids
    finally:
        for handle in ids:
            _native.destroy_sequence(handle)


def assert_close(found: Array, expected: Array, dtype: str = "float32", scale: float = 1.0) -> None:
    """Compares outputs of unit normal histories.

    float32 scores err by at most D * 2^-24 * |s| (D <= 192 products, |s| <= 8), and roundings add like a
    random walk: sqrt(192) * 6e-8 * 8 = 7e-6. The softmax and a weighted sum of values of |v| <= 5 keep that
    size. So 1e-5, the bar of the design, times `scale` where inputs are larger. A float16 output adds half
    an ulp, 2^-11 of its size.
    """
    tolerance = np.full(expected.shape, 1e-5 * scale)
    if dtype == "float16":
        tolerance = tolerance + np.abs(expected) * 2.0**-11 + 2.0**-25
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    with np.errstate(invalid="ignore"):
        error = np.abs(found.astype(np.float64) - expected)
    bad = ~(error <= tolerance) & ~np.isnan(expected) & (found != expected)  # equal infinities differ by NaN
    assert not bad.any(), (
        f"{bad.sum()} of {bad.size} differ, worst by {np.nanmax(error):.3g} at {np.argwhere(bad)[0]}"
    )


def assert_same_bytes(found: Array, expected: Array, name: str) -> None:
    """Bit equality, except that every NaN is the same NaN (scales and exact floats can be NaN)."""
    found, expected = np.ascontiguousarray(found), np.ascontiguousarray(expected)
    assert found.dtype == expected.dtype, name
    assert found.shape == expected.shape, name
    if found.dtype.kind == "f":
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=name)
        found, expected = np.nan_to_num(found, nan=0.0), np.nan_to_num(expected, nan=0.0)
        found, expected = (array.view(np.uint32) for array in (found, expected))
    np.testing.assert_array_equal(found, expected, err_msg=name)


def check_against_model(
    graph: Graph | OpConfig, history: History, chunks: Sequence[int], scale: float = 1.0, **feeds: Any
) -> OpSession:
    """Feeds a history in chunks to a fresh session and compares every output with the model's.

    Masks are given for the whole history: key_padding [B, >=T], attention_bias as it broadcasts to
    [B, H, T, T], of which each run gets its rows and columns.
    """
    session = OpSession(graph)
    config = session.graph.layers[0]
    whole_bias = feeds.pop("attention_bias", None)
    begin = 0
    for size in chunks:
        end = begin + size
        if whole_bias is not None:
            rows = slice(begin, end) if whole_bias.ndim > 1 and whole_bias.shape[-2] > 1 else slice(None)
            columns = slice(0, end) if whole_bias.shape[-1] > 1 else slice(None)
            where = (..., rows, columns) if whole_bias.ndim > 1 else (columns,)
            feeds["attention_bias"] = whole_bias[where]
        query, key, value = history.part(begin, end)
        found = session.run(query, key, value, **feeds)
        masks = {name: np.asarray(feed) for name, feed in feeds.items()}
        expected = attend(config, query, history.key, history.value, past=begin, **masks)
        assert found.dtype == session.graph.dtype
        assert_close(found, expected, session.graph.dtype, scale)
        begin = end
    return session


def check_state(session: OpSession, history: History, length: int, layer: int = 0) -> None:
    """Compares every byte of the canonical state of the session's own sequences with the model's."""
    for row in range(history.key.shape[0]):
        config = session.graph.layers[layer]
        found = session.dump(row, layer)
        check_dump(found, config, history.key[row], history.value[row], length)


def check_dump(found: dict[str, Any], config: OpConfig, key: Array, value: Array, length: int) -> None:
    """Compares a dump with the model's state after `length` tokens of one row's history [K, T, D]."""
    expected = canonical_state(config, key, value, length)
    assert ("key_means" in found) == ("key_means" in expected)
    assert found["length"] == length
    assert found["encoded_end"] == expected["encoded_end"]
    begin = found["begin"]  # sliding windows free the pages before it
    assert begin == 0 or 0 < begin < length - config.window_left
    for name in ("key_codes", "key_scales", "value_codes", "value_scales"):
        assert_same_bytes(found[name], expected[name][:, begin:], name)
    if config.centred:
        assert_same_bytes(found["key_means"], expected["key_means"][:, begin // config.block :], "key_means")
    for name in ("sink_key", "sink_value"):
        assert_same_bytes(found[name], expected[name], name)
    # How much slack is kept is the store's affair; that the window is there, and is what was fed, is not.
    exact_begin = found["exact_begin"]
    newest_low_bit = expected["encoded_end"] if config.block > 1 else max(0, length - config.n_recent)
    assert 0 <= exact_begin <= newest_low_bit
    assert_same_bytes(found["exact_key"], key[:, exact_begin:length], "exact_key")
    assert_same_bytes(found["exact_value"], value[:, exact_begin:length], "exact_value")
