"""Shapes of values from the shapes of their inputs: reading a shape never computes (or loads) the data.

Only operators whose output shape follows from input shapes are listed; for all others `rule_for` returns None
and the value itself is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

Shape = tuple[int, ...]
# The integers of a small operand.
Ints = Callable[[ir.Value], list[int]]
Rule = Callable[[ir.Node, Sequence[Shape], Ints], Shape]


def _words(*lines: str) -> list[str]:
    return [word for line in lines for word in line.split()]


_SAME = _words(
    "Abs Cast CastLike Ceil Clip Cos CumSum Dropout Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity",
    "IsInf IsNaN LayerNormalization LeakyRelu Log LogSoftmax Mish Neg Not RMSNormalization Reciprocal Relu",
    "RotaryEmbedding Round Sigmoid Sign SimplifiedLayerNormalization Sin SkipLayerNormalization Softmax",
    "SkipSimplifiedLayerNormalization Softplus Sqrt Swish Tanh Trilu FastGelu BiasGelu QuickGelu",
)
_BROADCAST = _words(
    "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Or PRelu Pow Sub Where Xor",
)
_REDUCE = _words("ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare ReduceL2")


def _integers(node: ir.Node, name: str, position: int, ints: Ints) -> list[int] | None:
    """The integers of an attribute, or of the input that replaced it in later opsets; None when absent."""
    attribute = node.attributes.get(name)
    if attribute is not None:
        return list(attribute.as_ints()) if attribute.type == ir.AttributeType.INTS else [attribute.as_int()]
    operand = node.inputs[position] if len(node.inputs) > position else None
    return None if operand is None else ints(operand)


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _same(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    return shapes[0]


def _broadcast(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    return tuple(np.broadcast_shapes(*shapes))


def _transpose(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    perm = node.attributes.get("perm")
    order = perm.as_ints() if perm is not None else range(len(shapes[0]))[::-1]
    return tuple(shapes[0][axis] for axis in order)


def _unsqueeze(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    axes = _integers(node, "axes", 1, ints) or []
    rank = len(shapes[0]) + len(axes)
    new = {axis % rank for axis in axes}
    rest = iter(shapes[0])
    return tuple(1 if axis in new else next(rest) for axis in range(rank))


def _squeeze(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    axes = _integers(node, "axes", 1, ints)
    rank = len(shapes[0])
    gone = {a for a in range(rank) if shapes[0][a] == 1} if axes is None else {a % rank for a in axes}
    return tuple(size for axis, size in enumerate(shapes[0]) if axis not in gone)


def _reduce(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    axes = _integers(node, "axes", 1, ints)
    if not axes and _int(node, "noop_with_empty_axes", 0):
        return shapes[0]
    rank = len(shapes[0])
    gone = set(range(rank)) if not axes else {axis % rank for axis in axes}
    if _int(node, "keepdims", 1):
        return tuple(1 if axis in gone else size for axis, size in enumerate(shapes[0]))
    return tuple(size for axis, size in enumerate(shapes[0]) if axis not in gone)


def _gather(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    axis = _int(node, "axis", 0) % len(shapes[0])
    return shapes[0][:axis] + shapes[1] + shapes[0][axis + 1 :]


def _concat(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    axis = _int(node, "axis", 0) % len(shapes[0])
    total = sum(shape[axis] for shape in shapes)
    return (*shapes[0][:axis], total, *shapes[0][axis + 1 :])


def _matmul(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    left, right = shapes
    if len(left) < 2 or len(right) < 2:
        raise ValueError("MatMul of vectors")
    return (*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])


def _einsum(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    terms, arrow, result = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    if not arrow or "." in terms:
        raise ValueError("Einsum without a plain result")
    sizes = {letter: size for term, shape in zip(terms.split(","), shapes, strict=True)
             for letter, size in zip(term, shape, strict=True)}  # fmt: skip
    return tuple(sizes[letter] for letter in result)


def _gemm(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    rows = shapes[0][1] if _int(node, "transA", 0) else shapes[0][0]
    columns = shapes[1][0] if _int(node, "transB", 0) else shapes[1][1]
    return rows, columns


def _matmul_nbits(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    return (*shapes[0][:-1], _int(node, "N", 0))


def _reshape(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    wanted = list(ints(_operand(node, 1)))
    if not _int(node, "allowzero", 0):
        wanted = [shapes[0][axis] if size == 0 else size for axis, size in enumerate(wanted)]
    if -1 in wanted:
        known = int(np.prod([size for size in wanted if size != -1]))
        wanted[wanted.index(-1)] = int(np.prod(shapes[0])) // known if known else 0
    return tuple(wanted)


def _expand(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    return tuple(np.broadcast_shapes(shapes[0], tuple(ints(_operand(node, 1)))))


def _tile(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    return tuple(size * times for size, times in zip(shapes[0], ints(_operand(node, 1)), strict=True))


def _slice(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    starts = _integers(node, "starts", 1, ints) or []
    ends = _integers(node, "ends", 2, ints) or []
    axes = _integers(node, "axes", 3, ints) or list(range(len(starts)))
    steps = _integers(node, "steps", 4, ints) or [1] * len(starts)
    result = list(shapes[0])
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0:
            raise ValueError("Slice backwards")
        result[axis] = len(range(*slice(start, end, step).indices(result[axis])))
    return tuple(result)


def _attention(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    query, _, value = shapes
    if len(query) == 4:
        return (*query[:3], value[3])
    return (*query[:2], _int(node, "q_num_heads", 1) * value[2] // _int(node, "kv_num_heads", 1))


def _group_query_attention(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    batch, sequence, width = shapes[0]
    heads, kv_heads = _int(node, "num_heads", 1), _int(node, "kv_num_heads", 1)
    packed = len(node.inputs) < 2 or node.inputs[1] is None
    return batch, sequence, width * heads // (heads + 2 * kv_heads) if packed else width


def _multi_head_attention(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    query, _, value = shapes
    width = value[2] if len(value) == 3 else value[1] * value[3]
    return query[0], query[1], width


def _contrib_attention(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> Shape:
    sizes = _integers(node, "qkv_hidden_sizes", len(node.inputs), ints)
    return (*shapes[0][:2], sizes[2] if sizes else shapes[1][1] // 3)


def _split(node: ir.Node, shapes: Sequence[Shape], ints: Ints) -> list[Shape]:
    """The shapes of all outputs."""
    axis = _int(node, "axis", 0) % len(shapes[0])
    sizes = _integers(node, "split", 1, ints)
    if sizes is None:
        step = -(-shapes[0][axis] // len(node.outputs))
        sizes = [step] * (len(node.outputs) - 1)
        sizes.append(shapes[0][axis] - sum(sizes))
    return [(*shapes[0][:axis], size, *shapes[0][axis + 1 :]) for size in sizes]


def _split_output(index: int) -> Rule:
    return lambda node, shapes, ints: _split(node, shapes, ints)[index]


def _operand(node: ir.Node, position: int) -> ir.Value:
    operand = node.inputs[position]
    if operand is None:
        raise ValueError(f"{node.op_type} without input {position}")
    return operand


# Operator -> (its rule, how many leading inputs' shapes it needs; 0 = all).
_RULES: dict[str, tuple[Rule, int]] = {
    **dict.fromkeys(_SAME, (_same, 1)),
    **dict.fromkeys(_BROADCAST, (_broadcast, 0)),
    **dict.fromkeys(_REDUCE, (_reduce, 1)),
    "Transpose": (_transpose, 1),
    "Unsqueeze": (_unsqueeze, 1),
    "Squeeze": (_squeeze, 1),
    "Gather": (_gather, 2),
    "Concat": (_concat, 0),
    "MatMul": (_matmul, 2),
    "Einsum": (_einsum, 0),
    "Gemm": (_gemm, 2),
    "MatMulNBits": (_matmul_nbits, 1),
    "Reshape": (_reshape, 1),
    "Expand": (_expand, 1),
    "Tile": (_tile, 1),
    "Slice": (_slice, 1),
    "Attention": (_attention, 3),
    "GroupQueryAttention": (_group_query_attention, 1),
    "MultiHeadAttention": (_multi_head_attention, 3),
}


def _repeats_shape(node: ir.Node, value: ir.Value) -> bool:
    """The fourth output of a skip normalization is the sum of its inputs, of the same shape as the first."""
    return node.op_type.startswith("Skip") and value.index() == 3


def rule_for(value: ir.Value) -> tuple[Rule, tuple[ir.Value, ...]] | None:
    """The rule for the shape of `value` and the values whose shapes it needs; None without a rule."""
    node = value.producer()
    if node is None or node.domain not in ("", "com.microsoft"):
        return None
    other_output = bool(value.index()) and not _repeats_shape(node, value)
    contrib_attention = node.op_type == "Attention" and node.domain != ""
    if node.op_type == "Split":
        rule, count = _split_output(value.index() or 0), 1
    elif contrib_attention and not other_output:
        rule, count = _contrib_attention, 2
    elif node.op_type in _RULES and not other_output:
        rule, count = _RULES[node.op_type]
    else:
        return None
    operands = node.inputs if count == 0 else node.inputs[:count]
    if any(operand is None for operand in operands):
        return None
    return rule, tuple(operand for operand in operands if operand is not None)
