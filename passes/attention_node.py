"""What the patterns with an ONNX Attention node read of it."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .site import Mismatch, label


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


def operand(node: ir.Node, position: int) -> ir.Value | None:
    """An optional input."""
    return node.inputs[position] if position < len(node.inputs) else None


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()
