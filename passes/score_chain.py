"""The ops between Q·K and the Softmax of a decomposed attention: scales, a soft cap and masks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .proposal import HIDDEN, ScoreChain
from .ranks import rank_of
from .site import BiasTerm, Mismatch, label
from .values import constant, is_op
from .walk import LAYOUT_OPS, PASS_OPS, is_scalar_constant

Factors = tuple[tuple[ir.Value, int], ...]


# Which inputs of an op between Q·K and the Softmax may be the scores.
_SCORE_OPERANDS = {
    **dict.fromkeys(PASS_OPS | {"Sub", "Div", "Tanh", "Reshape", "Clip"}, (0,)),
    **dict.fromkeys(("Add", "Mul", "Max"), (0, 1)),
    "Where": (1, 2),
}


def raw_scores(value: ir.Value, failed: set[ir.Value]) -> ir.Node | None:
    """The MatMul or Einsum of query and key behind the score chain, else None."""
    node = value.producer()
    if node is None or value in failed or node.domain != "":
        return None
    if node.op_type in ("MatMul", "Einsum"):
        return node
    for position in _SCORE_OPERANDS.get(node.op_type, ()):
        operand = node.inputs[position] if position < len(node.inputs) else None
        found = raw_scores(operand, failed) if operand is not None else None
        if found is not None:
            return found
    failed.add(value)
    return None


def score_chain(end: ir.Value, raw_node: ir.Node) -> ScoreChain:
    """Reads the ops from the Softmax back to Q·K; see _ChainReader."""
    reader = _ChainReader(fold_of(end))
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
        fold=fold_of(value),
    )


def without_sink(end: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """The scores before a column of sinks [H] was put behind them, and those sinks, else None.

    Raises:
        Mismatch: There is such a column, but of other numbers.
    """
    node = added_column(end)
    if node is None:
        return end, None
    scores, sink = both_operands(node)
    while rank_of(sink) != 1:
        producer = sink.producer()
        inner = producer.inputs[0] if is_op(producer, *LAYOUT_OPS, *PASS_OPS) and producer else None
        if inner is None:
            raise Mismatch(f"the last column {label(sink)} of the scores is not one number per head", node)
        sink = inner
    return scores, sink


def added_column(end: ir.Value) -> ir.Node | None:
    """The Concat of scores and one more column: `Softmax(c - max(c))` with `c = Concat(scores, sinks)`."""
    node = end.producer()
    if is_op(node, "Sub") and node is not None and node.inputs[0] is not None:
        largest = node.inputs[1].producer() if node.inputs[1] is not None else None
        if is_op(largest, "ReduceMax") and largest is not None and largest.inputs[0] is node.inputs[0]:
            node = node.inputs[0].producer()  # a number per row; taking it off every logit changes nothing
    while is_op(node, *PASS_OPS) and node is not None and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node if is_op(node, "Concat") and node is not None and len(node.inputs) == 2 else None


def fold_of(scores: ir.Value) -> str:
    """How the heads of scores are folded, from their rank: see BiasTerm.fold."""
    return {3: "batch", 5: "groups"}.get(rank_of(scores) or 4, "")


class _ChainReader:
    """Collects scale factors, the soft cap and mask operands, from the Softmax backwards.

    Attributes:
        factors: The factors met since the last Tanh (all of them without one).
        outer: The factors between Tanh and mask, once a Tanh was met.
        terms: The mask operands.
        fold: How the heads of the scores at hand are folded.
    """

    def __init__(self, fold: str = "") -> None:
        self.fold = fold
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
        if is_op(node, "Reshape"):
            return self._reshape(node)
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

    def _reshape(self, node: ir.Node) -> ir.Value:
        scores = self._operand(node, 0)
        before = fold_of(scores)
        if before == self.fold:
            raise Mismatch(f"{label(node)} reshapes the attention scores otherwise than by heads", node)
        self.fold = before
        return scores

    def _fold_of_term(self, value: ir.Value) -> str:
        """Where the scores are folded, a term of as many axes is folded with them."""
        return self.fold if self.fold and rank_of(value) in (None, 3 if self.fold == "batch" else 5) else ""

    def _floor(self, node: ir.Node) -> ir.Value:
        """Max(scores, lowest): keeps -inf out of the Softmax and changes no visible score."""
        left, right = both_operands(node)
        scores, floor = (left, right) if raw_scores(left, set()) is not None else (right, left)
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
        left, right = both_operands(node)
        swap = raw_scores(left, set()) is None
        scores, added = (right, left) if swap else (left, right)
        self.terms.append(
            BiasTerm(added, factor=_constant_product(self.factors), fold=self._fold_of_term(added))
        )
        return scores

    def _where(self, node: ir.Node) -> ir.Value:
        self._before_scale(node)
        condition, positive, negative = (self._operand(node, position) for position in range(3))
        visible_when = raw_scores(positive, set()) is not None
        scores, fill = (positive, negative) if visible_when else (negative, positive)
        number = constant(fill)
        if number is None or number.size != 1 or float(number.reshape(-1)[0]) > HIDDEN:
            raise Mismatch(
                f"{label(node)} replaces scores by {label(fill)}; expected one large negative number", node
            )
        level = float(number.reshape(-1)[0])
        factor = _constant_product(self.factors)
        fold = self._fold_of_term(condition)
        self.terms.append(BiasTerm(condition, level, visible_when, factor, fold))
        return scores


def _constant_product(factors: list[tuple[ir.Value, int]]) -> float:
    """The product of the factors after a mask (1.0 without any); NaN when one is not a plain constant."""
    product = 1.0
    for value, power in factors:
        number = constant(value)
        product *= float("nan") if number is None else float(np.asarray(number).reshape(-1)[0]) ** power
    return product


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


def both_operands(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The two inputs of a binary node; raises Mismatch when one is absent."""
    left, right = node.inputs
    if left is None or right is None:
        raise Mismatch(f"{label(node)} lacks an input", node)
    return left, right
