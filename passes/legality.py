"""Conditions common to all patterns: who else reads a cache, and whether everything that does can be served.

A site may go only when, after it went, nothing that is still needed reads cache data. Reading a cache's
*shape* is
fine: those Shape nodes are collected here and answered from the past length (past_length.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir

from .pairing import crossed
from .site import AttentionSite, Mismatch, Refusal, label
from .values import is_op
from .walk import PASS_OPS


@dataclasses.dataclass(frozen=True)
class Clearance:
    """What may be done.

    Attributes:
        sites: The sites to fuse, in graph order.
        refusals: The sites that stay, with reasons.
        shapes: Live Shape nodes of cache values, each with the site whose cache it measures.
        presents: The graph outputs to drop.
    """

    sites: tuple[AttentionSite, ...]
    refusals: tuple[Refusal, ...]
    shapes: tuple[tuple[ir.Node, AttentionSite], ...]
    presents: tuple[ir.Value, ...]


def clear(graph: ir.Graph, sites: Iterable[AttentionSite]) -> Clearance:
    """Decides which sites can be fused together; changes nothing."""
    order = {node: position for position, node in enumerate(graph)}
    candidates = sorted(sites, key=lambda site: order[site.anchor])
    refusals: list[Refusal] = []
    while True:
        blocked = _blocked(graph, candidates)
        if not blocked.reasons:
            presents = tuple(dict.fromkeys(value for site in candidates for value in _presents(graph, site)))
            return Clearance(tuple(candidates), tuple(refusals), tuple(blocked.shapes), presents)
        for site in [site for site in candidates if site.anchor in blocked.reasons]:
            mismatch = blocked.reasons[site.anchor]
            refusals.append(Refusal(site.pattern, label(site.anchor), mismatch.reason, True, site.anchor))
        candidates = [site for site in candidates if site.anchor not in blocked.reasons]


class _Blocked:
    """Reasons by anchor, and the live Shape nodes found on the way."""

    def __init__(self) -> None:
        self.reasons: dict[ir.Node, Mismatch] = {}
        self.shapes: list[tuple[ir.Node, AttentionSite]] = []

    def add(self, site: AttentionSite, mismatch: Mismatch) -> None:
        self.reasons.setdefault(site.anchor, mismatch)


def _blocked(graph: ir.Graph, sites: list[AttentionSite]) -> _Blocked:
    blocked = _Blocked()
    readers: dict[ir.Value, list[ir.Node]] = {}
    for site in sites:
        for cache in site.caches:
            readers.setdefault(cache, []).append(site.anchor)
    for site in sites:
        for cache in site.caches:
            if len(readers[cache]) > 1:
                blocked.add(site, _shared(cache, readers[cache]))
        for present, what in ((site.present_key, "key"), (site.present_value, "value")):
            if not aliases(graph, present):
                blocked.add(
                    site, Mismatch(f"the appended {what} {label(present)} is not a graph output", site.anchor)
                )
    outputs = {
        present: aliases(graph, present)
        for site in sites
        for present in (site.present_key, site.present_value)
    }
    for site, mismatch in crossed(sites, outputs):
        blocked.add(site, mismatch)
    if not blocked.reasons:
        _read_back(graph, sites, blocked)
    return blocked


def _shared(cache: ir.Value, readers: list[ir.Node]) -> Mismatch:
    names = ", ".join(label(reader) for reader in readers)
    return Mismatch(
        f"the cache {label(cache)} is read by {len(readers)} attentions ({names}); a state serves one and "
        "would append the same tokens for each, so all of them keep the float cache",
        readers[0],
    )


def _presents(graph: ir.Graph, site: AttentionSite) -> list[ir.Value]:
    return aliases(graph, site.present_key) + aliases(graph, site.present_value)


def aliases(graph: ir.Graph, present: ir.Value) -> list[ir.Value]:
    """The graph outputs that are the present itself, behind Identity and Cast at most."""
    outputs = set(graph.outputs)
    found, stack = [], [present]
    while stack:
        value = stack.pop()
        if value in outputs:
            found.append(value)
        stack.extend(user.outputs[0] for user in value.consumers() if is_op(user, *PASS_OPS))
    return found


def _tainted(sites: list[AttentionSite]) -> dict[ir.Value, AttentionSite]:
    """Every value that holds cache data, with one site it comes from; a site's output ends the trail."""
    outputs = {site.output for site in sites}
    tainted: dict[ir.Value, AttentionSite] = {}
    stack = [(cache, site) for site in sites for cache in site.caches]
    while stack:
        value, site = stack.pop()
        if value in tainted or value in outputs:
            continue
        tainted[value] = site
        for user in value.consumers():
            if not is_op(user, "Shape"):
                stack.extend((output, site) for output in user.outputs)
    return tainted


def _read_back(graph: ir.Graph, sites: list[AttentionSite], blocked: _Blocked) -> None:
    """Walks back from the outputs that stay: meeting cache data blocks its site, its shape is noted."""
    tainted = _tainted(sites)
    by_output = {site.output: site for site in sites}
    dropped = {value for site in sites for value in _presents(graph, site)}
    stack: list[tuple[ir.Value, str]] = [
        (value, f"the graph output {label(value)}") for value in graph.outputs if value not in dropped
    ]
    seen: set[ir.Value] = set()
    while stack:
        value, reader = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if value in by_output:
            site = by_output[value]
            stack.extend((operand, f"the input of {label(site.anchor)}") for operand in site_inputs(site))
        elif value in tainted:
            site = tainted[value]
            reason = (
                f"cache data of {label(site.past_key)} or {label(site.past_value)} is also read by {reader}"
            )
            blocked.add(site, Mismatch(f"{reason} (through {label(value)})", site.anchor))
        elif node is not None and is_op(node, "Shape") and node.inputs[0] in tainted:
            blocked.shapes.append((node, tainted[node.inputs[0]]))
        elif node is not None:
            stack.extend((operand, label(node)) for operand in _reads(node))
    for site in sites:
        if site.output not in seen:
            blocked.add(
                site, Mismatch(f"nothing that stays reads its output {label(site.output)}", site.anchor)
            )


def site_inputs(site: AttentionSite) -> list[ir.Value]:
    """What the fused op will read of the original graph."""
    padding = [] if site.mask.padding is None else [site.mask.padding]
    new_tokens = [site.query.value, site.key.value, site.value.value]
    if site.preamble is not None:
        new_tokens = site.preamble.reads()
    extra = [value for value in (site.head_sink, site.seqlens) if value is not None]
    return [*new_tokens, *extra, *padding, *(term.value for term in site.mask.bias)]


def _reads(node: ir.Node) -> list[ir.Value]:
    """Everything a node reads, including what its subgraphs capture."""
    values = [operand for operand in node.inputs if operand is not None]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in ir.traversal.RecursiveGraphIterator(attribute.as_graph()):
                values.extend(operand for operand in inner.inputs if operand is not None)
            values.extend(attribute.as_graph().outputs)
    return values
