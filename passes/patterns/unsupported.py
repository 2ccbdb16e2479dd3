"""Attention that no pattern covers yet: listed with the reason, so that nobody wonders why it stayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from ..inline_functions import obstacle
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

_WHY = {"PagedAttention": "keeps its cache in pages; only a cache that grows can be fused"}
# Those that a pattern of their own reads in the main graph.
_COVERED = {"GroupQueryAttention", "MultiHeadAttention", "DecoderMaskedMultiHeadAttention", "Attention"}


_IN_SUBGRAPH = (
    "is inside a subgraph of a control-flow node; expected one If on a graph input, with a decoder in each "
    "of its branches and the caches appended in one of them"
)


def find(model: ir.Model) -> Iterator[Refusal]:
    """Attention of com.microsoft, in subgraphs and in model-local functions."""
    yield from _contrib(model.graph, "", _CONTRIB - _COVERED)
    for graph in model.graph.subgraphs():
        yield from _contrib(graph, " inside a subgraph of a control-flow node", _CONTRIB)
        yield from _attentions(graph, _IN_SUBGRAPH)
    for function in model.functions.values():
        yield from _contrib(function.graph, f" inside the model-local function {function.name}", _CONTRIB)
        calls = [
            node for node in model.graph if (node.domain, node.op_type) == (function.domain, function.name)
        ]
        cached = any(reads_cache(call.inputs) for call in calls)
        why = f"is inside the model-local function {function.name}, which stays a function"
        reason = obstacle(model, function)
        for refusal in _attentions(function.graph, f"{why} because {reason}" if reason else why):
            yield dataclasses.replace(refusal, cached=cached)


def _contrib(graph: ir.Graph, where: str, names: set[str]) -> Iterator[Refusal]:
    for node in graph:
        if node.domain == "com.microsoft" and node.op_type in names:
            why = _WHY.get(node.op_type, "is not covered")
            yield _seen(node, f"com.microsoft {node.op_type}{where} {why}")


def _attentions(graph: ir.Graph, why: str) -> Iterator[Refusal]:
    for node in graph:
        is_attention = node.op_type == "Attention" and node.domain == ""
        if is_attention or (node.op_type == "Softmax" and operands_of(node)):
            yield _seen(node, f"the attention {why}")


def _seen(node: ir.Node, reason: str) -> Refusal:
    return Refusal("", label(node), reason, reads_cache(operands_of(node)), node)
