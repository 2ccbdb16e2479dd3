"""ONNX Attention (opset 23 and later) that appends to its own past_key and past_value.

Emitted by: hand-written graphs and converters that target opset 23+.
Dims: B batch_size, H num_heads, K kv_num_heads, S sequence_length, P past, T = P + S, D head_dim.

    output, present_key, present_value = Attention(query, key, value, mask?, past_key [B K P D], past_value)
    query is [B H S D] or packed [B S H*D]; key and value likewise
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from ..proposal import AttentionMask, Proposal
from ..site import Mismatch, Operand, label
from ..values import is_op
from ..walk import Append, cache_input

NAME = "onnx_attention"


@dataclasses.dataclass(frozen=True)
class AttentionNode:
    """The attributes of an Attention node that both Attention patterns read."""

    node: ir.Node
    scale: float | None
    softcap: float
    causal: bool
    window_left: int
    heads: int | None
    kv_heads: int | None

    @classmethod
    def read(cls, node: ir.Node) -> AttentionNode:
        """Reads the attributes; raises Mismatch for what the op cannot serve."""
        if len(node.outputs) > 3 and (node.outputs[3].uses() or node.outputs[3].is_graph_output()):
            raise Mismatch(
                f"{label(node)} also returns its scores (qk_matmul_output), which would have to exist", node
            )
        if operand(node, 6) is not None:
            raise Mismatch(f"{label(node)} has nonpad_kv_seqlen, the length of a fixed cache buffer", node)
        right = _int(node, "right_window_size", -1)
        causal = _int(node, "is_causal", 0) == 1
        if right > 0 and not causal:
            raise Mismatch(f"{label(node)} sees {right} keys to the right (right_window_size)", node)
        scale = node.attributes.get("scale")
        softcap = node.attributes.get("softcap")
        return cls(
            node=node,
            scale=None if scale is None else scale.as_float(),
            softcap=0.0 if softcap is None else softcap.as_float(),
            causal=causal or right == 0,
            window_left=_int(node, "left_window_size", -1),
            heads=_int(node, "q_num_heads", 0) or None,
            kv_heads=_int(node, "kv_num_heads", 0) or None,
        )

    def required(self, position: int) -> ir.Value:
        """An input that must be there."""
        value = operand(self.node, position)
        if value is None:
            raise Mismatch(f"{label(self.node)} lacks its input {position}", self.node)
        return value

    @property
    def layout(self) -> str:
        """Packed 3-D operands come with the head counts as attributes; 4-D ones without."""
        return "BSC" if self.heads is not None and self.kv_heads is not None else "BHSD"


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


def operand(node: ir.Node, position: int) -> ir.Value | None:
    """An optional input."""
    return node.inputs[position] if position < len(node.inputs) else None


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()
