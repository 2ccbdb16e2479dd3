"""Concat(past, new) -> repeat KV -> MatMul -> scale, mask -> Softmax -> MatMul: attention written out.

Emitted by: optimum (sdpa and eager), torch.onnx.export(dynamo=True), transformers' OnnxExporter.
Dims: B batch_size, H num_heads, K kv_num_heads, S sequence_length, P past, T = P + S, D head_dim.

    scores = MatMul(query [B H S D], key^T [B H D T])        scalars on either side, in any spelling
    probabilities = Softmax(mask(softcap(scale(scores))))    Add, Where; a mask may come before the scale
    output = MatMul(probabilities, value [B H T D])          NaN guard and casts in between
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from ..proposal import HIDDEN, Proposal, ScoreChain
from ..site import BiasTerm, Mismatch, Operand, label
from ..values import constant, is_op
from ..walk import PASS_OPS, cache_layout, find_append, is_scalar_constant

NAME = "decomposed_sdpa"

Factors = tuple[tuple[ir.Value, int], ...]


def anchors(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every Softmax of the graph."""
    return (node for node in graph if is_op(node, "Softmax"))


def operands_of(anchor: ir.Node) -> tuple[ir.Value | None, ...]:
    """Query, key and value as an attention reads them; () for a Softmax that is no attention's.

    A router's or a sampler's Softmax follows a product with weights, or none at all.
    """
    if anchor.op_type != "Softmax":
        return tuple(anchor.inputs)
    end = anchor.inputs[0] if anchor.inputs else None
    raw = _raw_scores(end, set()) if end is not None else None
    if raw is None or any(value is None or _is_constant(value) for value in raw.inputs):
        return ()
    product = _value_product(anchor)
    return (*raw.inputs, *(product.inputs[1:] if product is not None else ()))


def _is_constant(value: ir.Value) -> bool:
    return value.const_value is not None or is_op(value.producer(), "Constant")


def propose(softmax: ir.Node) -> Proposal:
    """Describes the attention around a Softmax.

    Raises:
        Mismatch: It is none that this pattern covers; the sentence says why.
    """
    product = _value_product(softmax)
    end = softmax.inputs[0]
    raw_node = _raw_scores(end, set()) if end is not None else None
    if end is None or raw_node is None:
        raise Mismatch(f"{label(softmax)} does not follow a MatMul of query and key", softmax)
    if product is None:
        users = ", ".join(label(user) for user in dict.fromkeys(softmax.outputs[0].consumers()))
        raise Mismatch(
            f"the attention probabilities go to {users or 'nothing'}; expected a MatMul with the value",
            softmax,
        )
    _require_private_probabilities(softmax, product)
    query_operand, key_operand = _operands(raw_node)
    value_operand = _operands(product)[1]
    key = find_append(key_operand, "key")
    value = find_append(value_operand, "value")
    if value.factors:
        raise Mismatch(
            f"the value is multiplied by {label(value.factors[0][0])} before it is averaged", product
        )
    query, query_factors = strip_scalars(query_operand)
    key_layout, value_layout = cache_layout(key), cache_layout(value)
    return Proposal(
        pattern=NAME,
        anchor=softmax,
        query=Operand(query, "BHSD"),
        key=key,
        value=value,
        key_cache=Operand(key.past, key_layout),
        value_cache=Operand(value.past, value_layout),
        new_key=Operand(key.new, key_layout),
        new_value=Operand(value.new, value_layout),
        key_operand=key_operand,
        value_operand=value_operand,
        output=Operand(product.outputs[0], "BHSD"),
        mask=_score_chain(end, raw_node),
        factors=query_factors + key.factors,
    )


def strip_scalars(value: ir.Value) -> tuple[ir.Value, Factors]:
    """The value behind scalar factors, casts and identities, and those factors with their powers."""
    factors: list[tuple[ir.Value, int]] = []
    while True:
        node = value.producer()
        if is_op(node, *PASS_OPS) and node is not None and node.inputs[0] is not None:
            value = node.inputs[0]
            continue
        factor = _scalar_step(node)
        if factor is None:
            return value, tuple(factors)
        value, scalar, power = factor
        factors.append((scalar, power))


def _scalar_step(node: ir.Node | None) -> tuple[ir.Value, ir.Value, int] | None:
    """(operand, scalar, power) of a Mul or Div by one number, else None."""
    if node is None or not is_op(node, "Mul", "Div") or None in node.inputs:
        return None
    left, right = node.inputs
    if left is None or right is None:
        return None
    if is_scalar_constant(right):
        return left, right, 1 if node.op_type == "Mul" else -1
    if node.op_type == "Mul" and is_scalar_constant(left):
        return right, left, 1
    return None


def _operands(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    left, right = node.inputs
    if left is None or right is None:
        raise Mismatch(f"{label(node)} lacks an input", node)
    return left, right


def _value_product(softmax: ir.Node) -> ir.Node | None:
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


def _require_private_probabilities(softmax: ir.Node, product: ir.Node) -> None:
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


# Which inputs of an op between Q·K and the Softmax may be the scores.
_SCORE_OPERANDS = {
    **dict.fromkeys(PASS_OPS | {"Sub", "Div", "Tanh", "Reshape", "Clip"}, (0,)),
    **dict.fromkeys(("Add", "Mul", "Max"), (0, 1)),
    "Where": (1, 2),
}


def _raw_scores(value: ir.Value, failed: set[ir.Value]) -> ir.Node | None:
    """The MatMul of query and key behind the score chain, else None."""
    node = value.producer()
    if node is None or value in failed or node.domain != "":
        return None
    if node.op_type == "MatMul":
        return node
    for position in _SCORE_OPERANDS.get(node.op_type, ()):
        operand = node.inputs[position] if position < len(node.inputs) else None
        found = _raw_scores(operand, failed) if operand is not None else None
        if found is not None:
            return found
    failed.add(value)
    return None


def _score_chain(end: ir.Value, raw_node: ir.Node) -> ScoreChain:
    """Reads the ops from the Softmax back to Q·K; see _ChainReader."""
    reader = _ChainReader()
    value = end
    while value.producer() is not raw_node:
        node = value.producer()
        if node is None:
            raise Mismatch(f"the scores cannot be followed beyond {label(value)}", value)
        value = reader.step(node)
    capped = reader.outer is not None
    return ScoreChain(
        raw=value,
        end=end,
        factors=tuple(reader.factors if reader.outer is None else reader.outer),
        inner=tuple(reader.factors) if capped else None,
        terms=tuple(reader.terms),
    )


class _ChainReader:
    """Collects scale factors, the soft cap and mask operands, from the Softmax backwards.

    Attributes:
        factors: The factors met since the last Tanh (all of them without one).
        outer: The factors between Tanh and mask, once a Tanh was met.
        terms: The mask operands.
    """

    def __init__(self) -> None:
        self.factors: list[tuple[ir.Value, int]] = []
        self.outer: list[tuple[ir.Value, int]] | None = None
        self.terms: list[BiasTerm] = []

    def step(self, node: ir.Node) -> ir.Value:
        """Takes one op and returns its score operand."""
        if is_op(node, *PASS_OPS):
            return self._operand(node, 0)
        scalar = _scalar_step(node)
        if scalar is not None:
            self.factors.append((scalar[1], scalar[2]))
            return scalar[0]
        if is_op(node, "Add"):
            return self._add(node)
        if is_op(node, "Where"):
            return self._where(node)
        if is_op(node, "Max"):
            return self._floor(node)
        if is_op(node, "Tanh"):
            if self.outer is not None:
                raise Mismatch(f"{label(node)} is a second Tanh on the scores", node)
            self.outer, self.factors = self.factors, []
            return self._operand(node, 0)
        raise Mismatch(
            f"{label(node)} on the attention scores is neither a scale, a soft cap nor a mask", node
        )

    def _operand(self, node: ir.Node, position: int) -> ir.Value:
        operand = node.inputs[position]
        if operand is None:
            raise Mismatch(f"{label(node)} lacks its input {position}", node)
        return operand

    def _floor(self, node: ir.Node) -> ir.Value:
        """Max(scores, lowest): keeps -inf out of the Softmax and changes no visible score."""
        left, right = _operands(node)
        scores, floor = (left, right) if _raw_scores(left, set()) is not None else (right, left)
        number = constant(floor)
        if number is None or float(number.max(initial=-np.inf)) > HIDDEN:
            raise Mismatch(f"{label(node)} limits the scores from below by {label(floor)}", node)
        return scores

    def _before_scale(self, node: ir.Node) -> None:
        if self.outer is not None:
            raise Mismatch(
                f"{label(node)} masks the scores before the soft cap, which lets hidden keys through", node
            )

    def _add(self, node: ir.Node) -> ir.Value:
        self._before_scale(node)
        left, right = _operands(node)
        swap = _raw_scores(left, set()) is None
        scores, added = (right, left) if swap else (left, right)
        self.terms.append(BiasTerm(added, factor=_constant_product(self.factors)))
        return scores

    def _where(self, node: ir.Node) -> ir.Value:
        self._before_scale(node)
        condition, positive, negative = (self._operand(node, position) for position in range(3))
        visible_when = _raw_scores(positive, set()) is not None
        scores, fill = (positive, negative) if visible_when else (negative, positive)
        number = constant(fill)
        if number is None or number.size != 1 or float(number.reshape(-1)[0]) > HIDDEN:
            raise Mismatch(
                f"{label(node)} replaces scores by {label(fill)}; expected one large negative number", node
            )
        level = float(number.reshape(-1)[0])
        factor = _constant_product(self.factors)
        self.terms.append(BiasTerm(condition, fill=level, visible_when=visible_when, factor=factor))
        return scores


def _constant_product(factors: list[tuple[ir.Value, int]]) -> float:
    """The product of the factors after a mask (1.0 without any); NaN when one is not a plain constant."""
    product = 1.0
    for value, power in factors:
        number = constant(value)
        product *= float("nan") if number is None else float(np.asarray(number).reshape(-1)[0]) ** power
    return product
