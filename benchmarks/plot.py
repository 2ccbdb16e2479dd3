"""The picture in README: tokens/s and cache memory against context, from end_to_end.py's numbers.

python benchmarks/plot.py build/bench/end_to_end.json docs/img/context.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.report import Spread

# Colours that stay apart for colour-blind readers, on white and on dark pages; a marker for each as well.
STYLES = {
    "original": ("as exported", "#777777", "s"),
    "default": ("kvfuse, default", "#0072b2", "o"),
    "int4": ("kvfuse, int4 per token", "#d55e00", "^"),
}


def draw(found: Mapping[str, Any], target: Path) -> None:
    """Writes one row of two panels for each model; the format follows the file's suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    # Text stays text, and equal numbers give equal bytes.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvfuse", "font.size": 9})
    models = found["models"]
    figure, rows = pyplot.subplots(len(models), 2, figsize=(8, 3.1 * len(models)), squeeze=False)
    for (speed, memory), model in zip(rows, models, strict=True):
        for variant, runs in model["variants"].items():
            label, colour, marker = STYLES[variant]
            contexts = [run["context"] for run in runs]
            spreads = [Spread.of(run["tokens_per_second"]) for run in runs]
            medians = [spread.median for spread in spreads]
            errors = [
                [spread.median - spread.low for spread in spreads],
                [spread.high - spread.median for spread in spreads],
            ]
            style = {"color": colour, "marker": marker, "label": label, "markersize": 4, "linewidth": 1.3}
            speed.errorbar(contexts, medians, errors, capsize=2, **style)
            memory.plot(contexts, [run["cache_bytes"] / 2**20 for run in runs], **style)
        speed.set_ylabel("tokens/s")
        speed.set_ylim(bottom=0)
        memory.set_ylabel("cache, MiB")
        memory.set_yscale("log")
        memory.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        speed.set_title(model["title"], loc="left", fontsize=9)
        for axes in (speed, memory):
            axes.set_xscale("log", base=2)
            axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
            axes.set_xlabel("tokens of context")
            axes.grid(alpha=0.3)
        speed.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if target.suffix == ".svg" else None
    figure.savefig(target, metadata=metadata, facecolor="white", dpi=150)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the numbers and writes the picture."""
    parser = argparse.ArgumentParser(description="Tokens/s and cache memory against context.")
    parser.add_argument("numbers", type=Path, help="what end_to_end.py --json wrote")
    parser.add_argument("picture", type=Path, help="an .svg or .png file")
    options = parser.parse_args(arguments)
    draw(json.loads(options.numbers.read_text(encoding="utf-8")), options.picture)
    print(options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
