"""onnxruntime's own attention: GroupQueryAttention, Attention (opset 24), and what exporters write out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from benchmarks.contender import Contender, Entry
from benchmarks.workload import CHECKED_ROWS, Workload

Info = tuple[str, int, "Sequence[int | str] | None"]  # name, element type, shape


def open_session(
    model: onnx.ModelProto, threads: int, options: onnxruntime.SessionOptions | None = None
) -> onnxruntime.InferenceSession:
    """A CPU session with that many intra-op threads."""
    options = options or onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Info],
    outputs: Sequence[Info],
    constants: Sequence[onnx.TensorProto] = (),
    opset: int = 24,
) -> onnx.ModelProto:
    """A model of a few nodes; inputs and outputs are (name, element type, shape)."""
    graph = helper.make_graph(
        list(nodes),
        "attention",
        [helper.make_tensor_value_info(*info) for info in inputs],
        [helper.make_tensor_value_info(*info) for info in outputs],
        list(constants),
    )
    domains = {"": opset, "com.microsoft": 1, "kvfuse": 1}
    opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11 if opset > 22 else 8)


class Bindings:
    """I/O bindings of one session, one per layer cache, used in turn."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self.session = session
        self.bindings: list[Any] = []
        self.outputs: list[Any] = []
        self.next = self.last = 0
        self._kept: list[Any] = []  # bound memory belongs to these arrays

    def value(self, array: NDArray[Any]) -> Any:
        """An OrtValue over the memory of `array`."""
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        self._kept.append((array, value))
        return value

    def add(self, inputs: dict[str, Any], outputs: dict[str, Any], output: str, shape: Sequence[int]) -> Any:
        """Adds a binding of OrtValues, and an f32 array of `shape` for the output that is looked at."""
        binding = self.session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        result = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), np.float32, "cpu")
        binding.bind_ortvalue_output(output, result)
        self.bindings.append(binding)
        self.outputs.append(result)
        self._kept.append((inputs, outputs))
        return binding

    def step(self) -> None:
        """Runs the next binding."""
        self.session.run_with_iobinding(self.bindings[self.next])
        self.last = self.next
        self.next = (self.next + 1) % len(self.bindings)

    def result(self) -> NDArray[np.float32]:
        """What the last run wrote."""
        array: NDArray[np.float32] = self.outputs[self.last].numpy()
        return array


def packed(rows: NDArray[Any]) -> NDArray[Any]:
    """[heads, S, D] as the contrib operators have it, [1, S, heads * D]."""
    return np.ascontiguousarray(rows.transpose(1, 0, 2).reshape(1, rows.shape[1], -1))


class GroupQueryAttention(Contender):
    """com.microsoft GroupQueryAttention with past and present in one buffer.

    Args:
        work: the workload.
        bits: 32 (f32), 8 (one scale per tensor) or 4 (one scale per channel): the fastest of each kind.
    """

    def __init__(self, work: Workload, bits: Literal[32, 8, 4]) -> None:
        shape, total = work.shape, work.key.shape[1]
        heads, kv_heads, dim = shape.num_heads, shape.kv_num_heads, shape.head_dim
        element = {32: TensorProto.FLOAT, 8: TensorProto.INT8, 4: TensorProto.UINT8}[bits]
        width = dim // 2 if bits == 4 else dim
        inputs = ["query", "key", "value", "past_key", "past_value", "last", "total"]
        attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads}
        constants = []
        if bits != 32:
            kind = "PER_TENSOR" if bits == 8 else "PER_CHANNEL"
            attributes |= {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
            inputs += ["", "", "", "", "", "key_scale", "value_scale"]
            for name, rows in (("key_scale", work.key), ("value_scale", work.value)):
                constants.append(numpy_helper.from_array(gqa_scale(rows, bits), name))
        outputs = ["output", "present_key", "present_value"]
        node = helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **attributes)
        past_shape: list[int | str] = [1, kv_heads, "capacity", width]
        model = make_model(
            [node],
            [
                ("query", TensorProto.FLOAT, [1, "S", heads * dim]),
                ("key", TensorProto.FLOAT, [1, "S", kv_heads * dim]),
                ("value", TensorProto.FLOAT, [1, "S", kv_heads * dim]),
                ("past_key", element, past_shape),
                ("past_value", element, past_shape),
                ("last", TensorProto.INT32, [1]),
                ("total", TensorProto.INT32, [1]),
            ],
            [
                ("output", TensorProto.FLOAT, [1, "S", heads * dim]),
                ("present_key", element, [1, kv_heads, "present", width]),
                ("present_value", element, [1, kv_heads, "present", width]),
            ],
            constants,
        )
        self.runs = Bindings(open_session(model, work.threads))
        self.shape, self.new = shape, work.new_tokens
        new = slice(work.past, total)
        feeds = {
            "query": packed(work.query),
            "key": packed(work.key[:, new]),
            "value": packed(work.value[:, new]),
            "last": np.array([total - 1], np.int32),
            "total": np.array([total], np.int32),
        }
        values = {name: self.runs.value(array) for name, array in feeds.items()}
        for _ in range(work.layers):
            pasts = {}
            for side, rows in (("key", work.key), ("value", work.value)):
                cache = np.zeros((1, kv_heads, total, width), helper.tensor_dtype_to_np_dtype(element))
                if work.past:
                    cache[0, :, : work.past] = gqa_codes(rows, work.past, bits)
                pasts[side] = self.runs.value(cache)
            self.runs.add(
                values | {f"past_{side}": value for side, value in pasts.items()},
                {f"present_{side}": value for side, value in pasts.items()},
                "output",
                [1, self.new, heads * dim],
            )
        self.cache_bytes = 2 * kv_heads * total * dim * bits // 8

    def step(self) -> None:
        """One run."""
        self.runs.step()

    def output(self) -> NDArray[np.float32]:
        """The last rows, [H, R, D]."""
        rows = self.runs.result().reshape(self.new, self.shape.num_heads, self.shape.head_dim)
        last: NDArray[np.float32] = rows[-CHECKED_ROWS:].transpose(1, 0, 2)
        return last


def gqa_scale(rows: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """The scale input of quantized caches: max abs / 127 of the tensor, or / 7 of each channel."""
    if bits == 8:
        return np.array([np.abs(rows).max() / 127], np.float32)
    scale: NDArray[np.float32] = np.abs(rows).max(axis=1) / np.float32(7)  # K D
    return scale.reshape(1, rows.shape[0], 1, rows.shape[2])


def gqa_codes(rows: NDArray[np.float32], past: int, bits: int) -> NDArray[Any]:
    """The first `past` tokens [K, past, bytes] as the operator itself would have stored them."""
    if bits == 32:
        return rows[:, :past]
    scale = gqa_scale(rows, bits).reshape((rows.shape[0], 1, -1) if bits == 4 else (1, 1, 1))
    most = 127 if bits == 8 else 7
    codes: NDArray[Any] = np.clip(np.rint(rows[:, :past] / scale), -most - 1, most).astype(np.int8)
    if bits == 4:
        unsigned = (codes + 8).astype(np.uint8)
        codes = unsigned[..., 0::2] | (unsigned[..., 1::2] << 4)  # even channel in the low nibble
    return codes


class GrowingCache(Contender):
    """A graph on [1, heads, S, D] tensors whose past is an input and whose present is an output.

    Args:
        work: the workload.
        kind: "attention" (ONNX Attention, opset 24) or "subgraph" (Concat, repeated heads, MatMul, Softmax).
    """

    def __init__(self, work: Workload, kind: Literal["attention", "subgraph"]) -> None:
        shape, total, past = work.shape, work.key.shape[1], work.past
        heads, kv_heads, dim = shape.num_heads, shape.kv_num_heads, shape.head_dim
        inputs: list[Info] = [
            ("query", TensorProto.FLOAT, [1, heads, "S", dim]),
            ("key", TensorProto.FLOAT, [1, kv_heads, "S", dim]),
            ("value", TensorProto.FLOAT, [1, kv_heads, "S", dim]),
            ("past_key", TensorProto.FLOAT, [1, kv_heads, "P", dim]),
            ("past_value", TensorProto.FLOAT, [1, kv_heads, "P", dim]),
        ]
        feeds = {
            "query": work.query[np.newaxis].copy(),
            "key": work.key[np.newaxis, :, past:].copy(),
            "value": work.value[np.newaxis, :, past:].copy(),
        }
        constants: list[onnx.TensorProto] = []
        if kind == "attention":
            operands = ["query", "key", "value", "", "past_key", "past_value"]
            results = ["output", "present_key", "present_value"]
            nodes = [helper.make_node("Attention", operands, results, is_causal=1)]
        else:
            nodes, constants = exported_subgraph(work)
            inputs.append(("mask", TensorProto.FLOAT, [1, 1, "S", "T"]))
            hidden = np.arange(total) > np.arange(past, total)[:, np.newaxis]
            feeds["mask"] = np.where(hidden, np.float32(-1e30), np.float32(0))[np.newaxis, np.newaxis]
        results_info: list[Info] = [
            ("output", TensorProto.FLOAT, [1, heads, "S", dim]),
            ("present_key", TensorProto.FLOAT, [1, kv_heads, "T", dim]),
            ("present_value", TensorProto.FLOAT, [1, kv_heads, "T", dim]),
        ]
        model = make_model(nodes, inputs, results_info, constants)
        self.runs = Bindings(open_session(model, work.threads))
        values = {name: self.runs.value(array) for name, array in feeds.items()}
        for _ in range(work.layers):
            pasts, presents = {}, {}
            for side, rows in (("key", work.key), ("value", work.value)):
                pasts[f"past_{side}"] = self.runs.value(rows[np.newaxis, :, :past].copy())
                presents[f"present_{side}"] = self.runs.value(np.zeros((1, kv_heads, total, dim), np.float32))
            self.runs.add(values | pasts, presents, "output", [1, heads, work.new_tokens, dim])
        self.cache_bytes = 2 * kv_heads * total * dim * 4

    def step(self) -> None:
        """One run."""
        self.runs.step()

    def output(self) -> NDArray[np.float32]:
        """The last rows, [H, R, D]."""
        return self.runs.result()[0, :, -CHECKED_ROWS:]


def exported_subgraph(work: Workload) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Nodes and constants of attention as most exporters unroll it."""
    shape, node = work.shape, helper.make_node
    heads, group, dim = shape.num_heads, shape.num_heads // shape.kv_num_heads, shape.head_dim
    constants = [
        numpy_helper.from_array(np.array([2]), "axis"),
        numpy_helper.from_array(np.array([1, 1, group, 1, 1]), "repeats"),
        numpy_helper.from_array(np.array([0, heads, -1, dim]), "merged"),
        numpy_helper.from_array(np.float32(1 / np.sqrt(dim)), "scale"),
    ]
    nodes = []
    for side in ("key", "value"):
        nodes += [
            node("Concat", [f"past_{side}", side], [f"present_{side}"], axis=2),
            node("Unsqueeze", [f"present_{side}", "axis"], [f"{side}_unsqueezed"]),
            node("Expand", [f"{side}_unsqueezed", "repeats"], [f"{side}_expanded"]),
            node("Reshape", [f"{side}_expanded", "merged"], [f"{side}_heads"]),
        ]
    nodes += [
        node("Transpose", ["key_heads"], ["key_transposed"], perm=[0, 1, 3, 2]),
        node("MatMul", ["query", "key_transposed"], ["products"]),
        node("Mul", ["products", "scale"], ["scores"]),
        node("Add", ["scores", "mask"], ["masked"]),
        node("Softmax", ["masked"], ["weights"], axis=-1),
        node("MatMul", ["weights", "value_heads"], ["output"]),
    ]
    return nodes, constants


class EmptyRun(Contender):
    """One run of a model that only negates the query: what crossing into onnxruntime costs."""

    def __init__(self, work: Workload) -> None:
        shape = [1, work.shape.num_heads, 1, work.shape.head_dim]
        model = make_model(
            [helper.make_node("Neg", ["query"], ["output"])],
            [("query", TensorProto.FLOAT, shape)],
            [("output", TensorProto.FLOAT, shape)],
        )
        self.runs = Bindings(open_session(model, work.threads))
        self.runs.add({"query": self.runs.value(work.query[np.newaxis].copy())}, {}, "output", shape)

    def step(self) -> None:
        """One run."""
        self.runs.step()


ENTRIES = [
    Entry(
        "ort_subgraph",
        partial(GrowingCache, kind="subgraph"),
        2,
        "onnxruntime: Concat, Expand, MatMul, Softmax, MatMul as exported; past and present f32",
        expanded=2,
        score_copies=4,
    ),
    Entry(
        "ort_attention",
        partial(GrowingCache, kind="attention"),
        3,
        "onnxruntime: ONNX Attention (opset 24) with past and present f32",
        score_copies=2,
    ),
    Entry(
        "ort_gqa_f32",
        partial(GroupQueryAttention, bits=32),
        1.5,
        "onnxruntime: GroupQueryAttention, f32, shared",
        score_copies=1,
    ),
    Entry(
        "ort_gqa_int8",
        partial(GroupQueryAttention, bits=8),
        0.5,
        "onnxruntime: GroupQueryAttention, int8 with one scale per tensor, shared",
        score_copies=1,
    ),
    Entry(
        "ort_gqa_int4",
        partial(GroupQueryAttention, bits=4),
        0.5,
        "onnxruntime: GroupQueryAttention, int4 with one scale per channel, shared",
        score_copies=1,
    ),
    Entry("ort_empty", EmptyRun, 0, "onnxruntime: a model without attention", ("decode",)),
]
