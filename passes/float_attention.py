"""One attention over its appended cache in plain ONNX ops: what `kvfuse::QuantizedKvSdpa` is in exact mode.

Dims: B batch_size, H num_heads, K kv_num_heads, G = H / K, S new and T all tokens, D head_dim, V value head
size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from .builder import Builder

_FLOAT = ir.DataType.FLOAT


@dataclasses.dataclass(frozen=True)
class Lengths:
    """int64 [1] each: the cached, the new and all tokens of a run."""

    past: ir.Value
    new: ir.Value
    total: ir.Value


class MaskSource:
    """Builds the visibility masks [B or 1, 1, S, T] of one graph, each only once.

    Args:
        builder: Inserts into the graph; set to a place that all later attentions follow.
        lengths: The lengths of a run.
    """

    def __init__(self, builder: Builder, lengths: Lengths) -> None:
        self._builder = builder
        self._lengths = lengths
        self._made: dict[Any, ir.Value] = {}

    def mask(self, causal: bool, window_left: int, padding: ir.Value | None) -> ir.Value | None:
        """What a query may see: bool, True = attend; None when it may see everything."""
        parts = []
        if causal:
            parts.append(self._once("causal", self._causal))
        if window_left >= 0:
            parts.append(self._once(("window", window_left), lambda: self._window(window_left)))
        if padding is not None:
            parts.append(self._once(padding, lambda: self._padding(padding)))
        if not parts:
            return None
        mask = parts[0]
        for position in range(1, len(parts)):
            both = (mask, parts[position])
            mask = self._once(both, lambda both=both: self._builder.node("And", both))
        return mask

    def _once(self, key: Any, make: Any) -> ir.Value:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _positions(self) -> tuple[ir.Value, ir.Value]:
        """Absolute positions of the queries [S, 1] and of the keys [T]."""
        return self._once("query", self._queries), self._once("key", self._keys)

    def _queries(self) -> ir.Value:
        builder, lengths = self._builder, self._lengths
        ends = (_scalar(builder, lengths.past), _scalar(builder, lengths.total))
        positions = builder.node("Range", [*ends, builder.integer(1)])
        return builder.node("Unsqueeze", [positions, builder.integers([1])])

    def _keys(self) -> ir.Value:
        builder = self._builder
        end = _scalar(builder, self._lengths.total)
        return builder.node("Range", [builder.integer(0), end, builder.integer(1)])

    def _causal(self) -> ir.Value:
        queries, keys = self._positions()
        return self._four_d(self._builder.node("LessOrEqual", [keys, queries]))

    def _window(self, left: int) -> ir.Value:
        queries, keys = self._positions()
        first = self._builder.node("Sub", [queries, self._builder.integer(left)])
        return self._four_d(self._builder.node("GreaterOrEqual", [keys, first]))

    def _four_d(self, mask: ir.Value) -> ir.Value:
        return self._builder.node("Unsqueeze", [mask, self._builder.integers([0, 1])])

    def _padding(self, padding: ir.Value) -> ir.Value:
        """[B, 1, 1, T] of a padding mask [B, >= T]."""
        builder = self._builder
        columns = [builder.integers([0]), self._lengths.total, builder.integers([1])]
        own = builder.node("Slice", [padding, *columns])
        attend = builder.node("Cast", [own], {"to": int(ir.DataType.BOOL)})
        return builder.node("Unsqueeze", [attend, builder.integers([1, 2])])


@dataclasses.dataclass(frozen=True)
class Form:
    """What one attention computes beside the products.

    Attributes:
        num_heads, kv_num_heads, head_dim, value_head_dim: Sizes.
        scale: Multiplies q k^T.
        softcap: Squashes the scores before bias and mask; 0 = off.
        mask: bool, broadcastable to [B, H, S, T], True = attend; or None.
        attention_bias: f32, broadcastable to [B, H, S, T]; or None.
        head_sink: f32 [H]; or None.
        may_hide_all: A query may see no key at all; its output is zero then.
    """

    num_heads: int
    kv_num_heads: int
    head_dim: int
    value_head_dim: int
    scale: float
    softcap: float
    mask: ir.Value | None
    attention_bias: ir.Value | None
    head_sink: ir.Value | None
    may_hide_all: bool


def attend(builder: Builder, form: Form, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
    """Builds softmax(scale q k^T) v with everything that the form asks for, in f32.

    Args:
        builder: Inserts into the graph.
        form: What to compute.
        query: f32 [B, H, S, D].
        key: f32 [B, K, T, D].
        value: f32 [B, K, T, V].

    Returns:
        f32 [B, H, S, V].
    """
    key = _repeat_heads(builder, form, key, form.head_dim)
    value = _repeat_heads(builder, form, value, form.value_head_dim)
    query = builder.node("Mul", [query, _float(builder, form.scale)])
    scores = builder.node("MatMul", [query, builder.node("Transpose", [key], {"perm": [0, 1, 3, 2]})])
    if form.softcap:
        cap = _float(builder, form.softcap)
        scores = builder.node("Mul", [builder.node("Tanh", [builder.node("Div", [scores, cap])]), cap])
    if form.attention_bias is not None:
        scores = builder.node("Add", [scores, form.attention_bias])
    if form.mask is not None:
        scores = builder.node("Where", [form.mask, scores, _float(builder, -np.inf)])
    return builder.node("MatMul", [_softmax(builder, form, scores), value])


def _repeat_heads(builder: Builder, form: Form, rows: ir.Value, head_dim: int) -> ir.Value:
    """[B, K, T, D] -> [B, H, T, D]; each kv head serves G query heads in a row."""
    if form.num_heads == form.kv_num_heads:
        return rows
    group = form.num_heads // form.kv_num_heads
    rows = builder.node("Unsqueeze", [rows, builder.integers([2])])
    rows = builder.node("Expand", [rows, builder.integers([1, 1, group, 1, 1])])
    return builder.node("Reshape", [rows, builder.integers([0, form.num_heads, -1, head_dim])])


def _softmax(builder: Builder, form: Form, scores: ir.Value) -> ir.Value:
    if form.head_sink is not None:
        return _softmax_with_sink(builder, scores, form.head_sink)
    weights = builder.node("Softmax", [scores], {"axis": -1})
    if not form.may_hide_all:
        return weights
    nothing = builder.node("IsNaN", [weights])  # 0 / 0 of a query whose scores are all -inf
    return builder.node("Where", [nothing, _float(builder, 0.0), weights])


def _softmax_with_sink(builder: Builder, scores: ir.Value, sink: ir.Value) -> ir.Value:
    """The sink is one more column of the scores, which takes its share and is cut off again."""
    rows = builder.node(
        "Slice", [builder.node("Shape", [scores]), builder.integers([0]), builder.integers([3])]
    )
    shape = builder.node("Concat", [rows, builder.integers([1])], {"axis": 0})
    column = builder.node("Reshape", [sink, builder.integers([1, -1, 1, 1])])
    column = builder.node("Expand", [column, shape])
    joined = builder.node("Concat", [column, scores], {"axis": -1})
    weights = builder.node("Softmax", [joined], {"axis": -1})
    ends = [builder.integers([1]), builder.integers([np.iinfo(np.int64).max]), builder.integers([-1])]
    return builder.node("Slice", [weights, *ends])


def as_float(builder: Builder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """An f32 copy of a value of another type; f32 as it is."""
    return value if dtype == _FLOAT else builder.node("Cast", [value], {"to": int(_FLOAT)})


def _float(builder: Builder, number: float) -> ir.Value:
    return builder.constant(np.array(number, np.float32), "float")


def _scalar(builder: Builder, length: ir.Value) -> ir.Value:
    return builder.node("Reshape", [length, builder.integers([])])
