"""ONNX Attention (opset 23 and later) that appends to its own past_key and past_value.

Emitted by: hand-written graphs and converters that target opset 23+.
Dims: B batch_size, H num_heads, K kv_num_heads, S sequence_length, P past, T = P + S, D head_dim.

    output, present_key, present_value = Attention(query, key, value, mask?, past_key [B K P D], past_value)
    query is [B H S D] or packed [B S H*D]; key and value likewise
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ..attention_node import AttentionNode, operand
from ..proposal import AttentionMask, Proposal
from ..site import Mismatch, Operand, label
from ..values import is_op
from ..walk import Append, cache_input

NAME = "onnx_attention"


def anchors(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every Attention node with a past."""
    return (node for node in graph if is_op(node, "Attention") and operand(node, 4) is not None)


def propose(node: ir.Node) -> Proposal:
    """Describes an Attention node with its own past.

    Raises:
        Mismatch: It is none that this pattern covers; the sentence says why.
    """
    attention = AttentionNode.read(node)
    if len(node.outputs) < 3:
        raise Mismatch(f"{label(node)} takes a past but returns no present", node)
    key = _own_append(attention, "key", 1)
    value = _own_append(attention, "value", 2)
    return Proposal(
        pattern=NAME,
        anchor=node,
        query=Operand(attention.required(0), attention.layout),
        key=key,
        value=value,
        key_cache=Operand(key.past, "BHSD"),
        value_cache=Operand(value.past, "BHSD"),
        new_key=Operand(key.new, attention.layout),
        new_value=Operand(value.new, attention.layout),
        key_operand=key.present,
        value_operand=value.present,
        output=Operand(node.outputs[0], attention.layout),
        mask=AttentionMask(operand(node, 3), attention.causal, attention.window_left),
        scale=attention.scale,
        softcap=attention.softcap,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
    )


def _own_append(attention: AttentionNode, what: str, position: int) -> Append:
    past = attention.required(position + 3)
    source = cache_input(past)
    if source is None:
        raise Mismatch(
            f"past_{what} of {label(attention.node)} is {label(past)}, not a graph input", attention.node
        )
    return Append(
        source, attention.required(position), attention.node.outputs[position], attention.node, 2, ()
    )
