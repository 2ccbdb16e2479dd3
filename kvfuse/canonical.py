"""One graph in canonical form: its nodes in order, names for all values, structural hashes, and its text."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from kvfuse.text import (
    Literal,
    Name,
    Value,
    label_of,
    literal,
    node_parts,
    reads,
    show,
    signature,
    subgraphs,
    value_type,
)


class View:
    """A graph with its nodes in canonical order and a label for each of its values.

    Args:
        graph: The graph; not changed.
        outer: Labels of the values that the enclosing graphs define.
        names: Labels of initializers that go by another name than their own.
        inside: The graph is a subgraph or a function body, whose inputs and outputs are known by position.
        ends: What its outputs are called by who reads them; their positions where left out.

    Attributes:
        nodes: All nodes; each comes after what it reads.
        shown: Without the constants that are written where they are read.
        labels: Value -> label, those of the enclosing graphs included.
        forward: Node -> hash of what it computes from the graph's inputs and initializers.
        backward: Node -> hash of what is made of its outputs.
    """

    def __init__(
        self,
        graph: ir.Graph,
        outer: Mapping[ir.Value, str] | None = None,
        names: Mapping[ir.Value, str] | None = None,
        inside: bool = False,
        ends: Sequence[str] = (),
    ) -> None:
        self.graph = graph
        self._outer = dict(outer or {})
        self._names = dict(names or {})
        self.inside = inside
        self._ends = ends
        self._own = set(graph)
        self._signatures = {node: "".join(signature(node)) for node in graph}
        live = dict.fromkeys(self._walk(value.producer() for value in graph.outputs))
        dead = [node for node in graph if node not in live]
        self.forward = self._forward([*live, *self._walk(dead)])
        dead.sort(key=lambda node: self.forward[node])
        self.nodes = self._walk([*(value.producer() for value in graph.outputs), *dead])
        self.backward = self._backward()
        self.labels = {**self._outer, **self._label()}
        self.shown = [node for node in self.nodes if not self._is_inline(node)]

    def signature(self, node: ir.Node) -> str:
        """The operator and its attributes."""
        return self._signatures[node]

    def readers(self, node: ir.Node) -> list[str]:
        """Who reads a node's outputs, and where: operators only, which a change further on leaves alone."""
        return sorted(
            f"{place} {use.idx} {self._signatures.get(use.node, 'inside')}"
            for place, output in enumerate(node.outputs)
            for use in output.uses()
        )

    def inner(self, graph: ir.Graph) -> View:
        """The view of a subgraph of one of the nodes."""
        return View(graph, self.labels, inside=True)

    def end_label(self, kind: str, place: int, value: ir.Value) -> str:
        """What an input or output of the graph is called."""
        if kind == "output" and place < len(self._ends):
            return self._ends[place]
        return Value(f"{kind}.{place + 1}") if self.inside else Name(value.name)

    def owns(self, node: ir.Node | None) -> bool:
        """Whether a node is in this very graph, not in one around or inside it."""
        return node in self._own

    def _walk(self, roots: Iterable[ir.Node | None]) -> list[ir.Node]:
        """Nodes in the order in which a depth-first walk against the edges leaves them."""
        order: dict[ir.Node, None] = {}
        entered: set[ir.Node] = set()
        for root in roots:
            stack = [(root, False)]
            while stack:
                node, left = stack.pop()
                if node is None or node not in self._own:
                    continue
                if left:
                    order[node] = None
                elif node not in entered:
                    entered.add(node)
                    stack.append((node, True))
                    stack += [(value.producer(), False) for value in reversed(reads(node))]
        return list(order)

    def _forward(self, order: list[ir.Node]) -> dict[ir.Node, str]:
        known = {value: f"outer {label}" for value, label in {**self._outer, **self._names}.items()}
        return _hash_graph(self.graph, order, known, self.inside)[0]

    def _backward(self) -> dict[ir.Node, str]:
        places: dict[ir.Value, list[str]] = {}
        for place, value in enumerate(self.graph.outputs):
            places.setdefault(value, []).append(f"output {place}")
        found: dict[ir.Node, str] = {}
        for node in reversed(self.nodes):
            parts = [self.signature(node)]
            for output in node.outputs:
                users = [f"{use.idx} {found.get(use.node, 'inside')}" for use in output.uses()]
                parts.append(" ".join(sorted([*users, *places.get(output, [])])))
            found[node] = _digest(parts)
        return found

    def _is_inline(self, node: ir.Node) -> bool:
        return node.op_type == "Constant" and all(
            isinstance(self.labels.get(output), Literal) for output in node.outputs
        )

    def _label(self) -> dict[ir.Value, str]:
        labels = {
            value: self.end_label("input", place, value) for place, value in enumerate(self.graph.inputs)
        }
        labels |= self._names
        for value in self.graph.initializers.values():
            labels.setdefault(value, literal(value) or Name(f"@{value.name}"))
        for place, value in enumerate(self.graph.outputs):
            if self.owns(value.producer()):
                labels.setdefault(value, self.end_label("output", place, value))
        counts: Counter[str] = Counter()
        for node in self.nodes:
            for output in node.outputs:
                constant = literal(output) if node.op_type == "Constant" else None
                if constant is not None:
                    labels[output] = constant
                elif output not in labels:
                    counts[node.op_type] += 1
                    labels[output] = Value(f"{node.op_type}.{counts[node.op_type]}")
        return labels


def _hash_graph(
    graph: ir.Graph, order: Iterable[ir.Node], known: Mapping[ir.Value, str], inside: bool = False
) -> tuple[dict[ir.Node, str], dict[ir.Value, str]]:
    """Hashes of ordered nodes and of all values; `known` has those around the graph."""
    hashes = dict(known)
    for place, value in enumerate(graph.inputs):
        hashes[value] = f"argument {place}" if inside else f"input {value.name}"
    found: dict[ir.Node, str] = {}
    for node in order:
        parts = ["".join(signature(node))]
        parts += ["_" if value is None else _value_hash(value, hashes) for value in node.inputs]
        for name, inner in subgraphs(node):
            _, values = _hash_graph(inner, inner, hashes, inside=True)
            parts += [name, *(_value_hash(value, values) for value in inner.outputs)]
        found[node] = _digest(parts)
        for place, output in enumerate(node.outputs):
            hashes[output] = f"{found[node]}.{place}"
    return found, hashes


def _value_hash(value: ir.Value, hashes: Mapping[ir.Value, str]) -> str:
    return literal(value) or hashes.get(value) or f"outer @{value.name}"


def _digest(parts: Iterable[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def model_text(model: ir.Model) -> str:
    """The canonical text of a model: interface, nodes with their subgraphs, and functions."""
    lines = [
        f"opset {domain or 'ai.onnx'} {version}" for domain, version in sorted(model.opset_imports.items())
    ]
    lines += _graph_lines(View(model.graph), 0)
    for key in sorted(model.functions):
        lines += ["", f"function {'::'.join(part for part in key if part)}"]
        lines += _graph_lines(View(model.functions[key].graph, inside=True), 0)
    return "\n".join(lines) + "\n"


def _graph_lines(view: View, depth: int) -> list[str]:
    indent = "  " * depth
    lines = [f"input {show(view.labels[value])}: {value_type(value)}" for value in view.graph.inputs]
    for node in view.shown:
        made = ", ".join(value_type(output) for output in node.outputs)
        lines.append("".join(show(part) for part in node_parts(node, view.labels)) + f"  # {made}")
        for name, graph in subgraphs(node):
            lines += [f"  {name}:", *_graph_lines(view.inner(graph), depth + 2)]
    lines += [
        f"output {show(label_of(value, view.labels))}: {value_type(value)}" for value in view.graph.outputs
    ]
    return [f"{indent}{line}" for line in lines]
