"""Ranks of values from the structure of a graph, where no shape is noted."""

from __future__ import annotations

import onnx_ir as ir

from .values import constant, is_op

_MAX_DEPTH = 64
_RANK_OF_FIRST = (
    *(
        "Identity",
        "Cast",
        "CastLike",
        "Softmax",
        "Concat",
        "Slice",
        "Dropout",
        "Tanh",
        "Clip",
        "Pad",
        "Trilu",
    ),
    *("CumSum", "Not", "IsNaN", "Neg", "Sqrt", "Exp", "Reciprocal", "LayerNormalization", "RMSNormalization"),
    "RotaryEmbedding",
)
_LARGEST_RANK = (
    *("Add", "Sub", "Mul", "Div", "Where", "MatMul", "Max", "Min", "And", "Or", "Pow", "Equal", "Less"),
    *("LessOrEqual", "Greater", "GreaterOrEqual"),
)


def rank_of(value: ir.Value | None) -> int | None:
    """The number of axes of a value, noted or followed from the ops that make it; None when unknown."""
    return None if value is None else _Ranks().of(value, _MAX_DEPTH)


class _Ranks:
    """Ranks found so far, so that no value is followed twice."""

    def __init__(self) -> None:
        self._known: dict[ir.Value, int | None] = {}

    def of(self, value: ir.Value | None, depth: int) -> int | None:
        """The rank of a value, looking at most `depth` ops back."""
        if value is None or depth == 0:
            return None
        if value not in self._known:
            self._known[value] = self._find(value, depth - 1)
        return self._known[value]

    def _find(self, value: ir.Value, depth: int) -> int | None:
        if value.const_value is not None:
            return len(value.const_value.shape)
        if value.shape is not None:
            return len(value.shape)
        node = value.producer()
        if node is None:
            return None
        if is_op(node, *_RANK_OF_FIRST):
            return self.of(node.inputs[0], depth)
        if is_op(node, *_LARGEST_RANK):
            return _largest([self.of(operand, depth) for operand in node.inputs])
        if is_op(node, "Transpose") and "perm" in node.attributes:
            return len(node.attributes["perm"].as_ints())
        if is_op(node, "Reshape", "Expand"):
            return self._length(node.inputs[1], depth)
        if is_op(node, "Range"):
            return 1
        if is_op(node, "Gather"):
            data, index = (self.of(operand, depth) for operand in node.inputs)
            return None if data is None or index is None else data + index - 1
        if is_op(node, "Unsqueeze", "Squeeze"):
            return self._with_axes(node, depth)
        if is_op(node, "Einsum") and "->" in node.attributes["equation"].as_string():
            return len(node.attributes["equation"].as_string().split("->")[1].strip())
        known = constant(value)
        return None if known is None else int(known.ndim)

    def _length(self, shape: ir.Value | None, depth: int) -> int | None:
        """How many numbers a shape operand holds."""
        known = constant(shape)
        if known is not None or shape is None or depth == 0:
            return None if known is None else int(known.size)
        if shape.shape is not None and len(shape.shape) == 1 and isinstance(shape.shape[0], int):
            return int(shape.shape[0])
        node = shape.producer()
        if node is None:
            return None
        if is_op(node, "Shape"):
            start, end = (node.attributes.get(name) for name in ("start", "end"))
            if start is None and end is None:
                return self.of(node.inputs[0], depth)
            length = end.as_int() - (0 if start is None else start.as_int()) if end is not None else 0
            return length if length > 0 else None
        if is_op(node, "Concat"):
            parts = [self._length(operand, depth - 1) for operand in node.inputs]
            return None if None in parts else sum(part or 0 for part in parts)
        if is_op(node, "Reshape"):
            target = constant(node.inputs[1])
            return 1 if target is not None and target.tolist() in ([-1], [1]) else None
        if is_op(node, "Unsqueeze"):
            return 1
        if is_op(node, "Cast", "Identity", "Where", "Mul", "Add"):
            parts = [self._length(operand, depth - 1) for operand in node.inputs]
            return max((part for part in parts if part is not None), default=None)
        return None

    def _with_axes(self, node: ir.Node, depth: int) -> int | None:
        rank = self.of(node.inputs[0], depth)
        attribute = node.attributes.get("axes")
        given = None if attribute is None else len(attribute.as_ints())
        if given is None and len(node.inputs) > 1:
            known = constant(node.inputs[1])
            given = None if known is None else int(known.size)
        if rank is None or given is None:
            return None
        return rank + given if node.op_type == "Unsqueeze" else rank - given


def _largest(ranks: list[int | None]) -> int | None:
    """The largest of the ranks; where some are unknown, it is believed when it is that of heads at least."""
    largest = max((rank for rank in ranks if rank is not None), default=0)
    return largest if None not in ranks or largest > 2 else None
