"""The way from the Softmax of a decomposed attention to its product with the value."""

from __future__ import annotations

import onnx_ir as ir

from .score_chain import raw_scores
from .site import Mismatch, label
from .values import constant, is_op
from .walk import PASS_OPS


def operands_of(anchor: ir.Node) -> tuple[ir.Value | None, ...]:
    """Query, key and value as an attention reads them; () for a Softmax that is no attention's.

    A router's or a sampler's Softmax follows a product with weights, or none at all.
    """
    if anchor.op_type != "Softmax":
        return tuple(anchor.inputs)
    end = anchor.inputs[0] if anchor.inputs else None
    raw = raw_scores(end, set()) if end is not None else None
    if raw is None or any(value is None or _is_constant(value) for value in raw.inputs):
        return ()
    product = value_product(anchor)
    return (*raw.inputs, *(product.inputs[1:] if product is not None else ()))


def _is_constant(value: ir.Value) -> bool:
    return value.const_value is not None or is_op(value.producer(), "Constant")


def value_product(softmax: ir.Node) -> ir.Node | None:
    """The MatMul of the probabilities with the value, behind casts and a NaN guard."""
    value = softmax.outputs[0]
    for _ in range(8):
        users = list(dict.fromkeys(value.consumers()))
        guard = _nan_guard(value, users)
        if guard is not None:
            value = guard.outputs[0]
            continue
        step = next((user for user in users if is_op(user, *PASS_OPS, "Dropout")), None)
        product = next((user for user in users if is_op(user, "MatMul") and user.inputs[0] is value), None)
        if product is not None:
            return product
        if step is None:
            return None
        value = step.outputs[0]
    return None


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


def require_private(softmax: ir.Node, product: ir.Node) -> None:
    """Raises Mismatch when anything but the guard, casts and the product reads the probabilities."""
    value = softmax.outputs[0]
    while True:
        users = list(dict.fromkeys(value.consumers()))
        guard = _nan_guard(value, users)
        test = guard.inputs[0].producer() if guard is not None and guard.inputs[0] is not None else None
        step = guard or next((u for u in users if is_op(u, *PASS_OPS, "Dropout")), product)
        others = [user for user in users if user is not step and user is not test]
        if others or value.is_graph_output():
            reader = label(others[0]) if others else "the graph's caller"
            raise Mismatch(
                f"the attention probabilities {label(value)} are also read by {reader}",
                others[0] if others else softmax,
            )
        if step is product:
            return
        value = step.outputs[0]
