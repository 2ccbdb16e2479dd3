"""What an attention op does to its operands before it appends and attends, made explicit when the op goes.

com.microsoft's attentions project, split, add biases and rotate inside. The same arithmetic is written as
nodes in front of the fused op, and the very nodes that are written are what the proof evaluates.

Dims: B batch_size, S sequence_length, C width, H num_heads, K kv_num_heads, D head_dim, V value head size,
R rotated channels of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from .builder import Builder
from .plan import Array
from .probes import Probe, dim_symbol, hollow
from .site import Heads, Mismatch, Operand, label
from .values import dtype_of

MS = "com.microsoft"
Evaluate = Callable[[Sequence[ir.Value], Mapping[ir.Value, Array]], list[Array]]
# Rows of the rotary tables in a probe: more than any position there.
_TABLE_ROWS = 64
_MIN_OPSET_SPLIT_INPUT = 13


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary embedding of query and new key.

    Attributes:
        cos, sin: Tables [positions, R / 2].
        interleaved: Pairs are (2i, 2i + 1); else (i, i + R / 2).
        position_ids: int64 [B, S]; None: the cached tokens of the row and on.
        total: int32, all tokens of the longest row. Where they are all new, every row starts at the first of
            position_ids and goes on by one.
    """

    cos: ir.Value
    sin: ir.Value
    interleaved: bool
    position_ids: ir.Value | None = None
    total: ir.Value | None = None

    def reads(self) -> list[ir.Value]:
        """Everything that the written nodes read of the graph."""
        return [value for value in (self.cos, self.sin, self.position_ids, self.total) if value is not None]

    @property
    def channels(self) -> int:
        """R.

        Raises:
            Mismatch: The width of the tables is not known.
        """
        half = None if self.cos.shape is None or len(self.cos.shape) != 2 else dim_symbol(self.cos, 1)
        if not isinstance(half, int):
            raise Mismatch(f"the width of the rotary table {label(self.cos)} is not known", self.cos)
        return 2 * half


@dataclasses.dataclass(frozen=True)
class Preamble:
    """The operands of an attention op and what it does to them first.

    Attributes:
        query: [B, S, H·D]; without `key`: query, key and value side by side, or what `weight` projects.
        key, value: [B, S, K·D] and [B, S, K·V].
        weight: [C, widths side by side], multiplied first.
        bias: [widths side by side], added then.
        rotary: Applied last.
    """

    query: ir.Value
    key: ir.Value | None = None
    value: ir.Value | None = None
    weight: ir.Value | None = None
    bias: ir.Value | None = None
    rotary: Rotary | None = None

    def reads(self) -> list[ir.Value]:
        """Everything that the written nodes read of the graph."""
        values = [self.query, self.key, self.value, self.weight, self.bias]
        rotary = [] if self.rotary is None else self.rotary.reads()
        return [*(value for value in values if value is not None), *rotary]

    def build(self, builder: Builder, heads: Heads, positions: Positions) -> tuple[Operand, ...]:
        """Writes the nodes; returns query, key and value with their heads side by side.

        Args:
            builder: Inserts into a graph.
            heads: Sizes.
            positions: Where the new tokens are, for the rotary embedding.
        """
        parts: list[ir.Value]
        if self.key is None or self.value is None:
            whole = self.query
            if self.weight is not None:
                whole = builder.node("MatMul", [whole, self.weight])
            if self.bias is not None:
                whole = builder.node("Add", [whole, self.bias])
            parts = _split(builder, whole, heads.widths)
        else:
            parts = [self.query, self.key, self.value]
            if self.bias is not None:
                biases = _split(builder, self.bias, heads.widths)
                parts = [builder.node("Add", pair) for pair in zip(parts, biases, strict=True)]
        if self.rotary is not None:
            where = positions.of(builder, self.query, self.rotary)
            for place, count in ((0, heads.query), (1, heads.kv)):
                parts[place] = _rotated(builder, parts[place], self.rotary, where, count, heads.head_dim)
        return tuple(Operand(part, "BSC") for part in parts)

    def write_positions(self, builder: Builder, positions: Positions) -> None:
        """Writes the positions that `build` needs; the first site's number of tokens stands for all."""
        if self.rotary is not None:
            positions.of(builder, self.query, self.rotary)

    def shapes(self, heads: Heads, batch: int, sequence: int) -> dict[ir.Value, tuple[int, ...]]:
        """The shape of everything in `reads`."""
        widths = heads.widths
        shapes: dict[ir.Value, tuple[int, ...]] = {}
        if self.key is not None and self.value is not None:
            for value, width in zip((self.query, self.key, self.value), widths, strict=True):
                shapes[value] = (batch, sequence, width)
        elif self.weight is None:
            shapes[self.query] = (batch, sequence, sum(widths))
        else:
            inner = None if self.weight.shape is None else dim_symbol(self.weight, 0)
            if not isinstance(inner, int):
                raise Mismatch(f"the shape of {label(self.weight)} is not known", self.weight)
            shapes[self.query] = (batch, sequence, inner)
            shapes[self.weight] = (inner, sum(widths))
        if self.bias is not None:
            shapes[self.bias] = (sum(widths),)
        if self.rotary is not None:
            table = (_TABLE_ROWS, self.rotary.channels // 2)
            shapes |= {self.rotary.cos: table, self.rotary.sin: table}
            if self.rotary.position_ids is not None:
                shapes[self.rotary.position_ids] = (batch, sequence)
            if self.rotary.total is not None:
                shapes[self.rotary.total] = (1,) * len(self.rotary.total.shape or ())
        return shapes

    def arrays(self, heads: Heads, probe: Probe, query_gain: float, *, data: bool) -> dict[ir.Value, Array]:
        """Probe arrays for everything in `reads`: random, so that every channel and position counts.

        Args:
            heads: Sizes.
            probe: Sizes of the run.
            query_gain: Multiplies what becomes the query.
            data: False for floats of shapes only.
        """
        result = {}
        for place, (value, shape) in enumerate(self.shapes(heads, probe.batch, probe.sequence).items()):
            dtype = np.dtype(dtype_of(value).numpy())
            generator = np.random.default_rng([7, place, *shape])
            if self.rotary is not None and value is self.rotary.position_ids:
                # Other positions than the cache's own, and other ones in each row.
                result[value] = generator.integers(0, _TABLE_ROWS // 2, shape).astype(dtype)
            elif self.rotary is not None and value is self.rotary.total:
                result[value] = np.full(shape, probe.total, dtype)
            elif not data:
                result[value] = hollow(shape, dtype)
            else:
                result[value] = self._numbers(value, shape, heads, query_gain, generator).astype(dtype)
        return result

    def _numbers(
        self,
        value: ir.Value,
        shape: tuple[int, ...],
        heads: Heads,
        query_gain: float,
        generator: np.random.Generator,
    ) -> Array:
        if self.rotary is not None and value in (self.rotary.cos, self.rotary.sin):
            angles = np.random.default_rng([8, *shape]).uniform(0, 2 * np.pi, shape)
            return np.cos(angles) if value is self.rotary.cos else np.sin(angles)
        array = generator.standard_normal(shape)
        if value is self.weight:
            array /= np.sqrt(shape[0])
        makes_query = value is self.bias or value is self.weight or value is self.query
        if makes_query and not (value is self.query and self.weight is not None):
            array[..., : heads.widths[0]] *= query_gain
        return array

    def evaluated_in(
        self, evaluate: Evaluate, bound: Mapping[ir.Value, Array], heads: Heads, pasts: Array, opset: int
    ) -> list[Array]:
        """Query, key and value as the written nodes compute them from the bound arrays.

        Args:
            evaluate: Runs nodes that are in no graph: (outputs, bindings) -> arrays.
            bound: Arrays for everything in `reads`.
            heads: Sizes.
            pasts: int64 [B], the cached tokens of each row.
            opset: Of the default domain.
        """
        copies = {value: _copy(value, f"operand_{i}") for i, value in enumerate(self.reads())}
        past = ir.Value(name="past_lengths", type=ir.TensorType(ir.DataType.INT64))
        builder = Builder(ir.Graph([], [], nodes=[], opset_imports={"": opset, MS: 1}))
        operands = self._on(copies).build(builder, heads, Positions(past))
        bindings = {copy: bound[value] for value, copy in copies.items()}
        return evaluate([operand.value for operand in operands], {**bindings, past: pasts})

    def _on(self, copies: Mapping[ir.Value, ir.Value]) -> Preamble:
        """The same on other values."""
        key, value, weight, bias = (
            None if each is None else copies[each] for each in (self.key, self.value, self.weight, self.bias)
        )
        rotary = self.rotary
        if rotary is not None:
            ids = None if rotary.position_ids is None else copies[rotary.position_ids]
            total = None if rotary.total is None else copies[rotary.total]
            rotary = Rotary(copies[rotary.cos], copies[rotary.sin], rotary.interleaved, ids, total)
        return Preamble(copies[self.query], key, value, weight, bias, rotary)


class Positions:
    """int64 [B, S]: the positions of the new tokens; equal ones are written once for all sites of a graph.

    Args:
        past_lengths: int64 [B], the cached tokens of each row.
    """

    def __init__(self, past_lengths: ir.Value) -> None:
        self._past_lengths = past_lengths
        self._made: dict[tuple[ir.Value | None, ir.Value | None], ir.Value] = {}

    def of(self, builder: Builder, tokens: ir.Value, rotary: Rotary) -> ir.Value:
        """The positions for a rotary embedding.

        Args:
            builder: Inserts into a graph.
            tokens: [B, S, …]; every site of a run has as many new tokens.
            rotary: The embedding.
        """
        key = (rotary.position_ids, rotary.total)
        if key not in self._made:
            self._made[key] = self._write(builder, tokens, rotary)
        return self._made[key]

    def _write(self, builder: Builder, tokens: ir.Value, rotary: Rotary) -> ir.Value:
        length = builder.node("Reshape", [builder.axis_length(tokens, 1), builder.integers([])])
        steps = builder.node("Range", [builder.integer(0), length, builder.integer(1)])
        ids, total = rotary.position_ids, rotary.total
        if ids is None:
            past = builder.node("Reshape", [self._past_lengths, builder.integers([-1, 1])])
            return builder.node("Add", [past, steps])
        if total is None:
            return ids
        total = builder.node("Reshape", [total, builder.integers([])])
        total = builder.node("Cast", [total], {"to": int(ir.DataType.INT64)})
        flat = builder.node("Reshape", [ids, builder.integers([-1])])
        first = builder.node("Gather", [flat, builder.integer(0)], {"axis": 0})
        counted = builder.node("Add", [first, steps])
        return builder.node("Where", [builder.node("Equal", [total, length]), counted, ids])


def _copy(value: ir.Value, name: str) -> ir.Value:
    """A value of the same type that no graph holds."""
    return ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype_of(value)))


def _split(builder: Builder, whole: ir.Value, widths: Sequence[int]) -> list[ir.Value]:
    """Parts along the last axis."""
    names = [builder.fresh(side) for side in ("query", "key", "value")]
    if builder.opset >= _MIN_OPSET_SPLIT_INPUT:
        first = builder.node("Split", [whole, builder.integers(widths)], {"axis": -1}, outputs=names)
    else:
        first = builder.node("Split", [whole], {"axis": -1, "split": list(widths)}, outputs=names)
    node = first.producer()
    if node is None:
        raise ValueError("Split was not inserted")
    return list(node.outputs)


def _rotated(
    builder: Builder,
    value: ir.Value,
    rotary: Rotary,
    positions: ir.Value,
    heads: int,
    head_dim: int,
) -> ir.Value:
    """com.microsoft RotaryEmbedding of [B, S, heads · D] at positions [B, S]."""
    channels = rotary.channels
    attributes = {
        "interleaved": int(rotary.interleaved),
        "num_heads": heads,
        "rotary_embedding_dim": 0 if channels == head_dim else channels,
    }
    inputs = [value, positions, rotary.cos, rotary.sin]
    return builder.node("RotaryEmbedding", inputs, attributes, domain=MS)
