"""What a rewrite did and did not do, for people (a table) and for machines (plain data)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .formats import FOR_EVER

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir
    from rich.console import Console

    from .auto import AutoChoice


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """One attention with a cache.

    Attributes:
        layer: The state key of a fused site; "" for a refused one.
        outcome: "fused" or "refused".
        pattern: The source form that was recognised; "" when none was.
        reason: Why it was refused, one sentence; "" for a fused site.
        node: The node, as a graph viewer shows it.
        mask: kind, window, padding_input and proof (the probes and the keys each query saw); None when
            refused.
        evidence: The numerical comparisons with the original subgraph and their relative errors.
        details: Sizes, scale and softcap of a fused site.
    """

    layer: str
    outcome: str
    pattern: str
    reason: str
    node: str
    mask: Mapping[str, Any] | None = None
    evidence: tuple[Mapping[str, Any], ...] = ()
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The site as plain data."""
        return {
            "layer": self.layer,
            "outcome": self.outcome,
            "pattern": self.pattern,
            "reason": self.reason,
            "node": self.node,
            "mask": None if self.mask is None else dict(self.mask),
            "evidence": [dict(entry) for entry in self.evidence],
            **self.details,
        }


@dataclasses.dataclass(frozen=True)
class RewriteReport:
    """The result of `rewrite` or `inspect`.

    Attributes:
        source, destination: Paths; None for a model in memory or when nothing was written.
        sites: Attentions with a cache, fused or refused, in the order of the graph.
        seen: Attention-like groups without a cache of their own (an encoder's), with the reason they are no
            sites.
        bytes_per_token_before: Bytes of the fused layers' float caches for one token.
        bytes_per_token_after: Bytes of one token in the low-bit form, by the format's formula.
        format: The op's format attributes; with a choice, those that it started from.
        fingerprint: sha256 of the original file; sequences of the rewritten model are bound to it.
        dropped: Names of the cache inputs and outputs that the rewritten graph no longer has.
        rewired: Shape nodes of caches that are answered from the past length now, with their dims
            (B batch, S new, P cached, T all tokens).
        choice: What format "auto" chose for each layer, and why.
        presets: Preset -> bytes of one low-bit token of these layers; what a dry run adds.
        model: The rewritten model when the source was one in memory.
    """

    source: str | None
    destination: str | None
    sites: tuple[SiteReport, ...]
    seen: tuple[SiteReport, ...]
    bytes_per_token_before: float
    bytes_per_token_after: float
    format: Mapping[str, int | float | str]
    fingerprint: str
    dropped: Mapping[str, tuple[str, ...]]
    rewired: tuple[Mapping[str, Any], ...]
    choice: AutoChoice | None = None
    presets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    model: onnx.ModelProto | ir.Model | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def fused(self) -> tuple[SiteReport, ...]:
        """The fused sites."""
        return tuple(site for site in self.sites if site.outcome == "fused")

    @property
    def refused(self) -> tuple[SiteReport, ...]:
        """The refused sites."""
        return tuple(site for site in self.sites if site.outcome == "refused")

    def with_choice(self, choice: AutoChoice) -> RewriteReport:
        """The same report of a model whose layers have formats of their own."""
        formats = choice.formats
        sites = tuple(
            dataclasses.replace(site, details={**site.details, "format": formats[site.layer].attributes()})
            if site.outcome == "fused"
            else site
            for site in self.sites
        )
        after = sum(
            formats[site.layer].bytes_per_token(
                site.details["kv_num_heads"], site.details["head_dim"], site.details["value_head_dim"]
            )
            for site in self.fused
        )
        return dataclasses.replace(self, sites=sites, bytes_per_token_after=after, choice=choice)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data (what `--json` prints)."""
        return {
            "source": self.source,
            "destination": self.destination,
            "sites": [site.to_dict() for site in self.sites],
            "seen": [{"node": site.node, "reason": site.reason} for site in self.seen],
            "bytes_per_token_before": self.bytes_per_token_before,
            "bytes_per_token_after": self.bytes_per_token_after,
            "format": dict(self.format),
            "fingerprint": self.fingerprint,
            "dropped": {kind: list(names) for kind, names in self.dropped.items()},
            "rewired": [dict(entry) for entry in self.rewired],
            "choice": None if self.choice is None else self.choice.to_dict(),
            "presets": dict(self.presets),
        }

    def summary(self) -> str:
        """One sentence."""
        found = f"{len(self.fused)} of {len(self.sites)} cache sites fused"
        if not self.sites:
            found = "no attention with a growing KV cache found"
        if not self.fused:
            return found
        ratio = self.bytes_per_token_before / self.bytes_per_token_after
        return (
            f"{found}; cache {self.bytes_per_token_before:,.0f} -> {self.bytes_per_token_after:,.0f} "
            f"bytes per token{self._exact_window()} ({ratio:.1f}x smaller)"
        )

    def _exact_window(self) -> str:
        """Which tokens the figure is about: those of the exact window are kept as floats as well."""
        recent, block = self.format.get("n_recent", 0), self.format.get("block", 1)
        if recent == FOR_EVER or (not recent and block == 1):
            return ""
        window = recent or block
        return f" beyond the exact window of the newest {window:,} token{'' if window == 1 else 's'}"

    def render(self, console: Console) -> None:
        """Prints the table, what else was seen, and the summary."""
        from rich.table import Table
        from rich.text import Text

        if self.sites:
            table = Table("layer", "outcome", "pattern", "heads", "mask")
            table.add_column("node or reason", overflow="fold")
            for site in self.sites:
                colour = "green" if site.outcome == "fused" else "yellow"
                table.add_row(
                    site.layer,
                    Text(site.outcome, style=colour),
                    site.pattern,
                    _heads(site),
                    _mask(site),
                    Text(site.node if site.outcome == "fused" else site.reason),
                )
            console.print(table)
        for site in self.seen:
            console.print(Text(f"seen, not a cache site: {site.node}: {site.reason}"))
        if self.choice is not None:
            self.choice.render(console)
        console.print(Text(self.summary()))
        if self.presets and self.bytes_per_token_before:
            presets = Table("--format")
            for heading in ("bytes per token", "times smaller"):
                presets.add_column(heading, justify="right")
            for name, size in self.presets.items():
                presets.add_row(name, f"{size:,.0f}", f"{self.bytes_per_token_before / size:.2f}")
            console.print(presets)


def _heads(site: SiteReport) -> str:
    if not site.details:
        return ""
    sizes = site.details
    return f"{sizes['num_heads']}/{sizes['kv_num_heads']} x {sizes['head_dim']}"


def _mask(site: SiteReport) -> str:
    if site.mask is None:
        return ""
    window = site.mask["window"]
    return str(site.mask["kind"]) + (f" ({window + 1} keys)" if window >= 0 else "")
