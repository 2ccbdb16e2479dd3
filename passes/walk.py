"""Walks from an attention to its operands: through layout ops, past scalar factors, to the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable

import numpy as np
import onnx_ir as ir

from .site import Mismatch, label
from .values import constant, is_op

# Ops that rearrange or repeat elements of their first input and change none.
# (A Slice counts because exporters write slices of everything; that it keeps all tokens is checked by shape.)
LAYOUT_OPS = {"Transpose", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Tile", "Gather", "Flatten", "Slice"}
PASS_OPS = {"Identity", "Cast"}
_STATIC_WRITES = {"ScatterND", "ScatterElements", "Scatter", "TensorScatter"}
_STATIC_LIMIT = 400


@dataclasses.dataclass(frozen=True)
class Append:
    """Concat(past, new), the step that makes a cache grow.

    Attributes:
        past: The cache input of the graph.
        new: The tokens of this run.
        present: The output of the Concat.
        node: The Concat.
        axis: Its axis as written (may be negative).
        factors: Scalars on the way to the attention, each with its power in the product (1 or -1).
    """

    past: ir.Value
    new: ir.Value
    present: ir.Value
    node: ir.Node
    axis: int
    factors: tuple[tuple[ir.Value, int], ...]


def data_inputs(node: ir.Node) -> list[ir.Value]:
    """The inputs whose data a node reads (not only their shape or type)."""
    if is_op(node, "Shape", "Size"):
        return []
    operands = node.inputs[:1] if is_op(node, "CastLike") else node.inputs
    return [operand for operand in operands if operand is not None]


def is_static(value: ir.Value) -> bool:
    """True when a value follows from constants and shapes alone (no data of any input is read)."""
    seen: set[ir.Value] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        if current in seen or current.const_value is not None:
            continue
        seen.add(current)
        node = current.producer()
        if node is None or len(seen) > _STATIC_LIMIT:
            return False
        stack.extend(data_inputs(node))
    return True


def values_read(outputs: list[ir.Value], cut: set[ir.Value]) -> set[ir.Value]:
    """The graph inputs and cut values whose data (not only whose shape) `outputs` depend on."""
    read: set[ir.Value] = set()
    seen: set[ir.Value] = set()
    stack = list(outputs)
    while stack:
        value = stack.pop()
        if value in seen or value.const_value is not None:
            continue
        seen.add(value)
        node = value.producer()
        if value in cut or node is None:
            read.add(value)
        else:
            stack.extend(data_inputs(node))
    return read


def numbers_in(outputs: list[ir.Value], cut: set[ir.Value]) -> list[float]:
    """The small constants (up to 64 numbers each; integers without sign) that `outputs` are computed from."""
    numbers: set[float] = set()
    seen: set[ir.Value] = set(cut)
    stack = list(outputs)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        known = constant(value)
        if known is not None and known.size <= 64 and known.dtype.kind in "iuf":
            known = np.abs(known) if known.dtype.kind == "i" else known
            numbers.update(float(number) for number in known.reshape(-1))
        node = value.producer()
        if node is not None and not is_op(node, "Shape"):
            stack.extend(operand for operand in node.inputs if operand is not None)
    return sorted(numbers)


def inputs_reached(outputs: list[ir.Value], cut: set[ir.Value]) -> set[ir.Value]:
    """The graph inputs that `outputs` depend on in any way, not looking beyond the cut values."""
    reached: set[ir.Value] = set()
    seen: set[ir.Value] = set()
    stack = list(outputs)
    while stack:
        value = stack.pop()
        if value in seen or value in cut:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            if value.is_graph_input():
                reached.add(value)
        else:
            stack.extend(operand for operand in node.inputs if operand is not None)
    return reached


def through(value: ir.Value) -> ir.Value:
    """The value behind Identity and Cast nodes."""
    node = value.producer()
    while is_op(node, *PASS_OPS) and node is not None and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def cache_input(value: ir.Value) -> ir.Value | None:
    """The float graph input behind Identity and Cast nodes, else None."""
    source = through(value)
    return source if source.is_graph_input() and source.const_value is None else None


def is_scalar_constant(value: ir.Value) -> bool:
    """True for one number that follows from constants and shapes alone."""
    known = constant(value)
    if known is not None:
        return known.size == 1 and known.dtype.kind == "f"
    if value.const_value is not None or not is_static(value):
        return False
    return value.shape is None or all(dim == 1 for dim in value.shape if isinstance(dim, int))


def find_append(value: ir.Value, what: str) -> Append:
    """Follows an attention's key or value back to the Concat with the cache input.

    Args:
        value: The operand of the attention.
        what: "key" or "value", for the sentences.

    Raises:
        Mismatch: There is no such Concat, or something other than a rearrangement lies between.
    """
    factors: list[tuple[ir.Value, int]] = []
    current = value
    while True:
        node = current.producer()
        if node is None:
            raise _no_growth(current, what)
        if is_op(node, *LAYOUT_OPS, *PASS_OPS):
            current = _input(node, 0)
        elif is_op(node, "Mul") and (
            is_scalar_constant(_input(node, 0)) or is_scalar_constant(_input(node, 1))
        ):
            other = 0 if is_scalar_constant(_input(node, 0)) else 1
            factors.append((_input(node, other), 1))
            current = _input(node, 1 - other)
        elif is_op(node, "Div") and is_scalar_constant(_input(node, 1)):
            factors.append((_input(node, 1), -1))
            current = _input(node, 0)
        elif is_op(node, "Concat") and len(set(node.inputs)) == 1 and len(node.inputs) > 1:
            current = _input(node, 0)
        elif is_op(node, "Concat"):
            return _append(node, current, what, tuple(factors))
        elif node.op_type in _STATIC_WRITES:
            raise Mismatch(
                f"the {what} cache is a fixed buffer that {label(node)} writes into; only a cache that "
                "grows by Concat can be fused",
                node,
            )
        else:
            raise Mismatch(
                f"the {what} does not come from a Concat with a cache input but from {label(node)}", node
            )


def _no_growth(value: ir.Value, what: str) -> Mismatch:
    if value.const_value is not None:
        return Mismatch(f"the {what} is the constant {label(value)}", value)
    return Mismatch(
        f"the {what} is read from the graph input {label(value)} and nothing is appended to it (a "
        "cross-attention or static cache)",
        value,
    )


def _input(node: ir.Node, position: int) -> ir.Value:
    operand = node.inputs[position] if position < len(node.inputs) else None
    if operand is None:
        raise Mismatch(f"{label(node)} lacks its input {position}", node)
    return operand


def _append(node: ir.Node, present: ir.Value, what: str, factors: tuple[tuple[ir.Value, int], ...]) -> Append:
    past = [cache_input(operand) if operand is not None else None for operand in node.inputs]
    if len(node.inputs) != 2 or all(value is None for value in past):
        raise Mismatch(
            f"the {what} comes from {label(node)} with {len(node.inputs)} inputs; expected the cache input "
            "and the new tokens",
            node,
        )
    if past[0] is None:
        raise Mismatch(
            f"{label(node)} of the {what} puts the new tokens before the cache; expected the cache first",
            node,
        )
    return Append(past[0], _input(node, 1), present, node, node.attributes["axis"].as_int(), factors)


CACHE_LAYOUTS = {(4, 2): "BHSD", (4, 1): "BSHD", (4, 0): "SBHD", (4, 3): "BHDS", (3, 1): "BSC"}


def cache_layout(append: Append) -> str:
    """The order of a cache's axes, from its rank and the axis it grows along; the proof confirms it.

    Raises:
        Mismatch: No order that the op serves.
    """
    shape = append.past.shape
    if shape is None:
        raise Mismatch(f"the cache input {label(append.past)} has no declared rank", append.past)
    axis = append.axis + len(shape) if append.axis < 0 else append.axis
    layout = CACHE_LAYOUTS.get((len(shape), axis))
    if layout is None:
        raise Mismatch(
            f"the cache input {label(append.past)} of rank {len(shape)} grows along axis {axis}; no layout "
            "is known for that",
            append.node,
        )
    return layout


# Ops that compute new features; what lies behind them is no longer the cache itself.
_PROJECTIONS = (
    "MatMul",
    "Gemm",
    "MatMulNBits",
    "MatMulInteger",
    "QLinearMatMul",
    "Conv",
    "Softmax",
    "Einsum",
)
# Their first output is computed; the others are presents.
_ATTENTIONS = ("Attention", "GroupQueryAttention", "MultiHeadAttention", "DecoderMaskedMultiHeadAttention")


_IDS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)


def reads_cache(operands: Iterable[ir.Value | None], barriers: Container[ir.OperatorIdentifier] = ()) -> bool:
    """True when operands come from a graph input of rank 3 or more (no ids) without a projection between.

    Args:
        operands: The values to follow.
        barriers: Operators that are not followed either.
    """
    seen: set[ir.Value] = set()
    stack = list(operands)
    while stack:
        value = stack.pop()
        if value is None or value in seen or value.const_value is not None:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            ranked = value.shape is not None and len(value.shape) >= 3
            if value.is_graph_input() and ranked and value.dtype not in _IDS:
                return True
        elif node.op_type in _PROJECTIONS or is_op(node, "Shape", "Size") or node.op_identifier() in barriers:
            continue
        elif node.op_type not in _ATTENTIONS or value is not node.outputs[0]:
            stack.extend(node.inputs)
    return False
