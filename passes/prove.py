"""Proves a proposed site: the original subgraph and a float64 model of the op must give the same numbers.

This is what catches a wrong head map, scale, axis or alignment, whatever spelling hid it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from .evaluate import Evaluation
from .plan import Array
from .probes import RAGGED, Probe
from .proposal import HIDDEN, positions_bias
from .site import LAYOUTS, AttentionSite, BiasTerm, Mismatch, Operand
from .trial import Trial
from .values import dtype_of

# Largest error over the largest output: float sums in another order; half inputs, products and results.
TOLERANCE = {ir.DataType.FLOAT: 1e-4, ir.DataType.FLOAT16: 1e-2}


def prove(trial: Trial, site: AttentionSite) -> list[dict[str, Any]]:
    """Compares the original with the site's model on every proof probe.

    Returns:
        The probes and the errors found, as plain data for the report.

    Raises:
        Mismatch: They differ, or the original cannot be evaluated.
    """
    trial.query_gain = 1.5 / (site.scale * math.sqrt(site.head_dim))
    evidence = []
    fixed = trial.space.batch_size()
    for sequence, past, padding, batch in trial.proposal.probes:
        if batch is not None and fixed is not None and batch != fixed:
            continue
        padded = site.mask.padding is not None or padding == RAGGED
        probe = trial.probe(sequence, past, padding if padded else "none", batch)
        evaluation = trial.evaluation(probe, data=True)
        original = canonical(
            Operand(site.output, site.output_layout), evaluation.array(site.output), site.num_heads
        )
        expected, compared = model(site, evaluation, probe)
        if original.shape != expected.shape:
            raise Mismatch(
                f"the site gives shape {original.shape}; its description gives {expected.shape}", site.anchor
            )
        largest = max(float(np.abs(expected).max(initial=0.0)), 1e-3)
        difference = np.abs(original - expected)[compared]
        error = float(difference.max(initial=0.0)) / largest if np.isfinite(difference).all() else math.inf
        if not error <= _tolerance(site):
            raise Mismatch(
                f"the site does not compute what its description says: relative error {error:.1e} "
                f"with {sequence} new and {past} cached tokens",
                site.anchor,
            )
        evidence.append({**probe.describe(), "relative_error": float(f"{error:.1e}")})
    return evidence


def _tolerance(site: AttentionSite) -> float:
    return max(
        TOLERANCE[dtype_of(value)]
        for value in (site.output, site.query.value, site.past_key, site.past_value)
    )


def model(site: AttentionSite, evaluation: Evaluation, probe: Probe) -> tuple[Array, Array]:
    """What the op computes in exact mode, in float64.

    Returns:
        The output [B, H, S, Dv], and bool [B, H, S]: the tokens that count and see at least one key.
    """
    bound = evaluation.bindings
    query, key, value = _new_tokens(site, evaluation, probe)  # B heads S D
    key_cache, value_cache = site.cache_operands
    key = _joined(canonical(key_cache, bound[key_cache.value], site.kv_num_heads), key, probe)  # B K T D
    value = _joined(canonical(value_cache, bound[value_cache.value], site.kv_num_heads), value, probe)
    group = site.num_heads // site.kv_num_heads
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    scores = site.scale * query @ key.swapaxes(-1, -2)  # B H S T
    if site.softcap:
        scores = site.softcap * np.tanh(scores / site.softcap)
    added = positions_bias(probe, site.mask.causal, site.mask.window_left)[:, None]
    if site.mask.padding is not None:
        attend = bound[site.mask.padding].astype(bool)[:, None, None, :]
        added = added + np.where(attend, 0.0, -np.inf)
    for term in site.mask.bias:
        added = added + bias_array(term, evaluation.array(term.value), site.num_heads)
    added = np.broadcast_to(added, scores.shape)
    visible: Array = np.any(added > HIDDEN, axis=-1)
    scores = scores + np.where(visible[..., None], added, 0.0)
    sink = _sink(site, bound)  # 1 H 1 1, or nothing
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    weights /= weights.sum(axis=-1, keepdims=True) + (0.0 if sink is None else np.exp(sink - largest))
    counts = np.arange(probe.sequence) < (probe.lengths() - probe.pasts())[:, None]  # B S
    return weights @ value, visible & counts[:, None]


def _new_tokens(site: AttentionSite, evaluation: Evaluation, probe: Probe) -> list[Array]:
    """Query, key and value of this run [B, heads, S, D], as the fused op would get them."""
    bound = evaluation.bindings
    operands = [site.query, site.key, site.value]
    arrays = [bound[operand.value] for operand in operands]
    if site.preamble is not None:
        beside = evaluation.beside
        arrays = site.preamble.evaluated_in(beside, bound, site.heads, probe.pasts(), evaluation.opset)
        operands = [Operand(operand.value, "BSC") for operand in operands]
    counts = (site.num_heads, site.kv_num_heads, site.kv_num_heads)
    return [canonical(*each) for each in zip(operands, arrays, counts, strict=True)]


def _sink(site: AttentionSite, bound: dict[ir.Value, Array]) -> Array | None:
    if site.head_sink is None:
        return np.zeros((1, 1, 1, 1)) if site.smooth_softmax else None
    return np.asarray(bound[site.head_sink], np.float64).reshape(1, -1, 1, 1)


def bias_array(term: BiasTerm, array: Array, heads: int) -> Array:
    """What a bias term adds to the scores, in float64, with the heads on an axis of their own."""
    if term.fold == "batch":
        array = array.reshape(-1, heads, *array.shape[1:])
    elif term.fold == "groups":
        array = array.reshape(array.shape[0], -1, *array.shape[3:])
    if term.fill is None:
        return array.astype(np.float64) * term.factor
    return np.where(array.astype(bool) == term.visible_when, 0.0, term.fill * term.factor)


def canonical(operand: Operand, array: Array, heads: int) -> Array:
    """An operand's array as float64 [B, heads, S, D]."""
    array = np.asarray(array if operand.stacked_index is None else array[operand.stacked_index], np.float64)
    if operand.layout == "BSC":
        batch, sequence, width = array.shape
        array = array.reshape(batch, sequence, heads, width // heads)
    return np.transpose(array, LAYOUTS["BSHD" if operand.layout == "BSC" else operand.layout])


def _joined(cached: Array, new: Array, probe: Probe) -> Array:
    """Each row's cached tokens and its new ones [B, K, T, D]; zeros behind a shorter row."""
    batch, heads, sequence, head_dim = new.shape
    result = np.zeros((batch, heads, probe.total, head_dim))
    for row, past in enumerate(probe.pasts()):
        result[row, :, :past] = cached[row, :, :past]
        result[row, :, past : past + sequence] = new[row]
    return result
