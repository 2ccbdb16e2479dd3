"""Builds models of a few kvfuse nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from reference import OpConfig

ELEMENT_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
OPTIONAL_INPUTS = ("key_padding", "attention_bias", "head_sink")


@dataclass(frozen=True)
class Graph:
    """What a test model holds.

    Attributes:
        layers: one attention node each; all read the same query, key and value.
        dtype: float32 or float16.
        key_dtype: another element type for the key, which must not load.
        optional: the optional inputs the nodes read, a subset of OPTIONAL_INPUTS.
        slots: False gives the plain three-input form with private state.
        uniform: declares that the scalar past length is used, and makes it a graph output.
        fingerprint: binds sequences to this model.
        gates: what the next query has to wait for once layer i is done (-1: KvCacheBegin): "delay", a
            loop of `rounds` products, or "check", which fails unless the input `index` is 0.
        padding_type: element type of key_padding.
        declared_layers: what KvCacheBegin is told instead of the nodes' own layer keys.
        constants: query, key and value as initializers instead of inputs.
        bare: writes only the attribute `layer`, so that the rest take their defaults.
    """

    layers: tuple[OpConfig, ...]
    dtype: str = "float32"
    key_dtype: str | None = None
    optional: tuple[str, ...] = ()
    slots: bool = True
    uniform: bool = False
    fingerprint: str = "0" * 64
    gates: Mapping[int, str] = field(default_factory=dict)
    padding_type: int = TensorProto.INT64
    declared_layers: str | None = None
    bare: bool = False
    constants: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None = None


def _rounds_body() -> onnx.GraphProto:
    """Loop body: one product of 256 x 256 matrices a round, about a millisecond."""
    return helper.make_graph(
        [
            helper.make_node("MatMul", ["carried", "identity"], ["next"]),
            helper.make_node("Identity", ["go_on"], ["still_on"]),
        ],
        "rounds",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, [256, 256]),
        ],
        [
            helper.make_tensor_value_info("still_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [256, 256]),
        ],
    )


def _gate(kind: str, name: str, after: str, like: str) -> list[onnx.NodeProto]:
    """Nodes that make `name`, a scalar zero of `like`'s type, slowly or if allowed, once `after` is there."""
    nodes = [  # an integer zero that cannot be known before `after`
        helper.make_node("Shape", [after], [f"{name}_shape"]),
        helper.make_node("ReduceSum", [f"{name}_shape"], [f"{name}_size"], keepdims=0),
        helper.make_node("Mul", [f"{name}_size", "zero"], [f"{name}_nothing"]),
    ]
    if kind == "check":  # a Gather out of bounds is an error of the run, not of the model
        nodes += [
            helper.make_node("Add", ["index", f"{name}_nothing"], [f"{name}_index"]),
            helper.make_node("Gather", ["one_row", f"{name}_index"], [f"{name}_total"]),
        ]
    else:
        nodes += [
            helper.make_node("Cast", [f"{name}_nothing"], [f"{name}_float"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"{name}_float", "identity"], [f"{name}_start"]),
            helper.make_node("Loop", ["rounds", "", f"{name}_start"], [f"{name}_end"], body=_rounds_body()),
            helper.make_node("ReduceSum", [f"{name}_end"], [f"{name}_total"], keepdims=0),
        ]
    return [*nodes, helper.make_node("CastLike", [f"{name}_total", like], [name])]


def _inputs(graph: Graph) -> list[onnx.ValueInfoProto]:
    element = ELEMENT_TYPES[graph.dtype]
    key_element = ELEMENT_TYPES[graph.key_dtype or graph.dtype]
    elements = {"query": element, "key": key_element, "value": element}
    infos = []
    if graph.constants is None:
        infos = [helper.make_tensor_value_info(name, kind, [None] * 4) for name, kind in elements.items()]
    kinds = {"key_padding": graph.padding_type, "attention_bias": element, "head_sink": element}
    # attention_bias comes in several ranks, so it has no declared shape
    ranks: dict[str, list[None] | None] = {
        "key_padding": [None] * 2,
        "attention_bias": None,
        "head_sink": [None],
    }
    infos += [helper.make_tensor_value_info(name, kinds[name], ranks[name]) for name in graph.optional]
    gates = set(graph.gates.values())
    if "delay" in gates:
        infos.append(helper.make_tensor_value_info("rounds", TensorProto.INT64, []))
    if "check" in gates:
        infos.append(helper.make_tensor_value_info("index", TensorProto.INT64, []))
    if graph.slots:
        for name in ("kv_sequence", "kv_past_length"):
            infos.append(helper.make_tensor_value_info(name, TensorProto.INT64, [f"{name}_rows"]))
    return infos


def _begin(graph: Graph) -> onnx.NodeProto:
    keys = graph.declared_layers
    return helper.make_node(
        "KvCacheBegin",
        ["kv_sequence", "kv_past_length", "query"],
        ["slots", "past_length", "past_lengths"],
        domain="kvfuse",
        fingerprint=graph.fingerprint,
        layers="\n".join(layer.layer for layer in graph.layers) if keys is None else keys,
        uniform=int(graph.uniform),
    )


def _layers(graph: Graph) -> list[onnx.NodeProto]:
    """The attention nodes, each query passed through the gates before it."""
    nodes = []
    query = "query"
    optional = [name if name in graph.optional else "" for name in OPTIONAL_INPUTS]
    for index, layer in enumerate(graph.layers):
        if index - 1 in graph.gates:
            after = f"output_{index - 1}" if index else "slots"
            nodes += _gate(graph.gates[index - 1], f"gate_{index}", after, "query")
            nodes.append(helper.make_node("Add", [query, f"gate_{index}"], [f"query_{index}"]))
            query = f"query_{index}"
        inputs = [query, "key", "value", "slots" if graph.slots else "", *optional]
        while not inputs[-1]:
            inputs.pop()
        outputs = [f"output_{index}"]
        attributes = {"layer": layer.layer} if graph.bare else layer.attributes()
        nodes.append(helper.make_node("QuantizedKvSdpa", inputs, outputs, domain="kvfuse", **attributes))
    return nodes


def build_model(graph: Graph) -> onnx.ModelProto:
    """Builds the model: outputs output_0, output_1, … and, with slots, past_lengths (and past_length)."""
    nodes = [*([_begin(graph)] if graph.slots else []), *_layers(graph)]
    constants: dict[str, NDArray[Any]] = {}
    names = []
    if graph.constants is not None:
        constants |= dict(zip(("query", "key", "value"), graph.constants, strict=True))
    if graph.slots:
        constants |= {"kv_sequence": np.array([0], np.int64), "kv_past_length": np.array([-1], np.int64)}
        names += ["past_lengths", *(["past_length"] if graph.uniform else [])]
    if graph.gates:
        constants |= {"identity": np.eye(256, dtype=np.float32), "zero": np.array(0, np.int64)}
        constants |= {"one_row": np.zeros(1, np.float32)}
    element = ELEMENT_TYPES[graph.dtype]
    outputs = [helper.make_tensor_value_info(name, TensorProto.INT64, None) for name in names]
    for index in range(len(graph.layers)):
        outputs.append(helper.make_tensor_value_info(f"output_{index}", element, None))
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    body = helper.make_graph(nodes, "test", _inputs(graph), outputs, initializers)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("kvfuse", 1)]
    return helper.make_model(body, opset_imports=opsets, ir_version=8)
