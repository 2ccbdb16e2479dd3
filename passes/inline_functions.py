"""Inlines the model-local functions that stand between a cache and its attention.

A call is inlined when it is given cache data; what such a function calls in turn is looked at again. Each
call becomes nodes of its own, so two calls of one function are two sites. All other functions stay.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from .walk import reads_cache

_Id = tuple[str, str, str]
_MAX_ROUNDS = 16


def inline_functions(model: ir.Model) -> ir.Model:
    """A copy without the functions that hide a site; the given model itself when there is none.

    A function that cannot be inlined (another opset than the model's, a graph as an attribute) stays.
    """
    inlined = model
    for _ in range(_MAX_ROUNDS):
        chosen = _hiding(inlined)
        if not chosen:
            break
        copy = inlined.clone()
        before = _names(model)
        for function in copy.functions.values():
            _forget_constants(function)
        try:
            InlinePass(criteria=_Chosen(chosen))(copy)
        except Exception:  # onnx_ir wraps whatever a malformed function trips over; the functions then stay
            break
        _rename_apart(copy, before)
        inlined = copy
    return inlined


class _Chosen:
    """True for the functions with one of the given ids."""

    def __init__(self, ids: set[_Id]) -> None:
        self._ids = ids

    def __call__(self, function: ir.Function) -> bool:
        return function.identifier() in self._ids


def obstacle(model: ir.Model, function: ir.Function) -> str:
    """Why a function cannot be inlined; "" when it can."""
    for domain, version in function.opset_imports.items():
        own = model.opset_imports.get(domain, version)
        if own != version:
            return f"it is written for version {version} of the operator set '{domain}', the model for {own}"
    if any(_is_graph(attribute) for attribute in function.attributes.values()):
        return "it takes a graph as an attribute"
    if any(output.producer() is None for output in function.outputs):
        return "it returns one of its inputs as it is"
    return ""


def _hiding(model: ir.Model) -> set[_Id]:
    """The functions that are called with cache data outside of functions, and that can be inlined."""
    found: set[_Id] = set()
    for node in model.graph.all_nodes():
        function = model.functions.get(node.op_identifier())
        if function is None or function.identifier() in found or obstacle(model, function):
            continue
        # What another call makes of a cache is seen when that one was inlined.
        if reads_cache(node.inputs, model.functions) and not any(
            _is_graph(a) for a in node.attributes.values()
        ):
            found.add(function.identifier())
    return found


def _is_graph(attribute: ir.Attr) -> bool:
    return attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _names(model: ir.Model) -> set[str | None]:
    """The names of all values outside of functions."""
    names = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in model.graph.all_nodes():
        names.update(output.name for output in node.outputs)
    return names


def _forget_constants(function: ir.Function) -> None:
    """Parts Constant nodes' outputs from their tensors: a new name would go into the given model."""
    for node in function.all_nodes():
        for output in node.outputs:
            output.const_value = None


def rename(value: ir.Value, name: str | None) -> None:
    """Names the output of a node, and not the tensor that it may be known to hold."""
    known, value.const_value = value.const_value, None
    value.name, value.const_value = name, known


def _rename_apart(model: ir.Model, before: set[str | None]) -> None:
    """Gives new inlined values that a subgraph also names another name (the inliner looks at one scope)."""
    inner = {
        value.name
        for graph in model.graph.subgraphs()
        for node in graph
        for value in (*node.outputs, *graph.initializers.values())
    }
    taken = _names(model) | before
    for node in model.graph:
        for output in node.outputs:
            if output.name in inner and not output.is_graph_output():
                count = 2
                while f"{output.name}.{count}" in taken:
                    count += 1
                rename(output, f"{output.name}.{count}")
                taken.add(output.name)
