"""The aspects in which two models are compared, each a section of their difference."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir

from kvfuse.align import Alignment
from kvfuse.canonical import View
from kvfuse.hunks import Hunk, Line, SignedLine, compare, fold, single_lines
from kvfuse.text import (
    Name,
    attribute_parts,
    digest,
    literal,
    node_parts,
    pieces,
    show,
    subgraphs,
    tensor_text,
    type_text,
    value_type,
)


@dataclasses.dataclass(frozen=True)
class Section:
    """One aspect in which two models differ.

    Attributes:
        title: "inputs", "nodes", "nodes of If.1 then_branch", …
        hunks: The differences.
        note: How much is alike.
    """

    title: str
    hunks: tuple[Hunk, ...]
    note: str = ""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Pairs of a sign ("-", "+", " ", or "@" for headings) and the text."""
        yield "@", f"{self.title}{f' ({self.note})' if self.note else ''}"
        several = any(len(hunk.lines) > 1 for hunk in self.hunks)
        for hunk in self.hunks:
            if several:
                yield (
                    "@",
                    f"  {hunk.count} times alike but for numbers in names:" if hunk.count > 1 else "  once:",
                )
            for sign, text in hunk.lines:
                times = f"  (x{hunk.count})" if not several and hunk.count > 1 else ""
                yield sign, f"{text}{times}"


def plain_section(title: str, first: Sequence[Line], second: Sequence[Line]) -> list[Section]:
    """The section of two lists whose order says nothing; none when they are equal."""
    hunks = single_lines(first, second)
    return [Section(title, tuple(fold(hunks)))] if hunks else []


def version_lines(model: ir.Model) -> list[Line]:
    """The versions that a runtime must support."""
    return [Line((f"ir_version {model.ir_version}",)), *opset_lines(model.opset_imports)]


def opset_lines(opsets: Mapping[str, int]) -> list[Line]:
    """The versions of the operators of a model or function."""
    return [Line((f"opset {domain or 'ai.onnx'} {version}",)) for domain, version in sorted(opsets.items())]


def function_sections(first: ir.Model, second: ir.Model) -> list[Section]:
    """The differences of the model-local functions, which are known by domain, name and overload."""
    sections = []
    for key in dict.fromkeys([*sorted(first.functions), *sorted(second.functions)]):
        name = "::".join(part for part in key if part)
        found = [model.functions.get(key) for model in (first, second)]
        heads = [[] if function is None else _function_lines(name, function) for function in found]
        sections += plain_section("functions", *heads)
        one, other = found
        if one is not None and other is not None:
            sections += graph_sections(one.graph, other.graph, f" of function {name}")
    return sections


def _function_lines(name: str, function: ir.Function) -> list[Line]:
    lines = [Line((Name(name),))]
    lines += [Line((Name(name), " ", *line.parts)) for line in opset_lines(function.opset_imports)]
    attributes = sorted(function.attributes.values(), key=lambda attribute: attribute.name)
    return lines + [Line((Name(name), " ", *attribute_parts(attribute))) for attribute in attributes]


def metadata_lines(model: ir.Model) -> list[Line]:
    """One line for each entry; of an entry that is a JSON object, one for each of its keys."""
    lines = []
    for key, text in sorted(model.metadata_props.items()):
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            entries = [(f"{key}.{name}: ", value) for name, value in parsed.items()]
            lines += [
                Line((head, value if isinstance(value, str) else json.dumps(value)))
                for head, value in entries
            ]
        else:
            lines.append(Line((f"{key}: ", text)))
    return lines


Outer = Mapping[ir.Value, str]


class Around(NamedTuple):
    """What is known of a subgraph from the graph around it: labels of values, and of its outputs."""

    labels: Outer
    ends: Sequence[str] = ()


def graph_sections(
    first: ir.Graph, second: ir.Graph, where: str = "", around: tuple[Around, Around] | None = None
) -> list[Section]:
    """The differences of two graphs.

    Args:
        first: A graph.
        second: The other one.
        where: What the sections' titles end in; "" for the main graphs.
        around: What is known of each of the two from the graph around it.
    """
    weights = _Weights(first, second)
    one, other = around or (Around({}), Around({}))
    a = View(first, one.labels, inside=bool(where), ends=one.ends)
    b = View(second, other.labels, weights.names, inside=bool(where), ends=other.ends)
    alignment = Alignment(a, b)
    before = [_node_line(node, a.labels) for node in a.shown]
    after = [_node_line(node, alignment.labels) for node in alignment.nodes]
    hunks = compare(before, after)
    sections = [*_interface(a, b, where), *weights.section(where)]
    if hunks:
        sections.append(Section(f"nodes{where}", tuple(fold(hunks)), _counts(hunks, len(before))))
    sections += plain_section(f"output sources{where}", _ends(a, a.labels), _ends(b, alignment.labels))
    same_line = {line.parts: node for line, node in zip(before, a.shown, strict=True)}
    for node, line in zip(alignment.nodes, after, strict=True):
        partner = alignment.partner.get(node) or same_line.get(line.parts)
        if partner is not None:
            sections += _subgraph_sections((partner, a.labels), (node, alignment.labels), where)
    return sections


def _subgraph_sections(
    first: tuple[ir.Node, Outer], second: tuple[ir.Node, Outer], where: str
) -> list[Section]:
    """The differences of what is inside two nodes, given with the labels of the values around them."""
    sections = []
    made = ", ".join(show(second[1].get(output, "_")) for output in second[0].outputs[:1])
    for (name, mine), (_, yours) in zip(subgraphs(first[0]), subgraphs(second[0]), strict=False):
        title = f" of {name} of {second[0].op_type} making {made}{where}"
        around = Around(first[1], _ends_of(*first)), Around(second[1], _ends_of(*second))
        sections += graph_sections(mine, yours, title, around)
    return sections


def _ends_of(node: ir.Node, labels: Outer) -> list[str]:
    """What the outputs of a branch are called: the outputs of its If."""
    if node.op_type != "If" or node.domain:
        return []
    return [labels.get(output, "_") for output in node.outputs]


def _node_line(node: ir.Node, labels: Mapping[ir.Value, str]) -> Line:
    types = [value_type(output) for output in node.outputs]
    return Line(node_parts(node, labels), ", ".join(types) if set(types) != {"?"} else "")


def _ends(view: View, labels: Outer) -> list[Line]:
    """Outputs that are not made by a node of the graph under their own name."""
    lines = []
    for place, value in enumerate(view.graph.outputs):
        label, source = view.end_label("output", place, value), labels.get(value) or Name(f"@{value.name}")
        if source != label:
            lines.append(Line((label, " is ", source)))
    return lines


def _counts(hunks: Sequence[Sequence[SignedLine]], total: int) -> str:
    signs = [sign for hunk in hunks for sign, _ in hunk]
    removed, added = signs.count("-"), signs.count("+")
    return f"{total - removed} alike, {removed} only in the first, {added} only in the second"


def _interface(a: View, b: View, where: str) -> list[Section]:
    """Inputs and outputs by name and type, and their order; inside a node only how many there are."""
    sections = []
    for kind in ("input", "output"):
        sides = [view.graph.inputs if kind == "input" else view.graph.outputs for view in (a, b)]
        if where:
            counts = [[Line((f"{len(values)} {kind}s",))] for values in sides]
            sections += plain_section(f"{kind}s{where}", *counts)
            continue
        lines = [[Line((Name(value.name), ": ", value_type(value))) for value in values] for values in sides]
        sections += plain_section(f"{kind}s", *lines)
        common = {value.name for value in sides[0]} & {value.name for value in sides[1]}
        orders = [[str(value.name) for value in values if value.name in common] for values in sides]
        if orders[0] != orders[1]:
            sections += plain_section(f"order of {kind}s", *([Line((", ".join(order),))] for order in orders))
    return sections


class _Weights:
    """The initializers of two graphs.

    Attributes:
        names: Initializer of the second graph -> the label of the first's that holds the same under another
            name.
    """

    def __init__(self, first: ir.Graph, second: ir.Graph) -> None:
        self._first = _initializers(first)
        self._second = _initializers(second)
        self.names: dict[ir.Value, str] = {}
        gone = {name: value for name, value in self._first.items() if name not in self._second}
        contents = {_content(value): name for name, value in gone.items()}
        for name, value in self._second.items():
            if name not in self._first and _content(value) in contents:
                self.names[value] = Name(f"@{contents.pop(_content(value))}")

    def section(self, where: str) -> list[Section]:
        """The initializers that are not in both, or not the same there."""
        removed: list[Line] = []
        added: list[Line] = []
        for name in dict.fromkeys([*self._first, *self._second]):
            one, other = self._first.get(name), self._second.get(name)
            if one is not None and other is not None and _same(one.const_value, other.const_value):
                continue
            both = one is not None and other is not None
            removed += [] if one is None else [_weight_line(one, both)]
            added += [] if other is None else [_weight_line(other, both)]
        return plain_section(f"initializers{where}", removed, added)


def _initializers(graph: ir.Graph) -> dict[str, ir.Value]:
    """Those that are told by name: all but the small constants that are written where they are read."""
    return {name: value for name, value in graph.initializers.items() if literal(value) is None}


def _content(value: ir.Value) -> str:
    """What an initializer holds; external data by its place."""
    return "nothing" if value.const_value is None else tensor_text(value.const_value)


def _weight_line(value: ir.Value, contents_differ: bool) -> Line:
    tensor = value.const_value
    if tensor is None:
        return Line((Name(f"@{value.name}"), ": nothing"))
    text = tensor_text(tensor)
    if contents_differ and isinstance(tensor, ir.ExternalTensor):
        text = f"{type_text(tensor.dtype, tensor.shape)} #{digest(tensor)}"
    return Line((Name(f"@{value.name}"), f": {text}"))


def _same(one: ir.TensorProtocol | None, other: ir.TensorProtocol | None) -> bool:
    """Whether two tensors are equal, reading external data only where its place differs."""
    if one is None or other is None:
        return one is other
    if (one.dtype, tuple(one.shape)) != (other.dtype, tuple(other.shape)):
        return False
    if (
        isinstance(one, ir.ExternalTensor)
        and isinstance(other, ir.ExternalTensor)
        and _place(one) == _place(other)
    ):
        return True
    return all(mine == yours for mine, yours in zip_longest(pieces(one), pieces(other)))


def _place(tensor: ir.ExternalTensor) -> tuple[str, int, int]:
    return str(Path(tensor.path).resolve()), tensor.offset or 0, tensor.length or tensor.nbytes
