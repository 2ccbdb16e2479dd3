"""Attention that no pattern covers yet: listed with the reason, so that nobody wonders why it stayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from ..probabilities import operands_of
from ..site import Refusal, label
from ..walk import reads_cache

_CONTRIB = {
    "GroupQueryAttention",
    "MultiHeadAttention",
    "DecoderMaskedMultiHeadAttention",
    "DecoderMaskedSelfAttention",
    "Attention",
    "PagedAttention",
    "SparseAttention",
    "PackedAttention",
    "PackedMultiHeadAttention",
    "QAttention",
    "LongformerAttention",
}


def find(model: ir.Model) -> Iterator[Refusal]:
    """Attention of com.microsoft, in subgraphs, in model-local functions, and around Einsum products."""
    yield from _contrib(model.graph, "")
    for graph in model.graph.subgraphs():
        yield from _contrib(graph, " inside a subgraph of a control-flow node")
        yield from _attentions(graph, "is inside a subgraph of a control-flow node (a merged decoder)")
    for function in model.functions.values():
        yield from _contrib(function.graph, f" inside the model-local function {function.name}")
        calls = [
            node for node in model.graph if (node.domain, node.op_type) == (function.domain, function.name)
        ]
        cached = any(reads_cache(call.inputs) for call in calls)
        for refusal in _attentions(function.graph, f"is inside the model-local function {function.name}"):
            yield dataclasses.replace(refusal, cached=cached)
    for node in model.graph:
        if node.op_type == "Softmax" and node.domain == "":
            product = next((user for user in softmax_users(node) if user.op_type == "Einsum"), None)
            if product is not None:
                reason = f"the probabilities go to {label(product)}; Einsum products are not covered"
                yield Refusal("", label(node), reason, reads_cache(product.inputs), node)


def _contrib(graph: ir.Graph, where: str) -> Iterator[Refusal]:
    for node in graph:
        if node.domain == "com.microsoft" and node.op_type in _CONTRIB:
            yield _seen(node, f"com.microsoft {node.op_type}{where} is not covered")


def _attentions(graph: ir.Graph, why: str) -> Iterator[Refusal]:
    for node in graph:
        is_attention = node.op_type == "Attention" and node.domain == ""
        if is_attention or (node.op_type == "Softmax" and operands_of(node)):
            yield _seen(node, f"the attention {why}, which is not covered")


def softmax_users(softmax: ir.Node) -> list[ir.Node]:
    """The nodes that read the probabilities."""
    return list(softmax.outputs[0].consumers())


def _seen(node: ir.Node, reason: str) -> Refusal:
    return Refusal("", label(node), reason, reads_cache(operands_of(node)), node)
