"""Small decoders with a float cache, in every spelling of attention that the passes must read (or refuse).

`decoder(**options)` builds one; each option changes one link of the chain, so that a test says its subject.
Dims: B batch_size, H = 4 heads, K = 2 kv heads, S new tokens, P cached, T = P + S, D = 8.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 4, 2, 8, 16, 32
LOWEST = float(np.finfo(np.float32).min)


class GraphBuilder:
    """Collects nodes and initializers; every method returns the name of a value.

    Names are numbered from `first` on, so that a subgraph can have names of its own.
    """

    def __init__(self, dtype=np.float32, seed: int = 0, first: int = 0) -> None:
        self.dtype = np.dtype(dtype)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.random = np.random.default_rng(seed)
        self._count = first

    @property
    def element(self) -> int:
        return helper.np_dtype_to_tensor_dtype(self.dtype)

    def op(
        self,
        op_type: str,
        *inputs: str,
        outputs: int = 1,
        name: str = "",
        domain: str = "",
        **attributes: Any,
    ):
        self._count += 1
        label = name or f"{op_type}_{self._count}"
        names = [label if i == 0 else f"{label}.{i}" for i in range(outputs)]
        self.nodes.append(
            helper.make_node(op_type, list(inputs), names, name=f"n_{label}", domain=domain, **attributes)
        )
        return names[0] if outputs == 1 else names

    def const(self, array, dtype=None) -> str:
        self._count += 1
        name = f"c{self._count}"
        array = np.asarray(array, self.dtype if dtype is None else dtype)
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.const(numbers, np.int64)

    def number(self, number) -> str:
        return self.const(number, np.int64)

    def weight(self, *shape: int) -> str:
        return self.const(self.random.standard_normal(shape) / np.sqrt(shape[0]))

    def input(self, name: str, shape, element: int | None = None) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, element or self.element, shape))
        return name

    def output(self, value: str, name: str, shape=None, element: int | None = None) -> None:
        if value != name:
            self.nodes.append(helper.make_node("Identity", [value], [name]))
        self.outputs.append(helper.make_tensor_value_info(name, element or self.element, shape))

    def dim(self, value: str, axis: int) -> str:
        """Scalar int64."""
        return self.op("Gather", self.op("Shape", value), self.number(axis), axis=0)

    def vector(self, scalar: str) -> str:
        return self.op("Reshape", scalar, self.ints(1))

    def model(self, opset: int = 18, ir_version: int = 9) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", opset)]
        if any(node.domain == "com.microsoft" for node in self.nodes):
            opsets.append(helper.make_opsetid("com.microsoft", 1))
        return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)


def decoder(
    *,
    layers: int = 1,
    kv_heads: int = KV_HEADS,
    scale: str = "scores_mul",
    factor: float = HEAD_DIM**-0.5,
    repeat: str = "expand",
    mask: str = "causal",
    mask_form: str = "add",
    window: int = 3,
    softcap: str = "",
    finish: Callable[[GraphBuilder, str, dict[str, str]], str] | None = None,
    guard: bool = False,
    dtype=np.float32,
    opset: int = 18,
    ir_version: int = 9,
    batch: Any = "batch",
    layer: Callable[..., tuple[str, str, str]] | None = None,
    touch: Callable[[GraphBuilder, dict[str, str]], None] | None = None,
    ids_first: bool = True,
) -> onnx.ModelProto:
    """A decoder of input_ids, attention_mask (where the mask reads it) and past/present caches.

    Args:
        window: Keys that a query sees where the mask has a window.
        finish: Called with the scores that the Softmax would read; returns the ones it shall read.
        layer: Writes the attention: (builder, names, options) -> (output [B, S, C], presents).
        touch: Called with the builder and the names of the first layer's values, to add readers or outputs.
    """
    b = GraphBuilder(dtype)
    if ids_first:
        b.input("input_ids", [batch, "sequence"], TensorProto.INT64)
    if "padding" in mask:
        b.input("attention_mask", [batch, "total"], TensorProto.INT64)
    pasts = [
        [b.input(f"past.{i}.{side}", [batch, kv_heads, "past", HEAD_DIM]) for side in ("key", "value")]
        for i in range(layers)
    ]
    if not ids_first:
        b.input("input_ids", [batch, "sequence"], TensorProto.INT64)
    x = b.op("Gather", b.weight(VOCABULARY, WIDTH), "input_ids")
    options = {
        "kv_heads": kv_heads, "scale": scale, "factor": factor, "repeat": repeat, "mask": mask,
        "mask_form": mask_form, "window": window, "softcap": softcap, "finish": finish, "guard": guard,
    }  # fmt: skip
    for i, (past_key, past_value) in enumerate(pasts):
        names = project(b, x, kv_heads) | {"past_key": past_key, "past_value": past_value, "x": x}
        y, present_key, present_value = (layer or sdpa)(b, names, options)
        shape = [batch, kv_heads, "all", HEAD_DIM]
        b.output(present_key, f"present.{i}.key", shape)
        b.output(present_value, f"present.{i}.value", shape)
        if i == 0 and touch is not None:
            touch(b, names)
        x = b.op("Add", x, b.op("MatMul", y, b.weight(HEADS * HEAD_DIM, WIDTH)))
    b.output(b.op("MatMul", x, b.weight(WIDTH, VOCABULARY)), "logits", [batch, "sequence", VOCABULARY])
    return b.model(opset, ir_version)


def project(b: GraphBuilder, x: str, kv_heads: int) -> dict[str, str]:
    """query, key, value as [B, heads, S, D]."""
    names = {}
    for side, heads in (("query", HEADS), ("key", kv_heads), ("value", kv_heads)):
        flat = b.op("MatMul", x, b.weight(WIDTH, heads * HEAD_DIM))
        split = b.op("Reshape", flat, b.ints(0, 0, heads, HEAD_DIM))
        names[side] = b.op("Transpose", split, perm=[0, 2, 1, 3])
    return names


def merge_heads(b: GraphBuilder, y: str) -> str:
    """[B, H, S, D] -> [B, S, C]."""
    return b.op("Reshape", b.op("Transpose", y, perm=[0, 2, 1, 3]), b.ints(0, 0, HEADS * HEAD_DIM))


def sdpa(b: GraphBuilder, names: dict[str, str], options: dict[str, Any]) -> tuple[str, str, str]:
    """Decomposed attention; adds present_key, present_value, keys, values, scores, weights, y to `names`."""
    names["present_key"] = b.op("Concat", names["past_key"], names["key"], axis=2)
    names["present_value"] = b.op("Concat", names["past_value"], names["value"], axis=2)
    names["keys"] = repeat_kv(b, names["present_key"], options["repeat"], options["kv_heads"])
    names["values"] = repeat_kv(b, names["present_value"], options["repeat"], options["kv_heads"])
    names["scores"] = scores(b, names, options)
    weights = b.op("Softmax", names["scores"], axis=-1)
    names["weights"] = weights
    if options["guard"]:
        weights = b.op("Where", b.op("IsNaN", weights), b.const(0.0), weights)
    names["y"] = b.op("MatMul", weights, names["values"])
    return merge_heads(b, names["y"]), names["present_key"], names["present_value"]


def repeat_kv(b: GraphBuilder, value: str, form: str, kv_heads: int) -> str:
    """K heads -> H heads; the forms ending in "_wrong" order the heads as h % K."""
    group = HEADS // kv_heads
    if form == "none":
        return value
    if form == "gather":
        return b.op("Gather", value, b.ints(*np.repeat(np.arange(kv_heads), group)), axis=1)
    if form == "gather_wrong":
        return b.op("Gather", value, b.ints(*np.tile(np.arange(kv_heads), group)), axis=1)
    if form == "tile_wrong":
        return b.op("Tile", value, b.ints(1, group, 1, 1))
    if form == "concat":
        return b.op("Concat", *[value] * group, axis=1)
    wide = b.op("Unsqueeze", value, b.ints(2))
    total = b.vector(b.dim(value, 2))
    batch = b.vector(b.dim(value, 0))
    if form == "tile":
        wide = b.op("Tile", wide, b.ints(1, 1, group, 1, 1))
    else:
        shape = b.op("Concat", batch, b.ints(kv_heads, group), total, b.ints(HEAD_DIM), axis=0)
        wide = b.op("Expand", wide, shape)
    return b.op("Reshape", wide, b.op("Concat", batch, b.ints(HEADS), total, b.ints(HEAD_DIM), axis=0))


def scores(b: GraphBuilder, names: dict[str, str], options: dict[str, Any]) -> str:
    query, keys, factor = names["query"], names["keys"], options["factor"]
    keys = b.op("Transpose", keys, perm=[0, 1, 3, 2])
    form = options["scale"]
    if form in ("query", "both", "per_head"):
        by = {
            "query": factor,
            "both": np.sqrt(factor),
            "per_head": factor * np.arange(1, HEADS + 1).reshape(HEADS, 1, 1),
        }
        query = b.op("Mul", query, b.const(by[form]))
    if form in ("key", "both"):
        keys = b.op("Mul", keys, b.const(factor if form == "key" else np.sqrt(factor)))
    if form == "runtime":
        root = b.op("Sqrt", b.op("Cast", b.dim(query, 3), to=b.element))
        query = b.op("Div", query, root)
    value = b.op("MatMul", query, keys)
    names["raw"] = value
    if form == "scores_mul":
        value = b.op("Mul", value, b.const(factor))
    elif form == "scores_div":
        value = b.op("Div", value, b.const([1.0 / factor]))
    if options["softcap"] == "before":
        value = cap(b, value)
    if options["mask"] != "none":
        value = apply_mask(b, value, names, options)
    if options["softcap"] == "after":
        value = cap(b, value)
    if form == "after_mask":
        value = b.op("Mul", value, b.const(factor))
    return value if options["finish"] is None else options["finish"](b, value, names)


def cap(b: GraphBuilder, value: str) -> str:
    return b.op("Mul", b.op("Tanh", b.op("Div", value, b.const(5.0))), b.const(5.0))


def apply_mask(b: GraphBuilder, value: str, names: dict[str, str], options: dict[str, Any]) -> str:
    past = b.dim(names["past_key"], 2)
    total = b.op("Add", past, b.dim("input_ids", 1))
    position = b.op("Unsqueeze", b.op("Range", past, total, b.number(1)), b.ints(1))  # S 1
    key = b.op("Unsqueeze", b.op("Range", b.number(0), total, b.number(1)), b.ints(0))  # 1 T
    if "alibi" in options["mask"]:
        slopes = b.const(np.arange(1, HEADS + 1).reshape(HEADS, 1, 1) / 8)
        distance = b.op("Cast", b.op("Sub", key, position), to=b.element)
        value = b.op("Add", value, b.op("Mul", distance, slopes))
    visible = b.op("LessOrEqual", key, position)
    if "window" in options["mask"]:
        near = b.op("Greater", key, b.op("Sub", position, b.number(options["window"])))
        visible = b.op("And", visible, near)
    if "chunks" in options["mask"]:
        same = b.op("Equal", b.op("Div", key, b.number(3)), b.op("Div", position, b.number(3)))
        visible = b.op("And", visible, same)
    if "padding" in options["mask"]:
        real = b.op("Unsqueeze", b.op("Cast", "attention_mask", to=TensorProto.BOOL), b.ints(1, 2))
        visible = real if options["mask"] == "padding" else b.op("And", visible, real)
    names["visible"] = visible
    if options["mask_form"] == "where":
        return b.op("Where", visible, value, b.const(-np.inf))
    hidden = {"add": -np.inf, "add_lowest": LOWEST, "add_small": -3.0}[options["mask_form"]]
    return b.op("Add", value, b.op("Where", visible, b.const(0.0), b.const(hidden)))
