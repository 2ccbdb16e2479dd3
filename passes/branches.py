"""Takes the branches of an If out as plain models, and puts two rewritten ones back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from .builder import Builder
from .inline_functions import rename
from .legality import aliases
from .probabilities import operands_of
from .site import AttentionSite, Operand
from .values import is_op
from .walk import cache_input

_OTHER = {"then_branch": "else_branch", "else_branch": "then_branch"}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The If of a merged decoder, and which of its attributes holds the branch that reads the caches."""

    node: ir.Node
    past_branch: str

    @property
    def fresh_branch(self) -> str:
        """The attribute that holds the branch without a past."""
        return _OTHER[self.past_branch]


def find_choice(model: ir.Model) -> Choice | None:
    """The one If on a graph input with attention in both branches and growing caches in one, else None."""
    found = []
    for node in model.graph:
        if not is_op(node, "If") or node.inputs[0] is None or not _must_be_fed(node.inputs[0]):
            continue
        graphs = {name: node.attributes[name].as_graph() for name in _OTHER}
        if not all(any(_is_attention(inner) for inner in graph) for graph in graphs.values()):
            continue
        past = [name for name, graph in graphs.items() if any(_appends(inner) for inner in graph)]
        if len(past) == 1 and not _clashes(model.graph, graphs.values()):
            found.append(Choice(node, past[0]))
    return found[0] if len(found) == 1 else None


def _must_be_fed(condition: ir.Value) -> bool:
    is_flag = condition.dtype == ir.DataType.BOOL  # and no cache, which the rewritten model would not have
    return condition.is_graph_input() and condition.const_value is None and is_flag


def _is_attention(node: ir.Node) -> bool:
    return node.op_type.endswith("Attention") or (is_op(node, "Softmax") and bool(operands_of(node)))


def _appends(node: ir.Node) -> bool:
    first = node.inputs[0] if is_op(node, "Concat") and node.inputs else None
    cache = cache_input(first) if first is not None else None
    return cache is not None and cache.shape is not None and len(cache.shape) >= 3


def _clashes(outer: ir.Graph, graphs: Iterable[ir.Graph]) -> bool:
    """True when a branch names one of its initializers like an outer value."""
    names = {value.name for value in outer.inputs} | set(outer.initializers)
    names.update(output.name for node in outer for output in node.outputs)
    return any(name in names for graph in graphs for name in graph.initializers)


def take(model: ir.Model, branch: str) -> ir.Model:
    """A copy of the model in which one branch stands in place of the If."""
    choice = find_choice(model)
    copy = model.clone()
    graph = copy.graph
    if choice is None:
        return copy
    node = list(graph)[list(model.graph).index(choice.node)]
    inner = node.attributes[branch].as_graph()
    results = list(inner.outputs)
    inner.outputs.clear()
    for value in list(inner.initializers.values()):
        inner.initializers.pop(str(value.name))
        graph.register_initializer(value)
    body = list(inner)
    inner.remove(body)
    graph.insert_before(node, body)
    builder = Builder(graph)
    builder.before(node)
    for position, (output, result) in enumerate(zip(node.outputs, results, strict=True)):
        if result.producer() not in body or result in results[:position]:
            result = builder.node("Identity", [result])
        output.replace_all_uses_with(result, replace_graph_outputs=True)
        rename(result, output.name)
        result.type = result.type or output.type
        result.shape = output.shape if result.shape is None else result.shape
    _forget(node)
    graph.remove(node)
    return copy


def _forget(choice: ir.Node) -> None:
    """Takes the readers in an If's branches off the outer values, which count them as their own otherwise."""
    for name in _OTHER:
        for node in choice.attributes[name].as_graph().all_nodes():
            for position in range(len(node.inputs)):
                node.replace_input_with(position, None)


def join_empty_caches(past: ir.Graph, fresh: ir.Graph, sites: Iterable[AttentionSite]) -> None:
    """Puts `Concat(cache input, new)` where the branch without a past hands out its new tokens as presents.

    Args:
        past: The branch with a past, whose outputs are in the same order.
        fresh: The branch without; edited. The cache inputs it gets are meant to be empty.
        sites: The sites of `past`.
    """
    inputs = {value.name: value for value in fresh.inputs}
    order = list(past.outputs)
    builder = Builder(fresh)
    for site in sites:
        if site.stacked:
            continue  # no exporter merges those; the site finds no twin and stays
        for cache, present, layout in zip(
            site.caches, (site.present_key, site.present_value), site.cache_layout, strict=True
        ):
            outputs = aliases(past, present)
            if outputs:
                axis = Operand(cache, layout).sequence_axis
                _join_empty(builder, fresh, order.index(outputs[0]), inputs[cache.name], axis)


def _join_empty(builder: Builder, graph: ir.Graph, position: int, cache: ir.Value, axis: int) -> None:
    new = graph.outputs[position]
    while is_op(new.producer(), "Identity"):
        new = new.producer().inputs[0]  # type: ignore[union-attr, assignment]
    producer = new.producer()
    if producer is None or (new.dtype is not None and new.dtype != cache.dtype):
        return  # no twin is found for the site then
    # Its shape stays the shape of the new tokens: with nothing cached that is the same.
    readers = [(use.node, use.idx) for use in new.uses() if not is_op(use.node, "Shape")]
    builder.after(producer)
    joined = builder.node("Concat", [cache, new], {"axis": axis})
    joined.type = new.type
    concat = _maker_of(joined)
    for node, index in readers:
        node.replace_input_with(index, joined)
    for twin, order in _other_transposes(producer):
        builder.after(concat)
        twin.outputs[0].replace_all_uses_with(builder.node("Transpose", [joined], {"perm": order}))
    if graph.outputs[position] is new:
        graph.outputs[position] = joined
        joined.name, new.name = new.name, joined.name


def _maker_of(value: ir.Value) -> ir.Node:
    """The node that makes a value; raises ValueError for an input."""
    node = value.producer()
    if node is None:
        raise ValueError(f"{value.name} is made by no node")
    return node


def _other_transposes(node: ir.Node) -> list[tuple[ir.Node, list[int]]]:
    """Other Transposes of what a Transpose reads, and their orders as seen from its output.

    Exporters fold the transpose of the keys into the one that splits the heads.
    """
    source = node.inputs[0] if is_op(node, "Transpose") else None
    if source is None or "perm" not in node.attributes:
        return []
    own = list(node.attributes["perm"].as_ints())
    return [
        (user, [own.index(axis) for axis in user.attributes["perm"].as_ints()])
        for user in dict.fromkeys(source.consumers())
        if user is not node and is_op(user, "Transpose") and "perm" in user.attributes
        and not user.outputs[0].is_graph_output()
    ]  # fmt: skip


def join(model: ir.Model, past_branch: str, with_past: ir.Model, fresh: ir.Model) -> ir.Model:
    """One model again: KvCacheBegin in front of an If whose branches are the two rewritten graphs.

    Args:
        model: The merged model as it was.
        past_branch: The If's attribute for `with_past`.
        with_past: The rewritten branch with a past, which becomes the result.
        fresh: The other rewritten branch, whose nodes move there.
    """
    choice = find_choice(model)
    if choice is None or choice.node.inputs[0] is None:
        raise ValueError("the model has no If with two decoders")
    outer, other = with_past.graph, fresh.graph
    begin = _take_begin(outer, other)
    shared = set(model.graph.initializers) | {value.name for value in outer.inputs}
    _share(outer, other, shared)
    graphs = {past_branch: _as_branch(outer, shared), _OTHER[past_branch]: _as_branch(other, set())}
    condition = next(value for value in outer.inputs if value.name == choice.node.inputs[0].name)
    outer.append(begin)
    results = [_like(value) for value in graphs[past_branch].outputs]
    outer.append(
        ir.Node("", "If", [condition], {name: ir.AttrGraph(name, graphs[name]) for name in _OTHER},
                outputs=results, name=choice.node.name)
    )  # fmt: skip
    outer.outputs.extend(results)
    _start_again(outer, begin, condition, past_branch)
    return with_past


def _take_begin(outer: ir.Graph, other: ir.Graph) -> ir.Node:
    """Removes KvCacheBegin from both graphs; the first one's serves all readers."""
    begin, twin = (
        next(node for node in graph if (node.domain, node.op_type) == ("kvfuse", "KvCacheBegin"))
        for graph in (outer, other)
    )
    for output, replacement in zip(twin.outputs, begin.outputs, strict=True):
        output.replace_all_uses_with(replacement)
    begin.attributes["uniform"] = ir.AttrInt64("uniform", int(bool(begin.outputs[1].uses())))
    outer.remove(begin)
    other.remove(twin, safe=True)
    return begin


def _share(outer: ir.Graph, other: ir.Graph, shared: set[str | None]) -> None:
    """Makes both graphs read the same inputs and the same weights."""
    own = {value.name: value for value in outer.inputs} | dict(outer.initializers)
    for value in [*other.inputs, *other.initializers.values()]:
        if value.name not in shared or value is own.get(value.name):
            continue
        if value.name in own:
            value.replace_all_uses_with(own[value.name])
            other.initializers.pop(str(value.name), None)
        elif value.const_value is not None:
            other.initializers.pop(str(value.name))
            outer.register_initializer(value)
            own[value.name] = value
    other.inputs.clear()


def _as_branch(graph: ir.Graph, outer: set[str | None]) -> ir.Graph:
    """The nodes, outputs and own initializers of a graph, moved to a graph without inputs."""
    graph.sort()
    nodes, outputs = list(graph), list(graph.outputs)
    graph.outputs.clear()
    graph.remove(nodes)
    own = [value for name, value in graph.initializers.items() if name not in outer]
    for value in own:
        graph.initializers.pop(str(value.name))
    return ir.Graph([], outputs, nodes=nodes, initializers=own, name=graph.name)


def _like(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, type=value.type, shape=value.shape)


def _start_again(graph: ir.Graph, begin: ir.Node, condition: ir.Value, past_branch: str) -> None:
    """The past length is 0 whenever the branch without a past is chosen."""
    builder = Builder(graph)
    builder.before(begin)
    zero = builder.constant(np.array([0], np.int64), "start_again")
    choices = [begin.inputs[1], zero]
    if past_branch == "else_branch":
        choices.reverse()
    begin.replace_input_with(1, builder.node("Where", [condition, *choices]))
