"""What an evaluation found, for people (tables) and for machines (plain data)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfuse.evaluate_layers import LayerErrors
from kvfuse.evaluate_scores import Scores

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class GreedyRun:
    """One prompt continued greedily.

    Attributes:
        prompt_tokens, tokens: Lengths of the prompt and of the original's continuation.
        same: How many tokens are the original's before the first that is not.
        gap: The original's logit gap between its first and second choice at that token; None without one.
    """

    prompt_tokens: int
    tokens: int
    same: int
    gap: float | None


@dataclasses.dataclass(frozen=True)
class NeedleResult:
    """A hidden sentence: its depth, the answer's mean log-probability by token, whether greedy gives it."""

    depth: float
    log_probability: float
    retrieved: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """One rewritten model against the original.

    Attributes:
        model: Its path.
        scores: Of all windows.
        bytes_per_token: Of one low-bit token over all fused layers, by the formats' formula.
        bits_per_element: The same for one element.
        resident_bytes: What the cache really held after the longest window, exact window and sinks included.
        formats: Each format with its layers.
        greedy, needles, layers: As the plan asked.
    """

    model: str
    scores: Scores
    bytes_per_token: float
    bits_per_element: float
    resident_bytes: int
    formats: Sequence[dict[str, Any]]
    greedy: Sequence[GreedyRun] = ()
    needles: Sequence[NeedleResult] = ()
    layers: Sequence[LayerErrors] = ()

    @property
    def name(self) -> str:
        """The file's name without folder and suffix."""
        return Path(self.model).stem

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain data."""
        return {
            "model": self.model,
            **self.scores.to_dict(),
            "bytes_per_token": self.bytes_per_token,
            "bits_per_element": self.bits_per_element,
            "resident_bytes": self.resident_bytes,
            "formats": list(self.formats),
            "greedy": [dataclasses.asdict(run) for run in self.greedy],
            "needles": [dataclasses.asdict(needle) for needle in self.needles],
            "layers": [layer.to_dict() for layer in self.layers],
        }


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The original and every rewritten model.

    Attributes:
        original: Its path.
        context, windows: Tokens of a window, and how many there were.
        scores: The original's own.
        bytes_per_token, bits_per_element: Of its float caches, fused layers only.
        needles: What the original makes of them.
        greedy_texts: Its greedy continuations, where there was a tokenizer.
        results: One for each rewritten model.
    """

    original: str
    context: int
    windows: int
    scores: Scores
    bytes_per_token: float
    bits_per_element: float
    needles: Sequence[NeedleResult]
    greedy_texts: Sequence[str]
    results: Sequence[Result]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `kvfuse evaluate --json` prints."""
        return {
            "original": {
                "model": self.original,
                **self.scores.to_dict(),
                "bytes_per_token": self.bytes_per_token,
                "bits_per_element": self.bits_per_element,
                "needles": [dataclasses.asdict(needle) for needle in self.needles],
                "greedy_texts": list(self.greedy_texts),
            },
            "context": self.context,
            "windows": self.windows,
            "results": [result.to_dict() for result in self.results],
        }

    def render(self, console: Console) -> None:
        """Prints the tables: scores, greedy text, needles, layers."""
        console.print(self._scores())
        if any(result.greedy for result in self.results):
            console.print(self._greedy())
        if self.needles:
            console.print(self._needles())
        layered = [result for result in self.results if result.layers]
        if layered:
            console.print(_layers(layered))

    def _scores(self) -> Table:
        title = f"{self.scores.positions:,} tokens in windows of {self.context:,}; KL in nats"
        headings = (
            "bits/element", "bytes/token", "resident MiB", "perplexity", "change", "KL", "KL p99", "top-1",
        )  # fmt: skip
        table = _table(title, "model", headings)
        table.add_row(
            "original",
            f"{self.bits_per_element:g}",
            f"{self.bytes_per_token:,.0f}",
            f"{self.bytes_per_token * self.context / 2**20:.1f}",
            _with_error(self.scores.perplexity, self.scores.perplexity_se, "{:.3f}"),
        )
        for result in self.results:
            scores = result.scores
            table.add_row(
                result.name,
                f"{result.bits_per_element:.4g}",
                f"{result.bytes_per_token:,.0f}",
                f"{result.resident_bytes / 2**20:.1f}",
                _with_error(scores.perplexity, scores.perplexity_se, "{:.3f}"),
                _with_error(100 * scores.change, 100 * scores.change_se, "{:+.2f}") + " %",
                f"{scores.kl:.5f}",
                f"{scores.kl_p99:.4f}",
                f"{scores.top1:.2%}",
            )
        return table

    def _greedy(self) -> Table:
        runs = self.results[0].greedy
        title = f"greedy text: tokens before the first difference, {len(runs)} prompts"
        table = _table(title, "model", [f"prompt {index + 1}" for index in range(len(runs))])
        for result in self.results:
            table.add_row(result.name, *map(_same, result.greedy))
        return table

    def _needles(self) -> Table:
        headings = [f"depth {needle.depth:.0%}" for needle in self.needles]
        table = _table("needles: mean log-probability of the answer, * = greedy gives it", "model", headings)
        table.add_row("original", *map(_needle, self.needles))
        for result in self.results:
            table.add_row(result.name, *map(_needle, result.needles))
        return table


def _table(title: str, first: str, headings: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _layers(results: Sequence[Result]) -> Table:
    title = "relative error of the attention output by layer: keys / values / both low-bit"
    table = _table(title, "layer", ("window", *(result.name for result in results)))
    for rows in zip(*(result.layers for result in results), strict=True):
        window = "" if rows[0].window_left < 0 else f"{rows[0].window_left + 1:,}"
        errors = (f"{layer.keys:.4f} / {layer.values:.4f} / {layer.both:.4f}" for layer in rows)
        table.add_row(rows[0].layer, window, *errors)
    return table


def _with_error(value: float, error: float, form: str) -> str:
    shown = form.format(value)
    return shown if error != error else f"{shown} ± {form.format(error).lstrip('+')}"


def _same(run: GreedyRun) -> str:
    if run.gap is None:
        return f"all {run.tokens}"
    return f"{run.same} (gap {run.gap:.2f})"


def _needle(needle: NeedleResult) -> str:
    return f"{needle.log_probability:.2f}{'*' if needle.retrieved else ''}"
