"""Removes what the fused sites leave behind: dead nodes, cache inputs and outputs, stale shape notes."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


def drop_cache_io(graph: ir.Graph, pasts: Iterable[ir.Value], presents: Iterable[ir.Value]) -> None:
    """Drops the given cache inputs and outputs and everything that only served them.

    Other inputs stay even when nothing reads them any more, so that callers need not change what they feed.
    """
    gone = set(presents)
    kept_outputs = [output for output in graph.outputs if output not in gone]
    graph.outputs.clear()
    graph.outputs.extend(kept_outputs)
    remove_dead_nodes(graph)
    dropped = set(pasts)
    stale = {symbol for value in dropped for symbol in _symbols(value)}
    kept_inputs = [value for value in graph.inputs if value not in dropped]
    graph.inputs.clear()
    graph.inputs.extend(kept_inputs)
    stale -= {symbol for value in kept_inputs for symbol in _symbols(value)}
    _forget_shapes(graph, stale)


def remove_dead_nodes(graph: ir.Graph) -> None:
    """Removes nodes that nothing reads, then initializers that nothing reads."""
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    inputs = set(graph.inputs)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and value not in inputs:
            del graph.initializers[name]


def _symbols(value: ir.Value) -> set[str]:
    if value.shape is None:
        return set()
    return {
        str(dim.value) for dim in value.shape if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    }


def _forget_shapes(graph: ir.Graph, stale: set[str]) -> None:
    """Drops the noted shape of inner values that speak of lengths no input has any more."""
    outputs = set(graph.outputs)
    for node in graph:
        for value in node.outputs:
            mentioned = " ".join(_symbols(value))
            if value not in outputs and any(symbol in mentioned for symbol in stale):
                value.shape = None
