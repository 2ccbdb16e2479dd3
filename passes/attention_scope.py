"""The graphs of a rewritten model that hold attentions: the main one, and branches of an If."""

from __future__ import annotations

import onnx_ir as ir

from .builder import Builder
from .float_attention import MaskSource
from .site import label
from .values import constant


class Scope:
    """One graph that holds attentions: the main graph, or a branch of an If of it.

    Attributes:
        graph: The graph.
        owner: The If it belongs to; None for the main graph.
        fresh: The branch starts again: it reads no past.
        builder: Inserts into it.
        masks: Its masks, once the lengths of a run are known.
        presents: Name -> appended tensor.
    """

    def __init__(self, graph: ir.Graph, owner: ir.Node | None, fresh: bool, names: Builder | None) -> None:
        self.graph, self.owner, self.fresh = graph, owner, fresh
        self.builder = Builder(graph, names)
        self.masks: MaskSource | None = None
        self.presents: dict[str, ir.Value] = {}


def restart(begin: ir.Node) -> tuple[ir.Value, bool] | None:
    """The graph input that makes the model start again, and the value of it that does; None without one."""
    given = begin.inputs[1].producer() if begin.inputs[1] is not None else None
    if given is None or given.op_type != "Where":
        return None
    condition, when_true, when_false = (required(given, position) for position in range(3))
    if not condition.is_graph_input():
        return None
    zeros = [
        (number := constant(value)) is not None and not number.any() for value in (when_true, when_false)
    ]
    return (condition, zeros[0]) if zeros[0] != zeros[1] else None


def owner_of(main: ir.Graph, graph: ir.Graph) -> tuple[ir.Node, str]:
    """The If of the main graph that a branch belongs to, and which branch it is."""
    for node in main:
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.GRAPH and attribute.value is graph and node.op_type == "If":
                return node, name
    raise ValueError("an attention is in a subgraph that is no branch of an If")


def required(node: ir.Node, position: int) -> ir.Value:
    """An input of a node; raises ValueError when it is absent."""
    value = optional(node, position)
    if value is None:
        raise ValueError(f"{label(node)} lacks its input {position}")
    return value


def optional(node: ir.Node, position: int) -> ir.Value | None:
    """An input of a node, or None."""
    return node.inputs[position] if position < len(node.inputs) else None
