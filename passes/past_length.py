"""Answers every remaining Shape of a cache from the past length: dims by meaning, found by fitting probes.

Dims: B batch_size, S sequence_length, P past_sequence_length, T = P + S.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .builder import Builder
from .evaluate import shape_range
from .find import Findings
from .probes import Probe, hollow
from .site import AttentionSite, Mismatch, label
from .values import constant, dtype_of, is_op

# Sizes chosen so that no dim equals another, or a multiple of it, in all of them.
_PROBES = ((2, 5, 3), (3, 4, 11), (2, 7, 13))


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dim as factor times a symbol: "B", "S", "P", "T", or "1" for a plain number."""

    symbol: str
    factor: int


def fit_shape(
    findings: Findings, sites: Sequence[AttentionSite], node: ir.Node, site: AttentionSite
) -> list[Dim]:
    """The dims that a Shape node returns, by meaning.

    Raises:
        Mismatch: A dim is none of the known lengths.
    """
    value = node.inputs[0]
    if value is None:
        raise Mismatch(f"{label(node)} lacks its input", node)
    fixed = findings.space.batch_size()
    probes = [Probe(fixed or batch, sequence, past) for batch, sequence, past in _PROBES]
    shapes = []
    for probe in probes:
        bindings = findings.space.arrays(probe, site.roles, data=False)
        for other in sites:
            bindings.update(_site_bindings(other, probe))
        shapes.append(findings.evaluator.on(bindings).shape(value))
    start, end = shape_range(node, len(shapes[0]))
    return [_fit([shape[axis] for shape in shapes], probes, value) for axis in range(start, end)]


def _site_bindings(site: AttentionSite, probe: Probe) -> dict[ir.Value, np.ndarray]:
    key_cache, value_cache = site.cache_operands
    keys, values = [(key_cache, probe.past)], [(value_cache, probe.past)]
    bindings = {}
    if site.preamble is None:
        keys, values = [*keys, (site.key, probe.sequence)], [*values, (site.value, probe.sequence)]
    else:
        bindings = site.preamble.arrays(site.heads, probe, 1.0, data=False)
    for operands, head_dim in ((keys, site.head_dim), (values, site.value_head_dim)):
        for operand, length in operands:
            shape = operand.shape(probe.batch, site.kv_num_heads, length, head_dim)
            bindings[operand.value] = hollow(shape, dtype_of(operand.value).numpy())
    return bindings


def _fit(sizes: list[int], probes: list[Probe], value: ir.Value) -> Dim:
    if len(set(sizes)) == 1:
        return Dim("1", sizes[0])
    lengths = {
        "P": [probe.past for probe in probes],
        "T": [probe.total for probe in probes],
        "S": [probe.sequence for probe in probes],
        "B": [probe.batch for probe in probes],
    }
    for symbol, known in lengths.items():
        factor = sizes[0] // known[0]
        if factor and all(size == factor * length for size, length in zip(sizes, known, strict=True)):
            return Dim(symbol, factor)
    raise Mismatch(
        f"a dim of {label(value)}, which is read by a Shape, is neither batch, new, cached nor all tokens",
        value,
    )


class LengthSource:
    """Builds dims from the op's past length and the shapes of values that stay."""

    def __init__(self, builder: Builder, past_length: ir.Value, batch_carrier: ir.Value) -> None:
        self._builder = builder
        self._past_length = past_length
        self._batch_carrier = batch_carrier

    def replace(self, node: ir.Node, dims: Sequence[Dim], site: AttentionSite) -> None:
        """Gives every reader of a Shape node the same numbers from elsewhere."""
        self._builder.before(node)
        output = node.outputs[0]
        for user in list(dict.fromkeys(output.consumers())):
            scalar = self._gathered(user, output, dims)
            if scalar is not None and not user.outputs[0].is_graph_output():
                user.outputs[0].replace_all_uses_with(self._scalar(scalar, site))
        if output.consumers() or output.is_graph_output():
            vector = self._vector(dims, site)
            if output.is_graph_output():
                vector = self._as_output(output, vector)
            output.replace_all_uses_with(vector, replace_graph_outputs=True)

    def _as_output(self, output: ir.Value, vector: ir.Value) -> ir.Value:
        """The vector under the name and the type of an output of the graph."""
        name, output.name = str(output.name), self._builder.fresh("replaced")
        made = self._builder.node("Identity", [vector], outputs=[name])
        made.type, made.shape = output.type, output.shape
        return made

    def _gathered(self, user: ir.Node, output: ir.Value, dims: Sequence[Dim]) -> Dim | None:
        """The dim that `Gather(shape, one constant)` picks, else None."""
        if not is_op(user, "Gather") or user.inputs[0] is not output:
            return None
        index = constant(user.inputs[1])
        if index is None or index.shape != () or not -len(dims) <= int(index) < len(dims):
            return None
        return dims[int(index)]

    def _scalar(self, dim: Dim, site: AttentionSite) -> ir.Value:
        if dim == Dim("P", 1):
            return self._past_length
        if dim.symbol == "1":
            return self._builder.integer(dim.factor)
        return self._builder.node("Reshape", [self._length(dim, site), self._builder.integers([])])

    def _vector(self, dims: Sequence[Dim], site: AttentionSite) -> ir.Value:
        parts = [self._length(dim, site) for dim in dims]
        if len(parts) == 1:
            return parts[0]
        return self._builder.node("Concat", parts, {"axis": 0})

    def _length(self, dim: Dim, site: AttentionSite) -> ir.Value:
        """int64 [1]."""
        builder = self._builder
        if dim.symbol == "1":
            return builder.integers([dim.factor])
        if dim.symbol == "B":
            length = builder.axis_length(self._batch_carrier, 0)
        elif dim.symbol == "S":
            length = builder.axis_length(site.key.value, site.key.sequence_axis)
        else:
            length = builder.node("Reshape", [self._past_length, builder.integers([1])])
            if dim.symbol == "T":
                new = builder.axis_length(site.key.value, site.key.sequence_axis)
                length = builder.node("Add", [length, new])
        return length if dim.factor == 1 else builder.node("Mul", [length, builder.integers([dim.factor])])
