"""Lengths that the graph itself says, row by row: GroupQueryAttention appends where seqlens_k tells it to.

The op writes the S new tokens of a row behind its first seqlens_k + 1 - S ones, whatever the cache holds. The
fused graph does the same: that number is the past length of the run, unless the caller gives one.
Dims: B batch_size, S sequence_length.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from .builder import Builder
from .past_length import Dim
from .site import AttentionSite, Mismatch, label


def check(
    sites: Sequence[AttentionSite], rewired: Sequence[tuple[ir.Node, Sequence[Dim]]]
) -> list[tuple[AttentionSite, Mismatch]]:
    """The sites whose lengths cannot be the lengths of a run, with reasons; changes nothing.

    Args:
        sites: The sites to fuse, in graph order.
        rewired: Shape nodes that will be answered from the past length, and their dims.
    """
    told = [site for site in sites if site.seqlens is not None]
    if not told:
        return []
    for node, dims in rewired:
        if any(dim.symbol in ("P", "T") for dim in dims):
            # After a padded prompt the cache is longer than the row that is told its length.
            reason = f"it is told its lengths by {label(told[0].seqlens)} but {label(node)} reads the cache's"
            return [(site, Mismatch(reason, site.anchor)) for site in told]
    first = told[0]
    if len(told) < len(sites):
        other = next(site for site in sites if site.seqlens is None)
        reason = f"it is told its lengths by {label(first.seqlens)} but {label(other.anchor)} is not"
        return [(site, Mismatch(reason, site.anchor)) for site in told]
    failed = []
    for site in told[1:]:
        if site.seqlens is not first.seqlens:
            reason = (
                f"its lengths are {label(site.seqlens)}; expected {label(first.seqlens)} as in "
                f"{label(first.anchor)}"
            )
            failed.append((site, Mismatch(reason, site.anchor)))
    late = {site.output for site in sites}
    for value, what in ((first.seqlens, "the lengths"), (first.query.value, "the new tokens' number")):
        reached = _reached(value, late)
        if reached is not None:
            reason = f"{what} depend on {label(reached)}; expected them to be known before any attention"
            return [(site, Mismatch(reason, site.anchor)) for site in told]
    return failed


def _reached(value: ir.Value | None, targets: set[ir.Value]) -> ir.Value | None:
    """The first of the targets that a value is computed from, else None."""
    stack, seen = [value], set()
    while stack:
        current = stack.pop()
        if current is None or current in seen:
            continue
        if current in targets:
            return current
        seen.add(current)
        node = current.producer()
        if node is not None:
            stack.extend(node.inputs)
    return None


def past_lengths(builder: Builder, site: AttentionSite, given: ir.Value) -> ir.Value:
    """int64 [B]: where each row appends; the caller's numbers where they are not negative.

    Args:
        builder: Inserts into the graph.
        site: The first site that is told its lengths.
        given: int64 [1 or B], the caller's past length, negative for none.
    """
    if site.seqlens is None:
        return given
    last = builder.node("Cast", [site.seqlens], {"to": int(ir.DataType.INT64)})
    last = builder.node("Reshape", [last, builder.integers([-1])])
    new = builder.axis_length(site.key.value, site.key.sequence_axis)
    total = builder.node("Add", [last, builder.integers([1])])
    zero = builder.integers([0])
    past = builder.node("Max", [builder.node("Sub", [total, new]), zero])
    return builder.node("Where", [builder.node("Less", [given, zero]), past, given])
