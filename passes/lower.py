"""AttentionSite -> kvfuse::QuantizedKvSdpa; one lowering for every pattern."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from .builder import Builder
from .preamble import Positions
from .site import LAYOUTS, AttentionSite, BiasTerm, Operand
from .values import dtype_of

DOMAIN = "kvfuse"
OP = "QuantizedKvSdpa"
_TO_BSHD = (0, 2, 1, 3)


def lower(
    builder: Builder,
    site: AttentionSite,
    slots: ir.Value,
    positions: Positions,
    options: Mapping[str, int | float | str],
) -> None:
    """Puts the op behind the site's last node and gives its output to everyone who read the site's.

    Args:
        builder: Inserts into the graph.
        site: The site; nothing of it is removed here (dead code elimination does that).
        slots: The op's fourth input, from KvCacheBegin.
        positions: Where the new tokens are, for rotary embeddings that the original op applied inside.
        options: The format attributes (n_recent, key_bits, …).
    """
    producer = site.output.producer()
    if producer is None:
        raise ValueError(f"site {site.layer} has no output node")
    readers = [(use.node, use.idx) for use in site.output.uses()]
    builder.after(producer)
    operands = _operands(builder, site, positions)
    axis = 1 if all(operand.layout in ("BSHD", "BSC") for operand in operands) else 2
    query = _operand(builder, site, operands[0], site.num_heads, site.head_dim, axis)
    key = _operand(builder, site, operands[1], site.kv_num_heads, site.head_dim, axis)
    value = _operand(builder, site, operands[2], site.kv_num_heads, site.value_head_dim, axis)
    inputs = [query, key, value, slots, _padding(builder, site), _bias(builder, site), _sink(builder, site)]
    while inputs[-1] is None:
        inputs.pop()
    attributes: dict[str, int | float | str] = {
        "axis": axis,
        "scale": site.scale,
        "causal": int(site.mask.causal),
        **options,
        "window_left": site.mask.window_left,
        "softcap": site.softcap,
        "layer": site.layer,
    }
    name = builder.fresh(f"attention_{site.layer}")
    output = builder.node(OP, inputs, attributes, domain=DOMAIN, name=name)
    output.type = ir.TensorType(site.dtype)
    output = _restore(builder, site, output, axis)
    output.type = ir.TensorType(site.dtype)
    output.shape = site.output.shape
    for node, position in readers:
        node.replace_input_with(position, output)
    _replace_graph_output(site.output, output)


def _operands(builder: Builder, site: AttentionSite, positions: Positions) -> tuple[Operand, ...]:
    """Query, key and value, after what the original op did to them first."""
    if site.preamble is None:
        return site.query, site.key, site.value
    return site.preamble.build(builder, site.heads, positions)


def _operand(
    builder: Builder, site: AttentionSite, operand: Operand, heads: int, head_dim: int, axis: int
) -> ir.Value:
    """The operand as the op wants it: its type, 4-D, sequence on `axis`."""
    value = operand.value
    if dtype_of(value) != site.dtype:
        value = builder.node("Cast", [value], {"to": int(site.dtype)})
    layout = operand.layout
    if layout == "BSC":
        value = builder.node("Reshape", [value, builder.integers([0, 0, heads, head_dim])])
        layout = "BSHD"
    if axis == 1 or layout == "BHSD":
        return value
    return builder.node("Transpose", [value], {"perm": list(LAYOUTS[layout])})


def _restore(builder: Builder, site: AttentionSite, output: ir.Value, axis: int) -> ir.Value:
    """The op's output in the layout that the original's readers expect."""
    wants_heads_first = site.output_layout == "BHSD"
    if (axis == 2) != wants_heads_first:
        output = builder.node("Transpose", [output], {"perm": list(_TO_BSHD)})
    if site.output_layout == "BSC":
        width = site.num_heads * site.value_head_dim
        output = builder.node("Reshape", [output, builder.integers([0, 0, width])])
    return output


def _padding(builder: Builder, site: AttentionSite) -> ir.Value | None:
    padding = site.mask.padding
    if padding is None or dtype_of(padding) in (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64):
        return padding
    return builder.node("Cast", [padding], {"to": int(ir.DataType.BOOL)})


def _bias(builder: Builder, site: AttentionSite) -> ir.Value | None:
    total: ir.Value | None = None
    for term in site.mask.bias:
        added = _unfold(builder, term, _bias_term(builder, term, site.dtype), site.num_heads)
        total = added if total is None else builder.node("Add", [total, added])
    return total


def _sink(builder: Builder, site: AttentionSite) -> ir.Value | None:
    if site.head_sink is None:
        zeros = np.zeros(site.num_heads, site.dtype.numpy())
        return builder.constant(zeros, "head_sink") if site.smooth_softmax else None
    if dtype_of(site.head_sink) == site.dtype:
        return site.head_sink
    return builder.node("Cast", [site.head_sink], {"to": int(site.dtype)})


def _unfold(builder: Builder, term: BiasTerm, added: ir.Value, heads: int) -> ir.Value:
    """A term with the heads on an axis of their own."""
    if term.fold == "batch":  # B*H S T
        axes = {"axes": [0]} if builder.opset < 13 else {}
        added = builder.node("Unsqueeze", [added, *([] if axes else [builder.integers([0])])], axes)
        return builder.node("Reshape", [added, builder.integers([-1, heads, 0, 0])])
    if term.fold == "groups":  # B K G S T
        added = builder.node("Transpose", [added], {"perm": [0, 3, 4, 1, 2]})
        added = builder.node("Reshape", [added, builder.integers([0, 0, 0, -1])])
        return builder.node("Transpose", [added], {"perm": [0, 3, 1, 2]})
    return added


def _bias_term(builder: Builder, term: BiasTerm, dtype: ir.DataType) -> ir.Value:
    if term.fill is None:
        if dtype_of(term.value) == dtype:
            return term.value
        return builder.node("Cast", [term.value], {"to": int(dtype)})
    with np.errstate(over="ignore"):
        hidden = builder.constant(np.array(term.fill * term.factor).astype(dtype.numpy()), "hidden")
    visible = builder.constant(np.array(0.0).astype(dtype.numpy()), "visible")
    choices = (visible, hidden) if term.visible_when else (hidden, visible)
    return builder.node("Where", [term.value, *choices])


def _replace_graph_output(old: ir.Value, new: ir.Value) -> None:
    """Keeps the name of a site's output that is itself a graph output."""
    graph = old.graph
    if graph is None or not old.is_graph_output():
        return
    name = old.name
    for position, output in enumerate(graph.outputs):
        if output is old:
            graph.outputs[position] = new
    old.name, new.name = f"{name}.before", name
