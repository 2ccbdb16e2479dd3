"""Concat(past, new) along the sequence axis, feeding ONNX Attention (opset 23 and later).

Emitted by: torch.onnx.export(dynamo=True) with opset 23 or later, transformers' OnnxExporter.
Dims: B batch_size, H num_heads, K kv_num_heads, S sequence_length, P past, T = P + S, D head_dim.

    output = Attention(query [B H S D], repeat_kv(Concat(past_key, key)), repeat_kv(Concat(past_value,
    value)), mask?)
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ..attention_node import AttentionNode, operand
from ..proposal import AttentionMask, Proposal
from ..site import Mismatch, Operand, label
from ..values import is_op
from ..walk import cache_layout, find_append

NAME = "concat_attention"


def anchors(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every Attention node without a past of its own."""
    return (node for node in graph if is_op(node, "Attention") and operand(node, 4) is None)


def propose(node: ir.Node) -> Proposal:
    """Describes an Attention node behind a Concat with the cache.

    Raises:
        Mismatch: It is none that this pattern covers; the sentence says why.
    """
    attention = AttentionNode.read(node)
    key_operand = attention.required(1)
    key = find_append(key_operand, "key")
    value = find_append(attention.required(2), "value")
    if value.factors:
        raise Mismatch(f"the value is multiplied by {label(value.factors[0][0])} before it is averaged", node)
    if attention.causal or attention.window_left >= 0:
        raise Mismatch(
            f"{label(node)} aligns is_causal (and its window) to the first key because the cache is "
            "joined outside of it; "
            "queries after the first run would not see the cache as a decoder means it",
            node,
        )
    key_layout, value_layout = cache_layout(key), cache_layout(value)
    return Proposal(
        pattern=NAME,
        anchor=node,
        query=Operand(attention.required(0), attention.layout),
        key=key,
        value=value,
        key_cache=Operand(key.past, key_layout),
        value_cache=Operand(value.past, value_layout),
        new_key=Operand(key.new, key_layout),
        new_value=Operand(value.new, value_layout),
        key_operand=key_operand,
        value_operand=attention.required(2),
        output=Operand(node.outputs[0], attention.layout),
        mask=AttentionMask(operand(node, 3)),
        factors=key.factors,
        scale=attention.scale,
        softcap=attention.softcap,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
    )
