"""The choice of every layer's format and its evidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvfuse.errors import OptionError
from kvfuse.formats import KvFormat

from .allocate import Candidate, allocate
from .attention import Attention
from .probe import Damage, Probe, ProbeRun, Progress
from .rewritten import EXACT, Rewritten, bits_per_element
from .weights import KeyOffset, key_offsets

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_TARGET = 0.01
# Nats of loss for a nat of mean KL divergence. A small random disturbance of the logits raises the loss by as much
# as the divergence; measured ratios on real models are 1.0 to 1.6 (docs/quality-auto.md), and the largest is used.
LOSS_PER_KL = 1.6
# Without a probe: keys whose stored form misses the part that varies by more than this get 8 bits. Keys without
# offsets are at 0.09-0.12 in 4 bits; see docs/quality-auto.md for what lies between.
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


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """One layer's format and why.

    Attributes:
        layer: The state key.
        format: The format.
        reason: One clause.
        key_error, value_error: With a probe: relative errors of the layer's attention output with only keys,
            only values, in that format.
        base_key_error, base_value_error: The same with the format that the choice started from.
        key_offset: Without a probe: the relative error of 4-bit keys made from weights and bias; None where
            the keys have no constant part in the graph.
    """

    layer: str
    format: KvFormat
    reason: str
    key_error: float | None = None
    value_error: float | None = None
    base_key_error: float | None = None
    base_value_error: float | None = None
    key_offset: float | None = None


@dataclasses.dataclass(frozen=True)
class AutoChoice:
    """What `format="auto"` chose.

    Attributes:
        target: The allowed relative increase of perplexity.
        base: The format that the choice started from.
        layers: One entry for each fused layer, in the order of the graph.
        bits_per_element: Mean bits of a stored key or value element, scales and means included.
        probe: What the model was run on, or None.
        tokens: Its length.
        damage: The choice's measured cost on the probe; None without logits or probe.
        base_damage: The same of `base` for all layers.
        met: Whether the measured cost is within the target; None where it was not measured.
    """

    target: float
    base: KvFormat
    layers: tuple[LayerChoice, ...]
    bits_per_element: float
    probe: str | None = None
    tokens: int = 0
    damage: Damage | None = None
    base_damage: Damage | None = None
    met: bool | None = None

    @property
    def formats(self) -> dict[str, KvFormat]:
        """The formats by layer."""
        return {entry.layer: entry.format for entry in self.layers}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        fields = dataclasses.asdict(self)
        for name in ("damage", "base_damage"):
            damage = fields[name]
            if damage is not None:
                damage["expected_perplexity_increase"] = _perplexity(damage["kl"])
                fields[name] = {k: v if math.isfinite(v) else None for k, v in damage.items()}
        return fields

    def render(self, console: Console) -> None:
        """Prints a table of the layers and a sentence about the whole model."""
        from rich.table import Table
        from rich.text import Text

        probed = self.probe is not None
        table = Table("layer", "keys", "values", "scales")
        headings = ("key error", "value error", "key error before") if probed else ("4-bit key error",)
        for heading in headings:
            table.add_column(heading, justify="right")
        table.add_column("why", overflow="fold")
        for entry in self.layers:
            shown = (
                (entry.key_error, entry.value_error, entry.base_key_error) if probed else (entry.key_offset,)
            )
            table.add_row(
                entry.layer,
                f"{entry.format.key_bits} bit",
                f"{entry.format.value_bits} bit",
                f"per {entry.format.group_size or 'head'}",
                *("" if error is None else f"{error:.3f}" for error in shown),
                entry.reason,
            )
        console.print(table)
        console.print(Text(self.summary()))

    def summary(self) -> str:
        """One sentence."""
        size = f"{self.bits_per_element:.2f} bits per element"
        if self.probe is None:
            return (
                f"chosen from the weights alone, {size}; give --probe TEXT to choose by what each layer loses"
            )
        if self.damage is None or self.base_damage is None:
            return f"chosen by each layer's error on {self.tokens} tokens of {self.probe}, {size}"
        found = (
            f"KL {self.damage.kl:.5f} on {self.tokens} tokens of {self.probe} (expected perplexity "
            f"{_perplexity(self.damage.kl):+.2%}, loss {self.damage.loss:+.4f} ± {self.damage.loss_error:.4f})"
        )
        outcome = "within" if self.met else "NOT within"
        return f"{found}, {outcome} the target of {self.target:+.2%}, at {size}; before: KL {self.base_damage.kl:.5f}"


def _perplexity(kl: float) -> float:
    """The relative increase of perplexity that a mean KL divergence stands for."""
    return math.expm1(min(LOSS_PER_KL * kl, 700.0)) if math.isfinite(kl) else math.inf


def kl_budget(target: float) -> float:
    """The mean KL divergence that keeps the perplexity within a relative increase of `target`."""
    return math.log1p(target) / LOSS_PER_KL


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
        raise OptionError(f"[target] expected a relative increase above 0 and below 10 (1000%); found {target}")
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
    return AutoChoice(
        target, base, layers, 0.0, probe.source, run.tokens, damage, base_damage, met
    )


def _ladder(base: KvFormat, pinned: Sequence[str]) -> list[KvFormat]:
    """The formats to choose from: the base first, then all that leave the pinned fields alone."""
    formats = [base]
    for key_bits, value_bits, group_size in _LADDER:
        values = {"key_bits": key_bits, "value_bits": value_bits, "group_size": group_size}
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
    """What tells two forms of one side apart; the scales of 8-bit codes matter too little to measure twice."""
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
