"""The choice of every layer's format and its evidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvfuse.errors import OptionError
from kvfuse.formats import KvFormat

from .allocate import Candidate, allocate
from .attention import Attention
from .choice import AutoChoice, LayerChoice, kl_budget
from .probe import Damage, Probe, ProbeRun, Progress
from .rewritten import EXACT, Rewritten, bits_per_element
from .weights import KeyOffset, key_offsets

DEFAULT_TARGET = 0.01
# Without a probe: keys whose stored form misses the part that varies by more than this get 8 bits. Keys
# without offsets are at 0.09-0.12 in 4 bits; see docs/quality-auto.md for what lies between.
MAX_KEY_ERROR = 0.2
# Without logits to measure by, a layer's own relative output error decides.
MAX_OUTPUT_ERROR = 0.10
_ROUNDS = 5
_CLOSE = 0.8  # a choice that uses this share of the budget is good enough to stop
# (key_bits, value_bits, group_size), in addition to the base format's own.
_LADDER = (
    (4, 4, 64),
    (4, 4, 32),
    (8, 4, 64),
    (8, 4, 32),
    (4, 8, 32),
    (8, 8, 64),
    (8, 8, 32),
    (16, 16, 0),
)


def choose_formats(
    rewritten: Rewritten,
    sizes: Mapping[str, tuple[int, int, int]],
    base: KvFormat,
    *,
    pinned: Sequence[str] = (),
    target: float = DEFAULT_TARGET,
    probe: Probe | None = None,
    progress: Progress | None = None,
) -> AutoChoice:
    """Chooses every layer's format.

    Args:
        rewritten: The model, with any formats.
        sizes: (kv_num_heads, head_dim, value_head_dim) by layer.
        base: The format to start from; its window, sinks and rotation are every layer's.
        pinned: Fields of `base` that stay as they are.
        target: The allowed relative increase of perplexity, 0.01 for 1 %.
        probe: What to run the model on; None decides from the weights.
        progress: Called with (phase, done, total).

    Raises:
        OptionError: `target` is not above 0 and below 10.
        ModelError: The model cannot be run on the probe.
    """
    if not 0 < target < 10:
        raise OptionError(
            f"[target] expected a relative increase above 0 and below 10 (1000%); found {target}"
        )
    if probe is None:
        layers = _from_weights(rewritten, sizes, base, pinned)
        choice = AutoChoice(target, base, layers, 0.0)
    else:
        choice = _from_probe(ProbeRun(rewritten, probe, progress), probe, sizes, base, pinned, target)
    shapes = [(entry.format, *sizes[entry.layer]) for entry in choice.layers]
    return dataclasses.replace(choice, bits_per_element=bits_per_element(shapes))


def _from_weights(
    rewritten: Rewritten,
    sizes: Mapping[str, tuple[int, int, int]],
    base: KvFormat,
    pinned: Sequence[str],
) -> tuple[LayerChoice, ...]:
    offsets = key_offsets(rewritten.model, base)
    return tuple(_by_offset(layer, base, pinned, offsets.get(layer)) for layer in sizes)


def _by_offset(layer: str, base: KvFormat, pinned: Sequence[str], found: KeyOffset | None) -> LayerChoice:
    if found is None:
        return LayerChoice(layer, base, "no constant part of the keys in the graph")
    if found.error is None:
        chosen = base if "key_bits" in pinned else dataclasses.replace(base, key_bits=max(8, base.key_bits))
        return LayerChoice(layer, chosen, f"a key bias that could not be weighed ({found.problem})")
    if found.error <= MAX_KEY_ERROR:
        return LayerChoice(layer, base, "the key bias does no harm", key_offset=found.error)
    if "key_bits" in pinned or base.key_bits > 4:
        return LayerChoice(layer, base, "a strong key bias; key bits as given", key_offset=found.error)
    chosen = dataclasses.replace(base, key_bits=8)
    return LayerChoice(layer, chosen, "a key bias that 4-bit keys cannot carry", key_offset=found.error)


def _from_probe(
    run: ProbeRun,
    probe: Probe,
    sizes: Mapping[str, tuple[int, int, int]],
    base: KvFormat,
    pinned: Sequence[str],
    target: float,
) -> AutoChoice:
    ladder = _ladder(base, pinned)
    candidates: dict[str, list[Candidate]] = {}
    for layer, attention in run.attentions():
        candidates[layer] = _measure(attention, ladder, sizes[layer])
    starts = {layer: next(c for c in found if c.format == base) for layer, found in candidates.items()}
    damage = base_damage = None
    met = None
    if run.scored:
        chosen, damage, base_damage, met = _meet(run, candidates, starts, kl_budget(target))
    else:
        chosen = {
            layer: min(
                (c for c in found if math.sqrt(c.square) <= MAX_OUTPUT_ERROR),
                key=lambda c: c.bytes_per_token,
                default=min(found, key=lambda c: c.square),
            )
            for layer, found in candidates.items()
        }
    layers = tuple(_explain(layer, chosen[layer], starts[layer]) for layer in sizes)
    return AutoChoice(target, base, layers, 0.0, probe.source, run.tokens, damage, base_damage, met)


def _ladder(base: KvFormat, pinned: Sequence[str]) -> list[KvFormat]:
    """The formats to choose from: the base first, then all that leave the pinned fields alone."""
    formats = [base]
    for key_bits, value_bits, group_size in _LADDER:
        values: dict[str, Any] = {"key_bits": key_bits, "value_bits": value_bits, "group_size": group_size}
        if key_bits == value_bits == 16:
            values.pop("group_size")
        found = dataclasses.replace(base, **values)
        if all(getattr(found, name) == getattr(base, name) for name in pinned) and found not in formats:
            formats.append(found)
    return formats


def _measure(
    attention: Attention, ladder: Sequence[KvFormat], sizes: tuple[int, int, int]
) -> list[Candidate]:
    """Every format's errors in one layer; the two sides are independent, so each is measured once."""
    exact = attention.output(EXACT)
    keys: dict[tuple[int, int], float] = {}
    values: dict[tuple[int, int], float] = {}
    found = []
    for chosen in ladder:
        key, value = _kind(chosen.key_bits, chosen), _kind(chosen.value_bits, chosen)
        if key not in keys:
            keys[key] = attention.error(dataclasses.replace(chosen, value_bits=16), exact)
        if value not in values:
            values[value] = attention.error(dataclasses.replace(chosen, key_bits=16), exact)
        found.append(Candidate(chosen, chosen.bytes_per_token(*sizes), keys[key], values[value]))
    return found


def _kind(bits: int, chosen: KvFormat) -> tuple[int, int]:
    """What tells two forms of one side apart; scales of 8-bit codes matter too little to measure twice."""
    return bits, chosen.group_size if bits < 8 else 0


def _meet(
    run: ProbeRun,
    candidates: Mapping[str, Sequence[Candidate]],
    starts: Mapping[str, Candidate],
    budget: float,
) -> tuple[dict[str, Candidate], Damage, Damage, bool]:
    """The cheapest choice whose measured divergence is within the budget; else the least divergent one."""
    tried: dict[tuple[Candidate, ...], tuple[dict[str, Candidate], Damage]] = {}

    def measured(choice: Mapping[str, Candidate]) -> Damage:
        key = tuple(choice.values())
        if key not in tried:
            tried[key] = dict(choice), run.damage({layer: c.format for layer, c in choice.items()})
        return tried[key][1]

    base = measured(starts)
    gain = base.kl / max(_squares(starts), 1e-12)
    for _ in range(_ROUNDS):
        choice = allocate(candidates, budget / gain if gain > 0 and math.isfinite(gain) else 0.0)
        seen = tuple(choice.values()) in tried
        damage = measured(choice)
        if seen or _CLOSE * budget <= damage.kl <= budget:
            break
        gain = damage.kl / max(_squares(choice), 1e-12)
    fitting = [entry for entry in tried.values() if entry[1].kl <= budget]
    if fitting:
        chosen, damage = min(fitting, key=lambda entry: (_bytes(entry[0]), entry[1].kl))
    else:
        chosen, damage = min(tried.values(), key=lambda entry: entry[1].kl)
    return chosen, damage, base, bool(fitting)


def _squares(choice: Mapping[str, Candidate]) -> float:
    return sum(candidate.square for candidate in choice.values())


def _bytes(choice: Mapping[str, Candidate]) -> float:
    return sum(candidate.bytes_per_token for candidate in choice.values())


def _explain(layer: str, chosen: Candidate, start: Candidate) -> LayerChoice:
    if chosen.bytes_per_token > start.bytes_per_token:
        reason = "more bits: among the layers that lose most for a byte"
    elif chosen.bytes_per_token < start.bytes_per_token:
        reason = "fewer scales: the target leaves room"
    else:
        reason = "as the default"
    return LayerChoice(
        layer,
        chosen.format,
        reason,
        chosen.key_error,
        chosen.value_error,
        start.key_error,
        start.value_error,
    )
