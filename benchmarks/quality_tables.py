"""Turns the results of `make quality` into the tables and pictures of docs/quality.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.quality_variants import ABLATION, CONTENDER, PRESET, SIMULATED, WITH_EXTRAS

if TYPE_CHECKING:
    from benchmarks.quality import Setting

Figures = dict[str, Any]
HEAD = "| format | bits/element | perplexity, % | KL | KL p99 | top-1, % |\n" + "| --- |" + " ---: |" * 5
NAMES = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma-3-270M"}


def line(found: Figures) -> str:
    """One line of a table."""
    bits = f"{found['bits_per_element']:.4g}"
    error = "" if found["change_se"] is None else f" ± {100 * found['change_se']:.2f}"
    change = f"{100 * found['change']:+.2f}{error}"
    kl = f"{found['kl']:.5f}" + ("" if found["kl_se"] is None else f" ± {found['kl_se']:.5f}")
    return (
        f"| {found['name']} | {bits} | {change} | {kl} | {found['kl_p99']:.4f} | {100 * found['top1']:.2f} |"
    )


def write(root: Path, settings: list[Setting]) -> None:
    """Replaces the tables between the markers in docs/quality.md, and the pictures beside it."""
    page = root / "docs" / "quality.md"
    text = page.read_text(encoding="utf-8")
    for setting in settings:
        if not (setting.folder / "reference.pickle").exists():
            continue
        found = [
            figures for variant in setting.variants() if (figures := setting.result(variant)) is not None
        ]
        name = f"{setting.model}-{setting.context}"
        blocks = {
            f"{name} formats": formats_table(setting, found),
            f"{name} ablations": ablations_table(found),
            f"{name} needles": needles_table(setting, found),
            f"{name} greedy": greedy_table(found),
        }
        for marker, block in blocks.items():
            text = replace_block(text, marker, block)
        draw(setting, found, root / "docs" / "quality")
    page.write_text(text, encoding="utf-8")


def replace_block(text: str, marker: str, block: str) -> str:
    """Puts a block between `<!-- marker -->` and `<!-- end -->`; a text without it stays as it is."""
    pattern = re.compile(rf"(<!-- {re.escape(marker)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{block}\n{found[2]}", text)


def formats_table(setting: Setting, found: list[Figures]) -> str:
    """Presets and contenders, by divergence."""
    rows = [one for one in found if one["kind"] in (PRESET, CONTENDER) and one["name"] != "exact"]
    lines = [line(one if one["kind"] == CONTENDER else one | {"name": f"**{one['name']}**"})
             for one in sorted(rows, key=lambda one: one["kl"])]  # fmt: skip
    exact = [line(one | {"name": f"**{one['name']}**"}) for one in found if one["name"] == "exact"]
    return "\n".join([HEAD, *exact, *lines, "", _original(setting)])


def ablations_table(found: list[Figures]) -> str:
    """The default and what becomes of it with one thing changed."""
    default = [one | {"name": "**default**"} for one in found if one["name"] == "default"]
    rows = [one for one in found if one["kind"] in (ABLATION, SIMULATED)]
    return "\n".join([HEAD, *map(line, default + rows)])


def needles_table(setting: Setting, found: list[Figures]) -> str:
    """Mean log-probability of each needle's answer."""
    original = setting.reference.observation.needles
    depths = [f"{needle.depth:.0%}" for needle in original]
    head = f"| format | {' | '.join(depths)} |\n| --- |{' ---: |' * len(depths)}"
    cells = [(needle.log_probability, needle.retrieved) for needle in original]
    rows = [("original", cells)]
    for one in found:
        if one.get("needles"):
            rows.append((one["name"], [(n["log_probability"], n["retrieved"]) for n in one["needles"]]))
    body = [
        f"| {name} | " + " | ".join(f"{value:.2f}{'*' * hit}" for value, hit in cells) + " |"
        for name, cells in rows
    ]
    return "\n".join([head, *body])


def greedy_table(found: list[Figures]) -> str:
    """Tokens before the first difference, with the original's top-2 gap there."""
    runs = [(one["name"], one["greedy"]) for one in found if one.get("greedy")]
    count = len(runs[0][1]) if runs else 0
    head = (
        "| format | "
        + " | ".join(f"prompt {i + 1}" for i in range(count))
        + f" |\n| --- |{' ---: |' * count}"
    )
    body = []
    for name, prompts in runs:
        cells = (f"all {run['tokens']}" if run["gap"] is None else f"{run['same']} (gap {run['gap']:.2f})"
                 for run in prompts)  # fmt: skip
        body.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([head, *body])


def _original(setting: Setting) -> str:
    from kvfuse.evaluate_scores import summarize

    scores = setting.reference.observation.scores
    own = summarize(scores, scores)
    windows = f"{len(setting.plan.windows)} window{'s' if len(setting.plan.windows) > 1 else ''}"
    return (
        f"{NAMES[setting.model]}, {windows} of {setting.context:,} tokens (text {setting.text_hash}): "
        f"perplexity of the original {own.perplexity:.2f}; {own.positions:,} positions."
    )


def draw(setting: Setting, found: list[Figures], folder: Path) -> None:
    """Draws divergence against bits, and the layers' errors of the default and of plain int4."""
    import matplotlib.figure

    folder.mkdir(parents=True, exist_ok=True)
    shown = [one for one in found if one["kind"] in (PRESET, CONTENDER) and one["name"] != "exact"]
    layered = [one for one in found if one["name"] in WITH_EXTRAS and one.get("layers")]
    if not shown:
        return
    figure = matplotlib.figure.Figure(figsize=(10, 4.2 + 2 * len(layered)), layout="constrained")
    grid = figure.add_gridspec(1 + len(layered), 1, height_ratios=[4] + [2] * len(layered))
    axes = figure.add_subplot(grid[0])
    for one in shown:
        ours = one["kind"] == PRESET
        place = (one["bits_per_element"], one["kl"])
        axes.plot(*place, "o" if ours else "s", color="#1f5fa8" if ours else "#b0702c")
        weight = "bold" if ours else "normal"
        axes.annotate(
            one["name"], place, textcoords="offset points", xytext=(6, 3), fontsize=8, weight=weight
        )
    axes.set_yscale("log")
    axes.set_xlabel("bits per element of a stored token, scales included")
    axes.set_ylabel("KL(original || low-bit), nats")
    axes.set_title(
        f"{NAMES[setting.model]}, context {setting.context:,}; blue: kvfuse, brown: simulated contenders"
    )
    axes.grid(alpha=0.3)
    axes.margins(x=0.2)
    shared = None
    for row, one in enumerate(layered, start=1):
        shared = figure.add_subplot(grid[row], sharey=shared)
        for offset, (side, colour) in enumerate(
            (("keys", "#3b6ea8"), ("values", "#d98c3f"), ("both", "#5b5b5b"))
        ):
            places = [index + 0.28 * (offset - 1) for index in range(len(one["layers"]))]
            shared.bar(places, [layer[side] for layer in one["layers"]], 0.28, color=colour, label=side)
        names = [layer["layer"] + ("" if layer["window_left"] >= 0 else "·") for layer in one["layers"]]
        shared.set_xticks(range(len(names)), names, fontsize=7)
        shared.set_title(f"{one['name']}: relative error of the attention output by layer", fontsize=9)
        shared.legend(fontsize=7, ncols=3)
        shared.grid(axis="y", alpha=0.3)
    figure.savefig(folder / f"{setting.model}-{setting.context}.png", dpi=100)
