"""Pictures of an evaluation; needs the optional package matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvfuse.errors import KVFuseError, OptionError
from kvfuse.evaluate_report import Evaluation, Result

_FLOOR = 1e-6  # where a divergence of zero is drawn on a logarithmic axis
_SIDES = (("keys", "#3b6ea8"), ("values", "#d98c3f"), ("both", "#5b5b5b"))


def plot(evaluation: Evaluation, path: str | Path, title: str | None = None) -> None:
    """Draws each result's error by layer, and perplexity and divergence against bits per element.

    Args:
        evaluation: what `evaluate` found.
        path: the picture; its suffix says the kind (png, svg, pdf).
        title: above everything; by default the original's name and the context.

    Raises:
        KVFuseError: matplotlib is not installed.
        OptionError: the suffix is none that matplotlib writes.
    """
    figures = _matplotlib()
    layered = [result for result in evaluation.results if result.layers]
    figure = figures.Figure(figsize=(11, 3.6 + 2.3 * len(layered)), layout="constrained")
    grid = figure.add_gridspec(1 + len(layered), 2, height_ratios=[3.2] + [2.1] * len(layered))
    _against_bits(figure.add_subplot(grid[0, 0]), evaluation, "change")
    _against_bits(figure.add_subplot(grid[0, 1]), evaluation, "kl")
    shared = None
    for row, result in enumerate(layered, start=1):
        shared = figure.add_subplot(grid[row, :], sharey=shared)
        _by_layer(shared, result)
    name = f"{Path(evaluation.original).name}, context {evaluation.context:,}"
    figure.suptitle(name if title is None else title)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise OptionError(f"[plot] expected a kind of picture in {path}; found: {error}") from error


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise KVFuseError(
            "[plot] expected the package 'matplotlib'; found none (pip install 'kvfuse[plot]')"
        ) from error
    return matplotlib.figure


def _against_bits(axes: Any, evaluation: Evaluation, what: str) -> None:
    for result in evaluation.results:
        scores, bits = result.scores, result.bits_per_element
        if what == "change":
            error = 100 * scores.change_se if scores.change_se == scores.change_se else None
            axes.errorbar(bits, 100 * scores.change, yerr=error, fmt="o", capsize=3)
            place = (bits, 100 * scores.change)
        else:
            axes.plot(bits, max(scores.kl, _FLOOR), "o")
            place = (bits, max(scores.kl, _FLOOR))
        axes.annotate(result.name, place, textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.set_xlabel("bits per element of a low-bit token")
    axes.grid(alpha=0.3)
    axes.margins(x=0.15, y=0.15)
    if what == "change":
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_ylabel("perplexity against the original, %")
    else:
        axes.set_yscale("log")
        axes.set_ylabel("KL(original || rewritten), nats")


def _by_layer(axes: Any, result: Result) -> None:
    width = 0.28
    for index, (side, colour) in enumerate(_SIDES):
        places = [layer + (index - 1) * width for layer in range(len(result.layers))]
        axes.bar(places, [getattr(layer, side) for layer in result.layers], width, color=colour, label=side)
    axes.set_xticks(range(len(result.layers)), [layer.layer for layer in result.layers], fontsize=8)
    axes.set_ylabel("relative error")
    axes.set_title(f"{result.name}: attention output by layer", fontsize=10)
    axes.legend(fontsize=8, ncols=3)
    axes.grid(axis="y", alpha=0.3)
