"""What `format="auto"` chose, as plain data and as a table."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from kvfuse.formats import KvFormat

from .probe import Damage

if TYPE_CHECKING:
    from rich.console import Console

# Nats of loss for a nat of mean KL divergence. A small random disturbance of the logits raises the loss by
# as much as the divergence; measured ratios on real models are 0.9 to 1.6 (docs/quality-auto.md), and the
# largest is used.
LOSS_PER_KL = 1.6


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
                damage["expected_perplexity_increase"] = expected_perplexity_increase(damage["kl"])
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
        outcome = "within" if self.met else "NOT within"
        return (
            f"KL {self.damage.kl:.5f} on {self.tokens} tokens of {self.probe} (before: "
            f"{self.base_damage.kl:.5f}), that is a perplexity of "
            f"{expected_perplexity_increase(self.damage.kl):+.2%}, {outcome} the target of "
            f"{self.target:+.2%}, at {size}"
        )


def expected_perplexity_increase(kl: float) -> float:
    """The relative increase of perplexity that a mean KL divergence stands for."""
    return math.expm1(min(LOSS_PER_KL * kl, 700.0)) if math.isfinite(kl) else math.inf


def kl_budget(target: float) -> float:
    """The mean KL divergence that keeps the perplexity within a relative increase of `target`."""
    return math.log1p(target) / LOSS_PER_KL
