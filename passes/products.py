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


# Axes of the result of an Einsum of query and key, and where a term with grouped heads has its sequence.
_RESULTS = {4: "BHST", 5: "BKGST"}
_GROUPED = {"BSKGD": True, "BKGSD": False}


def score_product(node: ir.Node) -> ScoreProduct:
    """Reads the MatMul or Einsum of query and key."""
    if not is_op(node, "Einsum"):
        operand, key = both_operands(node)
        query, factors = _unfolded(operand)
        return ScoreProduct(query, key, factors)
    terms, result = _equation(node)
    operands = both_operands(node)
    position = 0 if result[-1] in terms[1] else 1
    letters = dict(zip(result, _RESULTS[len(result)], strict=True))
    del letters[result[-1]]
    layout = _layout(node, terms[position], letters)
    if layout in _GROUPED:
        query, factors = _unfolded(operands[position], _GROUPED[layout], 5)
    else:
        value, factors = strip_scalars(operands[position])
        query = Operand(value, layout)
    return ScoreProduct(query, operands[1 - position], factors)


def value_operand_and_output(node: ir.Node, probabilities: ir.Value) -> tuple[ir.Value, Operand]:
    """The value as the product reads it, and the output where it has its plain form."""
    operands = both_operands(node)
    if not is_op(node, "Einsum"):
        return operands[1], _output(node.outputs[0])
    terms, result = _equation(node)
    position = 0 if operands[0] is probabilities else 1
    if len(terms[position]) != len(result):
        raise Mismatch(f"{label(node)} gives {len(result)} axes from {len(terms[position])}", node)
    letters = dict(zip(terms[position], _RESULTS[len(result)], strict=True))
    del letters[terms[position][-1]]
    layout = _layout(node, result, letters)
    if layout in _GROUPED:
        return operands[1 - position], _output(node.outputs[0], _GROUPED[layout], 5)
    if layout not in ("BHSD", "BSHD"):
        raise Mismatch(f"{label(node)} gives axes {layout}; expected BHSD or BSHD", node)
    return operands[1 - position], Operand(node.outputs[0], layout)


def _equation(node: ir.Node) -> tuple[list[str], str]:
    """The letters of both operands and of the result."""
    text = node.attributes["equation"].as_string().replace(" ", "")
    operands, _, result = text.partition("->")
    terms = operands.split(",")
    ranks = sorted(len(term) for term in terms)
    plain = all(term.isalpha() and len(set(term)) == len(term) for term in (*terms, result))
    if not plain or (ranks, len(result)) not in (([4, 4], 4), ([4, 5], 5)):
        raise Mismatch(
            f"{label(node)} computes '{text}'; expected two operands and a result of four axes, or of five "
            "with the heads in groups",
            node,
        )
    return terms, result


def _layout(node: ir.Node, term: str, letters: dict[str, str]) -> str:
    """A term's letters as a layout; the letter that is not in `letters` is D."""
    layout = "".join(letters.get(letter, "D") for letter in term)
    if layout not in LAYOUTS and layout not in _GROUPED:
        raise Mismatch(f"{label(node)} has an operand of axes {layout}, which no layout of the op is", node)
    return layout


def _unfolded(
    operand: ir.Value, sequence_first: bool = False, rank: int | None = None
) -> tuple[Operand, Factors]:
    """The query before its heads were folded into the batch or split into groups, and its scalars.

    Args:
        operand: The query as the product reads it.
        sequence_first: Its sequence axis comes before its heads.
        rank: Its number of axes, where known.
    """
    value, factors = strip_scalars(operand)
    rank = rank or rank_of(value) or 4
    for _ in range(_MAX_STEPS):
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
        rank = rank_of(value) or 4
    raise Mismatch(
        f"the query {label(operand)} has {rank_of(operand)} axes and cannot be followed to one of 4", operand
    )


def _output(value: ir.Value, sequence_first: bool = False, rank: int | None = None) -> Operand:
    """The output after its heads were taken out of the batch or out of groups; see _unfolded."""
    rank = rank or rank_of(value) or 4
    for _ in range(_MAX_STEPS):
        if rank == 4:
            return Operand(value, "BSHD" if sequence_first else "BHSD")
        if rank == 3 and sequence_first:
            return Operand(value, "BSC")
        users = list(dict.fromkeys(value.consumers()))
        if len(users) != 1 or value.is_graph_output():
            break
        if not is_op(users[0], "Reshape", "Transpose", "Squeeze"):
            break
        sequence_first = sequence_first != is_op(users[0], "Transpose")
        value = users[0].outputs[0]
        rank = rank_of(value) or 4
    raise Mismatch(f"the output {label(value)} is not brought into a form of 4 axes", value)


def packed_heads(append: Append) -> int | None:
    """How many heads a cache holds whose heads lie side by side: the next Reshape says it."""
    for user in dict.fromkeys(append.present.consumers()):
        shape = constant(user.inputs[1]) if is_op(user, "Reshape") else None
        if shape is not None and shape.size in (4, 5) and int(shape.reshape(-1)[2]) > 0:
            return int(shape.reshape(-1)[2])
    return None
