"""A decoder whose two branches, with and without a past, stand behind one If: both get the same states.

Emitted by: optimum (decoder_model_merged.onnx), chosen by the bool input use_cache_branch.

    If(use_cache_branch) then: present = Concat(past, new) … attention …   else: present = new … attention …

Each branch is taken out as a plain decoder, judged and rewritten like any other, and put back. The branch
without a past is the same attention behind an empty cache: joining one in front of its keys and values
changes nothing and makes it the plain form too. In front of the If the past length becomes 0 whenever that
branch is chosen, so that it starts the sequence again. A layer goes in both branches or in none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from .branches import find_choice, join, join_empty_caches, take
from .find import Findings, find_sites
from .fuse import Decision, apply, decide
from .site import AttentionSite, Refusal, label

# What a layer's state has only one of.
_OF_THE_STATE = ("kv_num_heads", "head_dim", "value_head_dim", "dtype", "num_heads")


@dataclasses.dataclass(frozen=True)
class MergedRewriting:
    """What will be done to a merged decoder.

    Attributes:
        model: The merged model, unchanged.
        decision: What is done to the branch with a past, which stands for both in the report.
        past_branch: The If's attribute that holds it.
        branches: The branch with a past and the one without, as plain models, and what is done to each.
    """

    model: ir.Model
    decision: Decision
    past_branch: str
    branches: tuple[tuple[ir.Model, Decision], tuple[ir.Model, Decision]]

    def apply(
        self, options: Mapping[str, int | float | str], fingerprint: str, metadata: Mapping[str, Any]
    ) -> ir.Model:
        """The rewritten model, made of both rewritten branches; see `fuse.apply`."""
        for model, decision in self.branches:
            apply(model, decision, options, fingerprint, metadata)
        (with_past, _), (fresh, _) = self.branches
        return join(self.model, self.past_branch, with_past, fresh)


def plan_merged(model: ir.Model) -> MergedRewriting | None:
    """Decides about a merged decoder; None when the model is none. Nothing of it is changed."""
    choice = find_choice(model)
    if choice is None:
        return None
    with_past = take(model, choice.past_branch)
    fresh = take(model, choice.fresh_branch)
    first = find_sites(with_past)
    join_empty_caches(with_past.graph, fresh.graph, first.sites)
    second = find_sites(fresh, prefill_only=True)
    refusals = list(first.refusals)
    pairs = _pairs(first.sites, second, refusals)
    while True:
        one = _decide(with_past, first, [site for site, _ in pairs.values()])
        other = _decide(fresh, second, [site for _, site in pairs.values()])
        refusals += [*one.refusals, *_in_fresh(other, pairs)]
        kept = {_key(site) for site in one.sites} & {_key(site) for site in other.sites}
        if len(kept) == len(pairs):
            break
        pairs = {key: pair for key, pair in pairs.items() if key in kept}
    layers = {_key(site): site.layer for site in one.sites}
    named = tuple(dataclasses.replace(site, layer=layers[_key(site)]) for site in other.sites)
    told = dataclasses.replace(
        one, sites=tuple(_with_evidence(site, named) for site in one.sites), refusals=tuple(refusals)
    )
    branches = (with_past, one), (fresh, dataclasses.replace(other, sites=named))
    return MergedRewriting(model, told, choice.past_branch, branches)


def _decide(model: ir.Model, findings: Findings, sites: list[AttentionSite]) -> Decision:
    return decide(model.graph, dataclasses.replace(findings, sites=sites, refusals=[]))


def _key(site: AttentionSite) -> str:
    return str(site.past_key.name)


def _pairs(
    sites: list[AttentionSite], fresh: Findings, refusals: list[Refusal]
) -> dict[str, tuple[AttentionSite, AttentionSite]]:
    """The sites that both branches have, by the name of their key cache; others are added to `refusals`."""
    others = {_key(site): site for site in fresh.sites}
    pairs = {}
    for site in sites:
        other = others.get(_key(site))
        reason = _difference(site, other) if other is not None else _missing(fresh)
        if other is None or reason:
            refusals.append(Refusal(site.pattern, label(site.anchor), reason, True, site.anchor))
        else:
            pairs[_key(site)] = site, other
    return pairs


def _missing(fresh: Findings) -> str:
    found = next((refusal for refusal in fresh.refusals if refusal.cached), None)
    why = f": {found.reason} ({found.node})" if found is not None else ""
    return f"the branch without a past has no attention that fills this cache{why}"


def _difference(site: AttentionSite, other: AttentionSite) -> str:
    """Why one state cannot serve both; "" when it can."""
    found = [(name, getattr(site, name), getattr(other, name)) for name in _OF_THE_STATE]
    found.append(("window_left", site.mask.window_left, other.mask.window_left))
    unequal = [f"{name} {one} and {two}" for name, one, two in found if one != two]
    return f"its two branches differ: {', '.join(unequal)}" if unequal else ""


def _in_fresh(decision: Decision, pairs: dict[str, tuple[AttentionSite, AttentionSite]]) -> list[Refusal]:
    """Refusals of the branch without a past, told at the anchors of the branch with one."""
    anchors = {other.anchor: site for site, other in pairs.values()}
    return [
        Refusal(
            refusal.pattern,
            label(anchors[refusal.anchor].anchor),
            f"the branch without a past cannot be fused: {refusal.reason}",
            True,
            anchors[refusal.anchor].anchor,
        )
        for refusal in decision.refusals
        if refusal.anchor in anchors
    ]


def _with_evidence(site: AttentionSite, others: tuple[AttentionSite, ...]) -> AttentionSite:
    """The site with the proof of its twin in the branch without a past."""
    twin = next(other for other in others if _key(other) == _key(site))
    evidence = [{**entry, "branch": "without a past", "mask": twin.mask.kind} for entry in twin.evidence]
    return dataclasses.replace(site, evidence=(*site.evidence, *evidence))
