"""Finds every attention with a growing cache: structure proposes, evaluation disposes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

import onnx_ir as ir

from .evaluate import Evaluator
from .masks import classify
from .patterns import (
    concat_attention,
    contrib_attention,
    decomposed_sdpa,
    group_query_attention,
    multi_head_attention,
    onnx_attention,
    unsupported,
)
from .probabilities import operands_of
from .probes import InputSpace, Roles
from .proposal import Proposal
from .prove import prove
from .site import AttentionSite, Mismatch, Operand, Refusal, label
from .trial import SERVED_DTYPES, Trial
from .values import dtype_of
from .walk import inputs_reached, reads_cache

Result = TypeVar("Result")
# Readings of the input dims that are tried before a site is refused.
_MAX_TRIALS = 12


@dataclasses.dataclass
class Findings:
    """What a graph holds: sites that may be fused, and attentions that may not."""

    sites: list[AttentionSite]
    refusals: list[Refusal]
    space: InputSpace
    evaluator: Evaluator


def find_sites(model: ir.Model, *, prefill_only: bool = False) -> Findings:
    """Looks for sites in the main graph; nothing is changed.

    Args:
        model: The model.
        prefill_only: Its caches are empty in every run.
    """
    graph = model.graph
    evaluator = Evaluator(model)
    proposals: list[Proposal] = []
    refusals = list(unsupported.find(model))
    for pattern in (
        onnx_attention,
        concat_attention,
        group_query_attention,
        multi_head_attention,
        contrib_attention,
        decomposed_sdpa,
    ):
        for anchor in pattern.anchors(graph):
            try:
                proposals.append(guarded(pattern.propose, anchor))
            except Mismatch as mismatch:
                if pattern is not decomposed_sdpa or operands_of(anchor):
                    refusals.append(_refusal(pattern.NAME, anchor, mismatch))
    caches: dict[ir.Value, Operand] = {}
    for proposal in proposals:
        caches[proposal.key_cache.value] = proposal.key_cache
        caches[proposal.value_cache.value] = proposal.value_cache
    space = InputSpace(graph, caches, prefill_only=prefill_only)
    sites = []
    for proposal in proposals:
        try:
            sites.append(describe(proposal, evaluator, space))
        except Mismatch as mismatch:
            refusals.append(_refusal(proposal.pattern, proposal.anchor, mismatch))
    return Findings(sites, refusals, space, evaluator)


def guarded(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls an analysis; what it trips over refuses its site and not the whole model.

    Raises:
        Mismatch: The analysis said no, or failed.
    """
    try:
        return function(*arguments)
    except Mismatch:
        raise
    except Exception as error:  # an odd graph breaks an assumption: the safe answer is no
        message = str(error).strip().splitlines()
        detail = f"{type(error).__name__}: {message[0][:160]}" if message else type(error).__name__
        raise Mismatch(f"the analysis of this attention failed ({detail})") from error


def describe(proposal: Proposal, evaluator: Evaluator, space: InputSpace) -> AttentionSite:
    """The proven site of a proposal.

    Raises:
        Mismatch: No reading of the graph's input dims makes it one; the sentence is the likeliest reading's.
    """
    cut = {proposal.query.value, proposal.new_key.value, proposal.new_value.value, *proposal.reads()}
    used = inputs_reached([proposal.output.value], cut)
    first: Mismatch | None = None
    for roles in islice(space.trials(used), _MAX_TRIALS):
        try:
            return guarded(_describe, proposal, evaluator, space, roles)
        except Mismatch as mismatch:
            first = first or mismatch
    raise first or Mismatch("no reading of the graph's inputs was possible", proposal.anchor)


def _describe(proposal: Proposal, evaluator: Evaluator, space: InputSpace, roles: Roles) -> AttentionSite:
    trial = Trial(proposal, evaluator, space, roles)
    scale, softcap = trial.scale_and_softcap()
    dtype = dtype_of(proposal.output.value)
    if dtype not in SERVED_DTYPES:
        raise Mismatch(f"its output is {dtype.name}; expected float or float16", proposal.anchor)
    site = AttentionSite(
        pattern=proposal.pattern,
        anchor=proposal.anchor,
        query=proposal.query,
        key=proposal.new_key,
        value=proposal.new_value,
        output=proposal.output.value,
        output_layout=proposal.output.layout,
        past_key=proposal.key_cache.value,
        past_value=proposal.value_cache.value,
        present_key=proposal.key.present,
        present_value=proposal.value.present,
        cache_layout=(proposal.key_cache.layout, proposal.value_cache.layout),
        num_heads=trial.heads,
        kv_num_heads=trial.kv_heads,
        head_dim=trial.head_dim,
        value_head_dim=trial.value_head_dim,
        dtype=dtype,
        scale=scale,
        softcap=softcap,
        mask=classify(trial),
        preamble=proposal.preamble,
        head_sink=proposal.head_sink,
        smooth_softmax=proposal.smooth_softmax,
        seqlens=None if proposal.lengths is None else proposal.lengths.seqlens,
        stacked=proposal.key_cache.stacked_index is not None,
    )
    evidence: list[dict[str, Any]] = prove(trial, site)
    return dataclasses.replace(site, evidence=tuple(evidence), roles=trial.roles)


def _refusal(pattern: str, anchor: ir.Node, mismatch: Mismatch) -> Refusal:
    return Refusal(pattern, label(anchor), mismatch.reason, reads_cache(operands_of(anchor)), anchor)
