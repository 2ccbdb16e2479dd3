"""The two products of a decomposed attention, as MatMul or Einsum, and how their operands are folded.

Dims: B batch_size, H = K * G num_heads, K kv_num_heads, S sequence_length, T all tokens, D head_dim.

Products have four axes, or three with heads folded into the batch [B*H, S, …], or five with the heads in
groups [B, K, G, S, …]. The operands are followed to where they have their plain form; the proof confirms it.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .ranks import rank_of
from .score_chain import Factors, both_operands, strip_scalars
from .site import LAYOUTS, Mismatch, Operand, label
from .values import constant, is_op
from .walk import Append

_MAX_STEPS = 6


@dataclasses.dataclass(frozen=True)
class ScoreProduct:
    """Q·K.

    Attributes:
        query: The query before folding and scalars.
        key: The key as the product reads it.
        factors: The scalars on the query.
    """

    query: Operand
    key: ir.Value
    factors: Factors


def score_product(node: ir.Node) -> ScoreProduct:
    """Reads the MatMul or Einsum of query and key."""
    if is_op(node, "Einsum"):
        terms, result = _equation(node, 4)
        position = 0 if result[3] in terms[1] else 1
        letters = {result[0]: "B", result[1]: "H", result[2]: "S"}
        layout = _layout(node, terms[position], letters)
        operand, key = node.inputs[position], node.inputs[1 - position]
        if operand is None or key is None:
            raise Mismatch(f"{label(node)} lacks an input", node)
        value, factors = strip_scalars(operand)
        return ScoreProduct(Operand(value, layout), key, factors)
    operand, key = both_operands(node)
    query, factors = _unfolded(operand)
    return ScoreProduct(query, key, factors)


def value_operand_and_output(node: ir.Node, probabilities: ir.Value) -> tuple[ir.Value, Operand]:
    """The value as the product reads it, and the output where it has its plain form."""
    if is_op(node, "Einsum"):
        terms, result = _equation(node, 4)
        position = 0 if node.inputs[0] is probabilities else 1
        letters = dict(zip(terms[position], "BHST", strict=True))
        value = node.inputs[1 - position]
        if value is None:
            raise Mismatch(f"{label(node)} lacks an input", node)
        del letters[terms[position][3]]
        layout = _layout(node, result, letters)
        if layout not in ("BHSD", "BSHD"):
            raise Mismatch(f"{label(node)} gives axes {layout}; expected BHSD or BSHD", node)
        return value, Operand(node.outputs[0], layout)
    return both_operands(node)[1], _output(node.outputs[0])


def _equation(node: ir.Node, rank: int) -> tuple[list[str], str]:
    """The letters of both operands and of the result."""
    text = node.attributes["equation"].as_string().replace(" ", "")
    operands, _, result = text.partition("->")
    terms = operands.split(",")
    if len(terms) != 2 or any(len(term) != rank or len(set(term)) != rank for term in (*terms, result)):
        raise Mismatch(
            f"{label(node)} computes '{text}'; expected two operands and a result of {rank} axes", node
        )
    return terms, result


def _layout(node: ir.Node, term: str, letters: dict[str, str]) -> str:
    """A term's letters as a layout; the letter that is not in `letters` is D."""
    layout = "".join(letters.get(letter, "D") for letter in term)
    if layout not in LAYOUTS:
        raise Mismatch(f"{label(node)} has an operand of axes {layout}, which no layout of the op is", node)
    return layout


def _unfolded(operand: ir.Value) -> tuple[Operand, Factors]:
    """The query before its heads were folded into the batch or split into groups, and its scalars."""
    value, factors = strip_scalars(operand)
    sequence_first = False
    for _ in range(_MAX_STEPS):
        rank = rank_of(value) or 4
        if rank == 4:
            return Operand(value, "BSHD" if sequence_first else "BHSD"), factors
        node = value.producer()
        if rank == 3 and sequence_first:
            return Operand(value, "BSC"), factors
        if node is None or not is_op(node, "Reshape", "Transpose", "Unsqueeze", "Squeeze"):
            break
        sequence_first = sequence_first != is_op(node, "Transpose")
        inner = node.inputs[0]
        if inner is None:
            break
        value, more = strip_scalars(inner)
        factors = (*factors, *more)
    raise Mismatch(
        f"the query {label(operand)} has {rank_of(operand)} axes and cannot be followed to one of 4", operand
    )


def _output(value: ir.Value) -> Operand:
    """The output after its heads were taken out of the batch or out of groups."""
    sequence_first = False
    for _ in range(_MAX_STEPS):
        rank = rank_of(value) or 4
        if rank == 4:
            return Operand(value, "BSHD" if sequence_first else "BHSD")
        if rank == 3 and sequence_first:
            return Operand(value, "BSC")
        users = list(dict.fromkeys(value.consumers()))
        if (
            len(users) != 1
            or value.is_graph_output()
            or not is_op(users[0], "Reshape", "Transpose", "Squeeze")
        ):
            break
        sequence_first = sequence_first != is_op(users[0], "Transpose")
        value = users[0].outputs[0]
    raise Mismatch(f"the output {label(value)} is not brought into a form of 4 axes", value)


def packed_heads(append: Append) -> int | None:
    """How many heads a cache holds whose heads lie side by side: the next Reshape says it."""
    for user in dict.fromkeys(append.present.consumers()):
        shape = constant(user.inputs[1]) if is_op(user, "Reshape") else None
        if shape is not None and shape.size in (4, 5) and int(shape.reshape(-1)[2]) > 0:
            return int(shape.reshape(-1)[2])
    return None
