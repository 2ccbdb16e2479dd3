"""Decides everything, then edits once: sites -> ops, past lengths, cache I/O, metadata."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from .builder import Builder, names_of
from .drop_cache_io import drop_cache_io
from .find import Findings, guarded
from .legality import Clearance, clear
from .lower import DOMAIN, lower
from .past_length import Dim, LengthSource, fit_shape
from .preamble import Positions
from .row_lengths import check, past_lengths
from .site import AttentionSite, Mismatch, Refusal, label

SEQUENCE_INPUT = "kv_sequence"
PAST_LENGTH_INPUT = "kv_past_length"
_MIN_IR_VERSION = 4  # the first that allows an initializer to be a default of an input

Rewiring = tuple[ir.Node, AttentionSite, tuple[Dim, ...]]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What will be done to a graph.

    Attributes:
        sites: The sites to fuse, with their layer keys, in graph order.
        refusals: Everything that stays, with reasons.
        rewirings: Shape nodes to answer from the past length.
        presents: Graph outputs to drop.
        batch_carrier: The input whose dim 0 is the batch size.
    """

    sites: tuple[AttentionSite, ...]
    refusals: tuple[Refusal, ...]
    rewirings: tuple[Rewiring, ...]
    presents: tuple[ir.Value, ...]
    batch_carrier: ir.Value | None


def decide(graph: ir.Graph, findings: Findings) -> Decision:
    """Which sites go, and how everything else that read a cache is served; changes nothing."""
    refusals = list(findings.refusals)
    sites: Sequence[AttentionSite] = findings.sites
    carrier = findings.space.batch_carrier()
    blocker = _blocker(graph, carrier)
    if blocker is not None:
        refusals.extend(_refused(site, Mismatch(blocker)) for site in sites)
        sites = ()
    while True:
        clearance = clear(graph, sites)
        rewirings, failed = _rewirings(findings, clearance)
        failed = failed or check(clearance.sites, [(node, dims) for node, _, dims in rewirings])
        refusals.extend(clearance.refusals)
        if not failed:
            named = name_layers(clearance.sites)
            rewirings = [(node, named[clearance.sites.index(site)], dims) for node, site, dims in rewirings]
            return Decision(tuple(named), tuple(refusals), tuple(rewirings), clearance.presents, carrier)
        refusals.extend(_refused(site, mismatch) for site, mismatch in failed)
        anchors = {site.anchor for site, _ in failed}
        sites = [site for site in clearance.sites if site.anchor not in anchors]


def _blocker(graph: ir.Graph, carrier: ir.Value | None) -> str | None:
    """Why no site of this graph can be fused, whatever the site; None when nothing stands in the way."""
    if carrier is None:
        return "no graph input other than the caches has the batch size as its dim 0"
    given, taken = {value.name for value in graph.inputs}, names_of(graph)
    for name in (SEQUENCE_INPUT, PAST_LENGTH_INPUT):
        if name in taken:
            return f"the graph already has {'an input' if name in given else 'a value'} named {name}"
    return None


def _refused(site: AttentionSite, mismatch: Mismatch) -> Refusal:
    return Refusal(site.pattern, label(site.anchor), mismatch.reason, True, site.anchor)


def _rewirings(
    findings: Findings, clearance: Clearance
) -> tuple[list[Rewiring], list[tuple[AttentionSite, Mismatch]]]:
    rewirings: list[Rewiring] = []
    failed: dict[ir.Node, tuple[AttentionSite, Mismatch]] = {}
    for node, site in clearance.shapes:
        try:
            rewirings.append((node, site, tuple(guarded(fit_shape, findings, clearance.sites, node, site))))
        except Mismatch as mismatch:
            failed[site.anchor] = (site, mismatch)
    return rewirings, list(failed.values())


def name_layers(sites: Sequence[AttentionSite]) -> list[AttentionSite]:
    """Layer keys: the one number in each cache's name when those are unique, else the order in the graph."""
    numbers = [re.findall(r"\d+", str(site.past_key.name)) for site in sites]
    keys = [found[0] for found in numbers if len(found) == 1]
    if len(keys) != len(sites) or len(set(keys)) != len(keys):
        keys = [str(position) for position in range(len(sites))]
    return [dataclasses.replace(site, layer=key) for site, key in zip(sites, keys, strict=True)]


def apply(
    model: ir.Model,
    decision: Decision,
    options: Mapping[str, int | float | str],
    fingerprint: str,
    metadata: Mapping[str, Any],
) -> None:
    """Edits the model as decided; with no site to fuse it stays as it is.

    Args:
        model: The model.
        decision: From `decide` on the same graph.
        options: The op's format attributes.
        fingerprint: sha256 of the original file, which binds stored sequences to the model.
        metadata: What to keep under the key "kvfuse" beside the caches' original names.
    """
    if not decision.sites or decision.batch_carrier is None:
        return
    graph = model.graph
    # Read before anything is cut: a present may be a copy of the appended tensor.
    caches = [cache_record(site, decision.presents) for site in decision.sites]
    interface = interface_record(graph, decision)
    builder = Builder(graph)
    begin = _insert_begin(graph, builder, decision, fingerprint)
    lengths = LengthSource(builder, begin.outputs[1], decision.batch_carrier)
    for node, site, dims in decision.rewirings:
        lengths.replace(node, dims, site)
    positions = Positions(begin.outputs[2])
    for site in decision.sites:
        if site.preamble is not None:
            site.preamble.write_positions(builder, positions)
    # The last first: a site's operand may be the very output of an earlier one, which goes with it.
    for site in reversed(decision.sites):
        lower(builder, site, begin.outputs[0], positions, options)
    if any(site.preamble is not None for site in decision.sites):
        graph.sort()  # lengths and positions were written where they were first needed
    pasts = [cache for site in decision.sites for cache in site.caches]
    drop_cache_io(graph, pasts, decision.presents)
    begin.attributes["uniform"] = ir.AttrInt64("uniform", int(bool(begin.outputs[1].uses())))
    record = {**metadata, "fingerprint": fingerprint, "caches": caches, **interface}
    model.metadata_props[DOMAIN] = json.dumps(record)
    graph.opset_imports.setdefault(DOMAIN, 1)
    model.ir_version = max(model.ir_version, _MIN_IR_VERSION)


def _insert_begin(graph: ir.Graph, builder: Builder, decision: Decision, fingerprint: str) -> ir.Node:
    """KvCacheBegin as the first node, or as soon as its lengths are known, and its inputs with defaults."""
    controls = [_control(graph, SEQUENCE_INPUT, 0), _control(graph, PAST_LENGTH_INPUT, -1)]
    builder.before(graph[0])
    controls[1] = past_lengths(builder, decision.sites[0], controls[1])
    slots = builder.node(
        "KvCacheBegin",
        [*controls, decision.batch_carrier],
        {
            "fingerprint": fingerprint,
            "layers": "\n".join(site.layer for site in decision.sites),
            "uniform": 0,
        },
        domain=DOMAIN,
        outputs=[builder.fresh("slots"), builder.fresh("past_length"), builder.fresh("past_lengths")],
        name=builder.fresh("begin"),
    )
    begin = slots.producer()
    if begin is None:
        raise ValueError("KvCacheBegin was not inserted")
    shapes = (ir.Shape([None, 3]), ir.Shape([]), ir.Shape([None]))
    for output, shape in zip(begin.outputs, shapes, strict=True):
        output.type, output.shape = ir.TensorType(ir.DataType.INT64), shape
    return begin


def _control(graph: ir.Graph, name: str, default: int) -> ir.Value:
    """An int64 input [1 or B] that need not be fed."""
    value = ir.Value(
        name=name,
        shape=ir.Shape([f"{name}_rows"]),
        type=ir.TensorType(ir.DataType.INT64),
        const_value=ir.tensor(np.array([default], np.int64), name=name),
    )
    graph.inputs.append(value)
    graph.register_initializer(value)
    return value


def cache_record(site: AttentionSite, presents: Sequence[ir.Value]) -> dict[str, Any]:
    """What unfuse and import_past need to know of one layer's original caches."""
    return {
        "layer": site.layer,
        "past_key": site.past_key.name,
        "past_value": site.past_value.name,
        "present_key": present_name(site.present_key, presents),
        "present_value": present_name(site.present_value, presents),
        "present_copies": {
            side: present_names(present, presents)[1:]
            for side, present in (("key", site.present_key), ("value", site.present_value))
        },
        "dtype": (site.past_key.dtype or site.dtype).name.lower(),
        "op_dtype": site.dtype.name.lower(),
        "num_heads": site.num_heads,
        "kv_num_heads": site.kv_num_heads,
        "head_dim": site.head_dim,
        "value_head_dim": site.value_head_dim,
        "key_layout": site.cache_layout[0],
        "value_layout": site.cache_layout[1],
        "stacked_index": [operand.stacked_index for operand in site.cache_operands],
    }


def present_name(present: ir.Value, presents: Sequence[ir.Value]) -> str | None:
    """The graph output that carried an appended tensor (itself, or a copy of it)."""
    names = present_names(present, presents)
    return names[0] if names else None


def present_names(present: ir.Value, presents: Sequence[ir.Value]) -> list[str]:
    """The graph outputs that carried an appended tensor: itself first, then copies of it."""
    names = [str(present.name)] if present in presents else []
    for output in presents:
        value: ir.Value | None = output
        while value is not None and value is not present:
            node = value.producer()
            value = node.inputs[0] if node is not None and node.op_type in ("Identity", "Cast") else None
        if value is present and str(output.name) not in names:
            names.append(str(output.name))
    return names


def interface_record(graph: ir.Graph, decision: Decision) -> dict[str, Any]:
    """The graph's inputs and outputs in their order, and the types of those that go."""
    pasts = dict.fromkeys(cache for site in decision.sites for cache in site.caches)
    gone = [*pasts, *dict.fromkeys(decision.presents)]
    return {
        "inputs": [value.name for value in graph.inputs],
        "outputs": [value.name for value in graph.outputs],
        "dropped": {str(value.name): _declared(value) for value in gone},
    }


def _declared(value: ir.Value) -> dict[str, Any]:
    """A value's type as plain data; dims are numbers, names, or None."""
    shape = None
    if value.shape is not None:
        shape = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return {"dtype": None if value.dtype is None else value.dtype.name.lower(), "shape": shape}
