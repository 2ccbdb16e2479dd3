"""The way from the Softmax of a decomposed attention to its product with the value."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .score_chain import added_column, raw_scores
from .site import Mismatch, label
from .values import constant, is_op
from .walk import PASS_OPS

_MAX_STEPS = 10


def operands_of(anchor: ir.Node) -> tuple[ir.Value | None, ...]:
    """Query, key and value as an attention reads them; () for a Softmax that is no attention's.

    A router's or a sampler's Softmax follows a product with weights, or none at all.
    """
    if anchor.op_type != "Softmax":
        return tuple(anchor.inputs)
    end = anchor.inputs[0] if anchor.inputs else None
    column = added_column(end) if end is not None else None
    end = column.inputs[0] if column is not None else end
    raw = raw_scores(end, set()) if end is not None else None
    if raw is None or any(value is None or _is_constant(value) for value in raw.inputs):
        return ()
    path = follow(anchor)
    values = path.product.inputs if path.product is not None else ()
    return (*raw.inputs, *(value for value in values if value is not path.operand))


def _is_constant(value: ir.Value) -> bool:
    return value.const_value is not None or is_op(value.producer(), "Constant")


@dataclasses.dataclass(frozen=True)
class Probabilities:
    """The way from the Softmax to its product with the value, behind casts, a NaN guard, reshapes, a Slice.

    Attributes:
        product: The product; None when there is none.
        operand: What it reads.
        sliced: The node that cuts the last column off, which belongs to a sink; None without one.
        others: The first value on the way that is read elsewhere too, and by whom (None: the caller).
    """

    product: ir.Node | None
    operand: ir.Value
    sliced: ir.Node | None = None
    others: tuple[ir.Value, ir.Node | None] | None = None


def follow(softmax: ir.Node) -> Probabilities:
    """Follows the probabilities to their product with the value."""
    value = softmax.outputs[0]
    sliced: ir.Node | None = None
    others: tuple[ir.Value, ir.Node | None] | None = None
    for _ in range(_MAX_STEPS):
        users = list(dict.fromkeys(value.consumers()))
        guard = _nan_guard(value, users)
        test = guard.inputs[0].producer() if guard is not None and guard.inputs[0] is not None else None
        product = None if guard is not None else next((u for u in users if _is_product(u, value)), None)
        step = guard or product or next((u for u in users if _keeps_probabilities(u, value)), None)
        rest = [user for user in users if user is not step and user is not test]
        if others is None and step is not None and (rest or value.is_graph_output()):
            others = value, rest[0] if rest else None
        if step is None or product is not None:
            return Probabilities(product, value, sliced, others)
        sliced = step if is_op(step, "Slice") else sliced
        value = step.outputs[0]
    return Probabilities(None, value)


def _is_product(node: ir.Node, value: ir.Value) -> bool:
    return (is_op(node, "MatMul") and node.inputs[0] is value) or (
        is_op(node, "Einsum") and value in node.inputs
    )


def _keeps_probabilities(node: ir.Node, value: ir.Value) -> bool:
    if is_op(node, "Slice"):
        return _cuts_last_column(node)
    return is_op(node, *PASS_OPS, "Dropout", "Reshape") and node.inputs[0] is value


def _cuts_last_column(node: ir.Node) -> bool:
    """True for `x[..., :-1]` (that its axis is the last one is proven by the numbers)."""
    given = [constant(operand) for operand in node.inputs[1:]]
    if len(given) not in (3, 4) or any(array is None or array.size != 1 for array in given):
        return False
    numbers = [int(array.reshape(-1)[0]) for array in given if array is not None]
    return numbers[:2] == [0, -1] and numbers[3:] in ([], [1])


def _nan_guard(value: ir.Value, users: list[ir.Node]) -> ir.Node | None:
    """The Where of `Where(IsNaN(p), 0, p)`, else None."""
    for user in users:
        if not is_op(user, "Where") or user.inputs[2] is not value or user.inputs[0] is None:
            continue
        test = user.inputs[0].producer()
        zero = constant(user.inputs[1])
        is_test = is_op(test, "IsNaN") and test is not None and test.inputs[0] is value
        if is_test and zero is not None and zero.size == 1 and float(zero.reshape(-1)[0]) == 0.0:
            return user
    return None


def require_private(softmax: ir.Node, path: Probabilities) -> None:
    """Raises Mismatch when anything but the way to the product reads the probabilities."""
    if path.others is None:
        return
    value, reader = path.others
    told = label(reader) if reader is not None else "the graph's caller"
    raise Mismatch(f"the attention probabilities {label(value)} are also read by {told}", reader or softmax)
