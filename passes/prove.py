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
from .probes import Probe
from .proposal import HIDDEN, positions_bias
from .site import LAYOUTS, AttentionSite, BiasTerm, Mismatch, Operand
from .trial import Trial
from .values import dtype_of

# Largest error over the largest output: float sums in another order; half inputs, products and results.
TOLERANCE = {ir.DataType.FLOAT: 1e-4, ir.DataType.FLOAT16: 1e-2}
_PROBES = ((5, 0, "none"), (1, 6, "none"), (3, 4, "left"), (2, 5, "holes"), (4, 3, "right"))


def prove(trial: Trial, site: AttentionSite) -> list[dict[str, Any]]:
    """Compares the original with the site's model on every proof probe.

    Returns:
        The probes and the errors found, as plain data for the report.

    Raises:
        Mismatch: They differ, or the original cannot be evaluated.
    """
    trial.query_gain = 1.5 / (site.scale * math.sqrt(site.head_dim))
    evidence = []
    for sequence, past, padding in _PROBES:
        probe = trial.probe(sequence, past, padding if site.mask.padding is not None else "none")
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
        The output [B, H, S, Dv], and bool [B, H, S]: the rows in which at least one key is visible.
    """
    bound = evaluation.bindings
    query = canonical(site.query, bound[site.query.value], site.num_heads)  # B H S D
    key = _joined(site, site.past_key, site.key, bound)  # B K T D
    value = _joined(site, site.past_value, site.value, bound)  # B K T Dv
    group = site.num_heads // site.kv_num_heads
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    scores = site.scale * query @ key.swapaxes(-1, -2)  # B H S T
    if site.softcap:
        scores = site.softcap * np.tanh(scores / site.softcap)
    added = positions_bias(probe, site.mask.causal, site.mask.window_left)[None, None]
    if site.mask.padding is not None:
        attend = bound[site.mask.padding].astype(bool)[:, None, None, :]
        added = added + np.where(attend, 0.0, -np.inf)
    for term in site.mask.bias:
        added = added + bias_array(term, evaluation.array(term.value))
    added = np.broadcast_to(added, scores.shape)
    visible: Array = np.any(added > HIDDEN, axis=-1)
    scores = scores + np.where(visible[..., None], added, 0.0)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value, visible


def bias_array(term: BiasTerm, array: Array) -> Array:
    """What a bias term adds to the scores, in float64."""
    if term.fill is None:
        return array.astype(np.float64) * term.factor
    return np.where(array.astype(bool) == term.visible_when, 0.0, term.fill * term.factor)


def canonical(operand: Operand, array: Array, heads: int) -> Array:
    """An operand's array as float64 [B, heads, S, D]."""
    array = np.asarray(array, np.float64)
    if operand.layout == "BSC":
        batch, sequence, width = array.shape
        array = array.reshape(batch, sequence, heads, width // heads)
    return np.transpose(array, LAYOUTS["BSHD" if operand.layout == "BSC" else operand.layout])


def _joined(site: AttentionSite, past: ir.Value, new: Operand, bound: dict[ir.Value, Array]) -> Array:
    layout = site.cache_layout
    cached = canonical(
        Operand(past, layout[0] if past is site.past_key else layout[1]), bound[past], site.kv_num_heads
    )
    return np.concatenate([cached, canonical(new, bound[new.value], site.kv_num_heads)], axis=2)
