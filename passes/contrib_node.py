"""Small readers of com.microsoft's attention nodes, shared by their patterns."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from .attention_node import operand
from .preamble import MS
from .site import Mismatch, label
from .values import dtype_of
from .walk import Append, cache_input


def nodes(graph: ir.Graph, *names: str) -> Iterator[ir.Node]:
    """The com.microsoft nodes with one of the names."""
    return (node for node in graph if node.domain == MS and node.op_type in names)


def integer(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def number(node: ir.Node, name: str, default: float) -> float:
    """A float attribute."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()


def scale_of(node: ir.Node) -> float | None:
    """The scale; None for 1/sqrt(head_dim), which 0 stands for as well."""
    return number(node, "scale", 0.0) or None


def heads_of(node: ir.Node, name: str = "num_heads") -> int:
    """A head count, which must be there."""
    count = integer(node, name, 0)
    if count < 1:
        raise Mismatch(f"{label(node)} has {name} = {count}; expected 1 or more", node)
    return count


def required(node: ir.Node, position: int, what: str) -> ir.Value:
    """An input that must be there."""
    value = operand(node, position)
    if value is None:
        raise Mismatch(f"{label(node)} has no {what} (input {position})", node)
    return value


def refuse_inputs(node: ir.Node, reasons: dict[int, str]) -> None:
    """Raises Mismatch when one of the inputs is there: `{node} {reason}`."""
    for position, reason in reasons.items():
        if operand(node, position) is not None:
            raise Mismatch(f"{label(node)} {reason}", node)


def refuse_scores(node: ir.Node) -> None:
    """Raises Mismatch when somebody reads the scores, a fourth output."""
    if len(node.outputs) > 3 and (node.outputs[3].uses() or node.outputs[3].is_graph_output()):
        raise Mismatch(f"{label(node)} also returns its scores, which would have to exist", node)


def own_append(node: ir.Node, past: ir.Value, new: ir.Value, output: int) -> Append:
    """How a node appends to its own past, along axis 2 of [B, K, P, D].

    Raises:
        Mismatch: The past is no float graph input whose length may change, or no present is returned.
    """
    source = cache_input(past)
    if source is None:
        raise Mismatch(f"the past of {label(node)} is {label(past)}, not a graph input", node)
    if dtype_of(source) not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        raise Mismatch(
            f"the cache input {label(source)} holds {dtype_of(source).name}; expected float or float16 (it "
            "is quantized already)",
            node,
        )
    if len(node.outputs) <= output or not node.outputs[output].name:
        raise Mismatch(f"{label(node)} takes a past but returns no present", node)
    return Append(source, new, node.outputs[output], node, 2, ())


def refuse_fixed(past: ir.Value, axis: int, node: ir.Node) -> None:
    """Raises Mismatch for a cache input of fixed length: a buffer that is written into, or a ring."""
    if past.shape is not None and isinstance(past.shape[axis], int):
        raise Mismatch(
            f"the cache input {label(past)} is a fixed buffer of {past.shape[axis]} tokens; only a cache "
            "that grows can be fused",
            node,
        )
