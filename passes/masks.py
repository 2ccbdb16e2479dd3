"""Masks by meaning: evaluates what a site adds to its scores and finds the rule that explains every probe.

The rules are: nothing hidden; causal (the query at position p sees keys 0..p); a window (p - W..p); each with
or without keys hidden where a [B, T] graph input is 0. What no rule explains is passed through as a bias.
Rows in which a rule hides every key are not compared: what an original gives there (NaN, a mean) is its own
affair.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from .plan import Array
from .probes import PADDINGS, Probe
from .proposal import HIDDEN, ScoreChain, positions_bias
from .site import BiasTerm, Mask, Mismatch, TooLarge, label
from .trial import Trial
from .walk import numbers_in

# New tokens and cached tokens of the base probes: prefill, decode, a chunk.
_BASE = ((5, 0), (1, 6), (3, 4))
# Cached tokens behind two new ones, to find windows; a constant table in the graph may end earlier.
_LONG = (20, 62, 126, 300, 1022, 2046, 5000, 40000, 300000)
# Where nothing is ever cached, all tokens of a probe are queries, and a mask takes the square of memory.
_LONG_PREFILL = (20, 62, 126, 300)
# Of a long prefill, the queries that the proof tells about.
_TOLD_QUERIES = 64
# No window is this long; larger numbers mean "to the end" or "never".
_ENDLESS = 1 << 22


@dataclasses.dataclass(frozen=True)
class Observation:
    """What one probe gave: visible[b, h, s, j] is true where the query s of row b sees key j."""

    probe: Probe
    visible: Array
    plain: bool

    def describe(self) -> dict[str, Any]:
        """The probe and the ranges of keys that each query of each row saw, as plain data."""
        rows = self.visible[:, 0, -_TOLD_QUERIES:]
        return {
            **self.probe.describe(),
            "visible": [[_ranges(query) for query in row] for row in rows],
        }


def classify(trial: Trial) -> Mask:
    """Finds the rule of the trial's mask.

    Raises:
        Mismatch: The mask cannot be evaluated, or needs to be passed through and cannot be.
    """
    source = trial.proposal.mask
    reads = source.reads()
    _require_no_cache_data(trial, reads)
    candidates = [value for value in reads if trial.space.is_padding_like(value, trial.roles)]
    padding = candidates[0] if len(reads) == 1 and candidates else None
    paddings = PADDINGS if padding is not None else ("none",)
    base = [
        _observe(trial, trial.probe(sequence, past, kind)) for sequence, past in _BASE for kind in paddings
    ]
    if reads and padding is None:
        return _pass_through(trial, base, f"it reads {', '.join(sorted(label(value) for value in reads))}")
    if not all(observation.plain for observation in base):
        return _pass_through(trial, base, "it adds values other than 0 and minus infinity")
    reach = _reach(trial)
    unseen = _unseen_constant(trial, reach)
    if unseen is not None:
        why = f"it could be evaluated for {reach.past} cached tokens only and contains the number {unseen:g}"
        return _pass_through(trial, base + reach.observations, why)
    window = reach.window()
    observations = base + reach.observations + (_observe_window(trial, window) if window >= 0 else [])
    for causal, left in ((False, -1), (True, -1), (True, window)):
        for padded in (False, True) if padding is not None else (False,):
            if all(_explains(observation, causal, left, padded) for observation in observations):
                return _mask(causal, left, padding if padded else None, observations)
    return _pass_through(trial, observations, "no rule explains which keys it hides")


def _mask(causal: bool, window: int, padding: ir.Value | None, observations: list[Observation]) -> Mask:
    kind = "window" if window >= 0 else "causal" if causal else "none"
    if padding is not None:
        kind = "padding" if kind == "none" else f"{kind}+padding"
    proof = tuple(observation.describe() for observation in observations)
    return Mask(kind, causal, window, padding, (), proof)


def _require_no_cache_data(trial: Trial, reads: set[ir.Value]) -> None:
    for cache in (trial.proposal.key_cache, trial.proposal.value_cache):
        if cache.value in reads:
            raise Mismatch(
                f"the mask depends on the data of the cache {label(cache.value)}", trial.proposal.anchor
            )


def _observe(trial: Trial, probe: Probe) -> Observation:
    source = trial.proposal.mask
    evaluation = trial.evaluation(probe, data=False, cut=source.cut)
    bias = source.bias(evaluation, probe)
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape) if bias.ndim < 4 else bias
    if bias.ndim != 4 or bias.shape[-1] not in (1, probe.total) or bias.shape[-2] not in (1, probe.sequence):
        raise Mismatch(
            f"the mask has shape {bias.shape} for {probe.sequence} new and {probe.past} cached tokens; "
            "expected it to broadcast to [batch, heads, new, all]",
            trial.proposal.anchor,
        )
    full = np.broadcast_to(bias, (*bias.shape[:2], probe.sequence, probe.total))
    # A hidden key's own value does not matter: NaN (0 * -inf) is none of both.
    hidden = full <= HIDDEN
    return Observation(probe, ~hidden, bool(np.all(hidden | (full == 0.0))))


@dataclasses.dataclass(frozen=True)
class Reach:
    """Long caches behind two new tokens, as far as the graph can be evaluated.

    Attributes:
        observations: What the probes gave, the shortest first.
        whole: The graph itself ends there (a constant table), so that nothing lies beyond.
    """

    observations: list[Observation]
    whole: bool

    @property
    def past(self) -> int:
        """The longest cache that was evaluated."""
        return self.observations[-1].probe.total - 2 if self.observations else max(past for _, past in _BASE)

    def window(self) -> int:
        """The window that the longest probe shows: p - first visible key; -1 when key 0 is visible."""
        visible = self.observations[-1].visible[0, 0, -1] if self.observations else np.ones(1, bool)
        if not visible.any() or visible[0]:
            return -1
        return self.observations[-1].probe.total - 1 - int(np.argmax(visible))


def _reach(trial: Trial) -> Reach:
    batch = 1 if trial.space.batch_size() is None else None
    found: list[Observation] = []
    for past in _LONG_PREFILL if trial.space.prefill_only else _LONG:
        try:
            found.append(_observe(trial, trial.probe(2, past, batch=batch)))
        except TooLarge:
            return Reach(found, whole=False)
        except Mismatch:
            found += _last_before(trial, found[-1].probe.total - 2 if found else 0, past, batch)
            return Reach(found, whole=True)
    return Reach(found, whole=False)


def _last_before(trial: Trial, works: int, fails: int, batch: int | None) -> list[Observation]:
    """The longest cache between one that works and one that fails, by bisection; [] when it is `works`."""
    last: list[Observation] = []
    while fails - works > 1:
        past = (works + fails) // 2
        try:
            last = [_observe(trial, trial.probe(2, past, batch=batch))]
            works = past
        except Mismatch:
            fails = past
    return last


def _unseen_constant(trial: Trial, reach: Reach) -> float | None:
    """A constant of the mask that could change its rule beyond the longest probe, as a window would."""
    if reach.whole:
        return None
    source = trial.proposal.mask
    ends = [source.end] if isinstance(source, ScoreChain) else [term.value for term in source.terms]
    numbers = numbers_in(ends, {source.cut} if source.cut is not None else set())
    return next((number for number in numbers if reach.past < number < _ENDLESS), None)


def _observe_window(trial: Trial, window: int) -> list[Observation]:
    """Probes just before, at and beyond the edge of a window, and a prefill longer than it."""
    shapes = [(3, max(window - 2, 0)), (1, window), (1, window + 1)]
    if window <= 1024:
        shapes.append((window + 3, 0))
    return [_observe(trial, trial.probe(sequence, past)) for sequence, past in shapes]


def _explains(observation: Observation, causal: bool, window: int, padded: bool) -> bool:
    probe = observation.probe
    rule = np.isfinite(positions_bias(probe, causal, window))[:, None]
    if padded:
        rule = rule & probe.attend()[:, None, None, :]
    compared = rule.any(axis=-1, keepdims=True)
    return observation.plain and bool(np.all(~compared | (observation.visible == rule)))


def _pass_through(trial: Trial, observations: list[Observation], why: str) -> Mask:
    """The mask as a bias, exactly as the original adds it."""
    source = trial.proposal.mask
    if not source.terms:
        raise Mismatch(f"the mask cannot be passed through as a bias although {why}", trial.proposal.anchor)
    for term in source.terms:
        if math.isnan(term.factor) or (term.factor != 1.0 and term.fill is None):
            raise Mismatch(f"{label(term.value)} is added to the scores before they are scaled", term.value)
    _require_full_width(trial)
    terms = tuple(_settled(trial, term) for term in source.terms)
    proof: list[Mapping[str, Any]] = [observation.describe() for observation in observations]
    return Mask("other", source.causal, source.window_left, None, terms, (*proof, {"passed_through": why}))


def _settled(trial: Trial, term: BiasTerm) -> BiasTerm:
    """A term whose leading axis is 1 instead of B*H spreads over all heads as it is."""
    if term.fold != "batch":
        return term
    shape = trial.evaluation(trial.probe(3, 4), data=False, cut=trial.proposal.mask.cut).shape(term.value)
    return dataclasses.replace(term, fold="") if len(shape) < 3 or shape[0] == 1 else term


def _require_full_width(trial: Trial) -> None:
    """A bias must span all keys or broadcast over them: Attention pads a shorter one, the op does not."""
    probe = trial.probe(3, 4)
    for term in trial.proposal.mask.terms:
        width = trial.evaluation(probe, data=False, cut=trial.proposal.mask.cut).shape(term.value)
        if width and width[-1] not in (1, probe.total):
            raise Mismatch(f"the mask {label(term.value)} does not span all keys", term.value)


def _ranges(visible: Array) -> str:
    """Visible keys as ranges, "0-5,8-9"; "" when none is."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], visible.astype(np.int8), [0]))))
    pairs = [f"{start}-{stop - 1}" for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    return ",".join(pairs[:8]) + (",…" if len(pairs) > 8 else "")
