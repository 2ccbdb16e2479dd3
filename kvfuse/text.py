"""Canonical text of a graph: its nodes in an order and under names that do not depend on the file's.

Nodes come in the order in which a walk from the outputs to the inputs leaves them, inner values are named
after the op that makes them, and small constants are written where they are read. Renaming inner values or
storing the nodes in another order changes nothing. Node names, doc strings and the noted shapes of inner
values are no part of what is compared; the shapes are shown as a note.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx_ir as ir

_INLINE_ELEMENTS = 8  # constants up to this size are written as their numbers
_PIECE = 8 << 20  # bytes of tensor data that are read at once
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LONGEST_PART = 120


class Name(str):
    """A name of the file, or text, in which a number may say nothing but which layer it is."""

    __slots__ = ()


class Value(str):
    """The generated name of an inner value, `op` and a count: `MatMul.3`."""

    __slots__ = ()


class Literal(str):
    """A small constant, written where it is read."""

    __slots__ = ()


Parts = tuple[str, ...]


def show(part: str) -> str:
    """One part of a line as a person reads it: digests and very long text are cut."""
    if _DIGEST.fullmatch(part):
        return "<sha256>"
    text = (f"%{part}" if isinstance(part, Value) else str(part)).replace("\n", "\\n")
    return text if len(text) <= _LONGEST_PART else f"{text[:_LONGEST_PART]}… ({len(text)} characters)"


def pieces(tensor: ir.TensorProtocol) -> Iterator[bytes]:
    """The bytes of a tensor, 8 MiB at a time; of external data, no more than that is in memory."""
    if isinstance(tensor, ir.ExternalTensor):
        left = tensor.length or tensor.nbytes
        with open(tensor.path, "rb") as file:
            file.seek(tensor.offset or 0)
            while left > 0:
                data = file.read(min(left, _PIECE))
                if not data:
                    return
                left -= len(data)
                yield data
        return
    data = b"\0".join(tensor.string_data()) if isinstance(tensor, ir.StringTensor) else tensor.tobytes()
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]


def digest(tensor: ir.TensorProtocol) -> str:
    """The first 12 digits of the sha256 of a tensor's bytes."""
    total = hashlib.sha256()
    for piece in pieces(tensor):
        total.update(piece)
    return total.hexdigest()[:12]


def type_text(dtype: ir.DataType | None, shape: Iterable[Any] | None) -> str:
    """`f32[batch,2,64]`; `?` for what is not known."""
    name = "?" if dtype is None else dtype.short_name()
    return name if shape is None else f"{name}[{','.join(_dim(dim) for dim in shape)}]"


def _dim(dim: Any) -> str:
    if isinstance(dim, ir.SymbolicDim):
        dim = dim.value
    return "?" if dim is None else str(dim)


def value_type(value: ir.Value) -> str:
    """The noted type of a value."""
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        return str(value.type)
    return type_text(value.dtype, value.shape)


def tensor_text(tensor: ir.TensorProtocol) -> str:
    """A tensor as its numbers when there are few, else as type and hash, or as the place of external data."""
    kind = type_text(tensor.dtype, tensor.shape)
    if isinstance(tensor, ir.ExternalTensor):
        return f"{kind} in {tensor.location} at {tensor.offset or 0}"
    if not is_small(tensor):
        return f"{kind} #{digest(tensor)}"
    if isinstance(tensor, ir.StringTensor):
        return f"{kind}{{{', '.join(repr(text) for text in tensor.string_data())}}}"
    return f"{kind}{{{', '.join(_number(item) for item in tensor.numpy().reshape(-1).tolist())}}}"


def _number(item: Any) -> str:
    return f"{item:.9g}" if isinstance(item, float) else str(item)


def is_small(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor is written as its numbers."""
    return tensor.size <= _INLINE_ELEMENTS and not isinstance(tensor, ir.ExternalTensor)


def literal(value: ir.Value) -> Literal | None:
    """A small constant as text, where it is read; None for all other values."""
    node = value.producer()
    if node is None:
        tensor = value.const_value
        known = tensor is not None and value.is_initializer() and not value.is_graph_input()
        return Literal(tensor_text(tensor)) if known and tensor is not None and is_small(tensor) else None
    if node.op_type != "Constant" or node.domain or value.is_graph_output():
        return None
    for attribute in node.attributes.values():
        if attribute.is_ref():
            return None
        if attribute.type == ir.AttributeType.TENSOR:
            return Literal(f"const {tensor_text(attribute.value)}") if is_small(attribute.value) else None
        return Literal(f"const {attribute.name}={attribute.value}")
    return None


def attribute_parts(attribute: ir.Attr) -> Parts:
    """`name=value`; a graph is only counted here, its nodes are text of their own."""
    head = f"{attribute.name}="
    if attribute.is_ref():
        return head, f"@{attribute.ref_attr_name}"
    kind, value = attribute.type, attribute.value
    if kind == ir.AttributeType.STRING:
        return f'{head}"', Name(value), '"'
    if kind == ir.AttributeType.TENSOR:
        return head, tensor_text(value)
    if kind == ir.AttributeType.TENSORS:
        return head, f"[{', '.join(tensor_text(tensor) for tensor in value)}]"
    if kind == ir.AttributeType.FLOAT:
        return head, _number(value)
    if kind == ir.AttributeType.FLOATS:
        return head, f"[{', '.join(_number(item) for item in value)}]"
    if kind in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return head, "{…}"
    return head, str(list(value) if isinstance(value, (tuple, list)) else value)


def signature(node: ir.Node) -> Parts:
    """The operator and its attributes, as parts of a line."""
    domain = f"{node.domain}::" if node.domain else ""
    overload = f":{node.overload}" if node.overload else ""
    parts: list[str] = [f"{domain}{node.op_type}{overload}"]
    for position, name in enumerate(sorted(node.attributes)):
        parts += ["<" if position == 0 else ", ", *attribute_parts(node.attributes[name])]
    return (*parts, ">") if len(parts) > 1 else tuple(parts)


def node_parts(node: ir.Node, labels: Mapping[ir.Value, str]) -> Parts:
    """One node as a line, `outputs = Op<attributes>(inputs)`."""
    parts: list[str] = []
    for output in node.outputs:
        parts += [", " if parts else "", labels.get(output, "_") if output.name or output.uses() else "_"]
    parts += [" = ", *signature(node), "("]
    for position, operand in enumerate(node.inputs):
        parts += [", " if position else "", "_" if operand is None else label_of(operand, labels)]
    return (*parts, ")")


def label_of(value: ir.Value, labels: Mapping[ir.Value, str]) -> str:
    """How a reader refers to a value: a literal, a generated name, or a name of the file."""
    return labels.get(value) or Name(f"@{value.name}")


def subgraphs(node: ir.Node) -> Iterator[tuple[str, ir.Graph]]:
    """The graphs in a node's attributes, by attribute name."""
    for name in sorted(node.attributes):
        attribute = node.attributes[name]
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            yield name, attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
            yield from ((f"{name}[{place}]", graph) for place, graph in enumerate(attribute.as_graphs()))


def reads(node: ir.Node) -> list[ir.Value]:
    """What a node reads, what its subgraphs capture included."""
    values = [operand for operand in node.inputs if operand is not None]
    for _, graph in subgraphs(node):
        for inner in graph.all_nodes():
            values += [operand for operand in inner.inputs if operand is not None]
        values += list(graph.outputs)
    return values
