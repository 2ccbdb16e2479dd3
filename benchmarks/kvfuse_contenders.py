"""kvfuse's op in onnxruntime, as a rewritten model has it: KvCacheBegin, then QuantizedKvSdpa."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import kvfuse
from benchmarks.contender import Contender, Entry
from benchmarks.ort_contenders import Bindings, Info, make_model, open_session
from benchmarks.workload import CHECKED_ROWS, Float32, Shape, Workload
from kvfuse.formats import PRESETS, KvFormat

BURST = 64  # decode steps of one burst: a whole block, so that its closing is in every burst
WARM_STEPS = 2  # steps after a fork that copy the pages they write to
FILL_TOKENS = 4096


def op_model(
    cache_format: KvFormat,
    num_heads: int,
    shape: Shape,
    *,
    padding: bool = False,
    attributes: Mapping[str, Any] | None = None,
) -> onnx.ModelProto:
    """A model of one layer on [1, heads, S, D] tensors.

    Args:
        cache_format: how keys and values are kept.
        num_heads: query heads.
        shape: kv heads and head size.
        padding: adds the input `padding`, bool [1, T].
        attributes: other attributes of the op, for example `window_left`.
    """
    begin = helper.make_node(
        "KvCacheBegin",
        ["kv_sequence", "kv_past_length", "query"],
        ["slots", "past_length", "past_lengths"],
        domain="kvfuse",
        layers="layer",
    )
    operands = ["query", "key", "value", "slots", *(["padding"] if padding else [])]
    op = helper.make_node(
        "QuantizedKvSdpa",
        operands,
        ["output"],
        domain="kvfuse",
        **{"layer": "layer", "causal": 1, **cache_format.attributes(), **(attributes or {})},
    )
    kv_heads, dim = shape.kv_num_heads, shape.head_dim
    inputs: list[Info] = [
        ("query", TensorProto.FLOAT, [1, num_heads, "S", dim]),
        ("key", TensorProto.FLOAT, [1, kv_heads, "S", dim]),
        ("value", TensorProto.FLOAT, [1, kv_heads, "S", dim]),
        ("kv_sequence", TensorProto.INT64, [1]),
        ("kv_past_length", TensorProto.INT64, [1]),
    ]
    if padding:
        inputs.append(("padding", TensorProto.BOOL, [1, "T"]))
    constants = [
        numpy_helper.from_array(np.array([value]), name)
        for name, value in (("kv_sequence", 0), ("kv_past_length", -1))
    ]
    output: Info = ("output", TensorProto.FLOAT, [1, num_heads, "S", dim])
    return make_model([begin, op], inputs, [output], constants, opset=18)


def op_session(model: onnx.ModelProto, threads: int) -> onnxruntime.InferenceSession:
    """A session with kvfuse's library registered."""
    options = onnxruntime.SessionOptions()
    kvfuse.register(options)
    return open_session(model, threads, options)


def fill(
    sequence: kvfuse.KvSequence, cache_format: KvFormat, shape: Shape, key: Float32, value: Float32
) -> None:
    """Appends keys and values [K, n, D] to a sequence without attending: all keys are padding."""
    session = op_session(op_model(cache_format, shape.kv_num_heads, shape, padding=True), 2)
    length = len(sequence)
    for begin in range(0, key.shape[1], FILL_TOKENS):
        part = slice(begin, begin + FILL_TOKENS)
        rows = np.ascontiguousarray(key[np.newaxis, :, part])
        length += rows.shape[2]
        feeds = {
            "query": rows,
            "key": rows,
            "value": np.ascontiguousarray(value[np.newaxis, :, part]),
            "kv_sequence": np.array([sequence.id]),
            "padding": np.zeros((1, length), np.bool_),
        }
        session.run(None, feeds)


def read_bytes(cache_format: KvFormat, shape: Shape, tokens: int) -> int:
    """Bytes of keys and values that a decode step over `tokens` tokens cannot avoid to read.

    Codes, scales and means of the tokens that the step uses in low bits, floats of those it uses exactly:
    sinks, and a window that is between n_recent and n_recent + block - 1 tokens long.
    """
    window = cache_format.n_recent + (cache_format.block - 1) // 2
    exact = min(tokens, window + cache_format.n_sink)
    per_token = cache_format.bytes_per_token(shape.kv_num_heads, shape.head_dim, shape.head_dim)
    return int((tokens - exact) * per_token + exact * 2 * shape.kv_num_heads * shape.head_dim * 4)


class KvFuse(Contender):
    """One layer with its cache inside the op.

    Args:
        work: the workload.
        cache_format: how keys and values are kept.
        threads: overrides the workload's number of threads; 0: does not.
    """

    def __init__(self, work: Workload, cache_format: KvFormat, threads: int = 0) -> None:
        shape = work.shape
        model = op_model(cache_format, shape.num_heads, shape)
        self.runs = Bindings(op_session(model, threads or work.threads))
        self.decode = work.mode == "decode"
        self.cache_bytes = int(
            work.key.shape[1]
            * cache_format.bytes_per_token(shape.kv_num_heads, shape.head_dim, shape.head_dim)
        )
        new = slice(work.past, None)
        feeds = {
            "query": work.query[np.newaxis].copy(),
            "key": work.key[np.newaxis, :, new].copy(),
            "value": work.value[np.newaxis, :, new].copy(),
        }
        self.values = {name: self.runs.value(array) for name, array in feeds.items()}
        self.result_shape = [1, shape.num_heads, work.new_tokens, shape.head_dim]
        self.forks: list[kvfuse.KvSequence] = []
        self.bases: list[kvfuse.KvSequence] = []
        if not self.decode:
            self._bind(kvfuse.KvSequence(), start_again=True)
            return
        self.burst = BURST
        start = max(0, work.past - BURST // 2 - WARM_STEPS)
        for _ in range(work.layers):
            base = kvfuse.KvSequence()
            fill(base, cache_format, shape, work.key[:, :start], work.value[:, :start])
            self.bases.append(base)
        # The first step, which is compared with the right answer, is at exactly T tokens.
        first = self.bases[0].fork()
        fill(first, cache_format, shape, work.key[:, start : work.past], work.value[:, start : work.past])
        self._bind(first)

    def _bind(self, sequence: kvfuse.KvSequence, start_again: bool = False) -> None:
        self.forks.append(sequence)
        handles = {"kv_sequence": np.array([sequence.id])}
        if start_again:
            handles["kv_past_length"] = np.array([0])
        values = {name: self.runs.value(array) for name, array in handles.items()}
        self.runs.add(self.values | values, {}, "output", self.result_shape)

    def prepare(self) -> None:
        """Forks every layer's sequence anew, which costs O(pages), and lets the fork copy its last page."""
        if not self.decode:
            return
        for fork in self.forks:
            fork.close()
        self.forks, session = [], self.runs.session
        self.runs = Bindings(session)
        for base in self.bases:
            self._bind(base.fork())
        for _ in range(WARM_STEPS * len(self.bases)):
            self.step()

    def step(self) -> None:
        """One run."""
        self.runs.step()

    def output(self) -> NDArray[np.float32]:
        """The last rows, [H, R, D]."""
        return self.runs.result()[0, :, -CHECKED_ROWS:]

    def close(self) -> None:
        """Frees the sequences."""
        for sequence in (*self.forks, *self.bases):
            sequence.close()


# The formats that the bars are about.
FORMATS = {"kvfuse_int4": PRESETS["int4"], "kvfuse_default": PRESETS["default"]}

_ABOUT = {"int4": "4 bits, one scale per token", "default": "the default preset", "int8": "8 bits"}
ENTRIES = [
    Entry(f"kvfuse_{name}", partial(KvFuse, cache_format=PRESETS[name]), 0.4, f"kvfuse: {about}")
    for name, about in _ABOUT.items()
]
# The same with one thread beside the others' two, so that scaling is measured in one run.
ENTRIES += [
    Entry(
        f"{entry.name}_1thread",
        partial(KvFuse, cache_format=FORMATS[entry.name], threads=1),
        0.4,
        f"{entry.about}, one thread",
        ("decode",),
        threads=1,
    )
    for entry in ENTRIES[:2]
]
