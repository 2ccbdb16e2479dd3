"""Adds nodes and constants to a graph under names of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

PREFIX = "kvfuse"


def names_of(graph: ir.Graph) -> set[str | None]:
    """The names of all values of a graph and of the graphs inside it."""
    names: set[str | None] = set()
    for scope in (graph, *graph.subgraphs()):
        names.update(value.name for value in scope.inputs)
        names.update(scope.initializers)
    names.update(output.name for node in graph.all_nodes() for output in node.outputs)
    return names


class Builder:
    """Inserts nodes before or after a place in a graph; equal constants are made once.

    Args:
        graph: The graph.
        outer: The builder of the graph around it, whose names it does not use.
    """

    def __init__(self, graph: ir.Graph, outer: Builder | None = None) -> None:
        self._graph = graph
        self._names: set[str | None] = set() if outer is None else outer._names
        self._names.update(names_of(graph))
        self._names.update(node.name for node in graph.all_nodes())
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._place: ir.Node | None = None
        self._after = False

    @property
    def opset(self) -> int:
        """The version of the default operator set."""
        return self._graph.opset_imports.get("", 0)

    def before(self, node: ir.Node) -> None:
        """New nodes go in front of `node`."""
        self._place, self._after = node, False

    def after(self, node: ir.Node) -> None:
        """New nodes follow `node` (and each other)."""
        self._place, self._after = node, True

    def fresh(self, hint: str) -> str:
        """A name that nothing in the graph has."""
        name, count = f"{PREFIX}.{hint}", 1
        while name in self._names:
            name, count = f"{PREFIX}.{hint}.{count}", count + 1
        self._names.add(name)
        return name

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        outputs: Sequence[str] = (),
        name: str = "",
    ) -> ir.Value:
        """Adds a node and returns its first output (named after the op when `outputs` gives no names)."""
        label = name or self.fresh(op_type)
        names = list(outputs) or [label]
        values = [ir.Value(name=output) for output in names]
        self._names.update((label, *names))
        made = ir.node(
            op_type, list(inputs), dict(attributes or {}), domain=domain, outputs=values, name=label
        )
        if self._place is None:
            self._graph.append(made)
        elif self._after:
            self._graph.insert_after(self._place, made)
            self._place = made
        else:
            self._graph.insert_before(self._place, made)
        return made.outputs[0]

    def constant(self, array: np.ndarray, hint: str) -> ir.Value:
        """An initializer with the array; the same one for an equal array."""
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            name = self.fresh(hint)
            tensor = ir.tensor(array, name=name)
            value = ir.Value(
                name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            self._graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def integers(self, numbers: Sequence[int]) -> ir.Value:
        """An int64 vector."""
        return self.constant(np.array(numbers, np.int64), "shape" if numbers else "scalar_shape")

    def integer(self, number: int) -> ir.Value:
        """An int64 scalar."""
        return self.constant(
            np.array(number, np.int64), f"int_{number}" if number >= 0 else f"int_minus_{-number}"
        )

    def axis_length(self, value: ir.Value, axis: int) -> ir.Value:
        """int64 [1]: the size of one axis."""
        if self.opset >= 15:
            return self.node("Shape", [value], {"start": axis, "end": axis + 1})
        return self.node("Gather", [self.node("Shape", [value]), self.integers([axis])], {"axis": 0})
