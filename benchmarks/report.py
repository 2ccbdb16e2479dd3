"""Tables of measured numbers as Markdown.

python benchmarks/report.py build/bench/*.json                             # prints them
python benchmarks/report.py build/bench/*.json --write docs/benchmarks.md  # puts them between the marks

The page has marks for every kind of file: `<!-- measured: KIND -->` … `<!-- end of KIND -->`. Several files
of one kind follow one another.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.bars import BARS, END_TO_END_BARS, Bar, contenders_of, kernel_level

BASES = ("kvfuse_int4", "kvfuse_default")
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a series."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, series: Sequence[float]) -> Spread:
        """Of at least one number."""
        low, median, high = np.percentile(series, [25, 50, 75])
        return cls(float(median), float(low), float(high))

    def __str__(self) -> str:
        return f"{short(self.median)} [{short(self.low)}–{short(self.high)}]"


def short(number: float) -> str:
    """Three digits, no exponent."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def times(configuration: Json, name: str) -> Sequence[float]:
    """One contender's microseconds, empty when it did not run; the base's are those of the first group."""
    for group in configuration["groups"]:
        if name in group:
            return list(group[name]["microseconds"])
    return []


def ratios(configuration: Json, name: str, base: str) -> Sequence[float]:
    """The contender's time over the base's, round by round; empty when one did not run."""
    for group in configuration["groups"]:
        if name in group and base in group:
            series = group[name]["microseconds"], group[base]["microseconds"]
            return [other / own for other, own in zip(*series, strict=True)] if all(series) else []
    return []


def fastest(found: Json) -> Json:
    """The numbers of an attention run with nothing but each contender's fastest round."""
    configurations = []
    for item in found["configurations"]:
        groups = [
            {
                name: result | {"microseconds": sorted(result["microseconds"])[:1]}
                for name, result in group.items()
            }
            for group in item["groups"]
        ]
        configurations.append(item | {"groups": groups})
    return {**found, "configurations": configurations}


def configuration_text(configuration: Json) -> str:
    """One configuration as plain text, for the terminal while a measurement runs."""
    shape, load = configuration["shape"], configuration["load"]
    lines = [
        f"\n{configuration['mode']} {shape['name']} ({shape['num_heads']}/{shape['kv_num_heads']}, "
        f"{shape['head_dim']}), {configuration['tokens']} tokens, {configuration['threads']} thread(s), "
        f"{configuration['layers']} layer(s), {configuration['clock']} time, load {load:.1f}",
        f"  {'':24} {'microseconds a step':>30} {'/ int4':>8} {'/ default':>9} {'error':>9} {'MB':>8}",
    ]
    for group in configuration["groups"]:
        for name, result in group.items():
            if not result["microseconds"]:
                lines.append(f"  {name:24} {result['skipped']}")
                continue
            cells = []
            for base, width in zip(BASES, (8, 9), strict=True):
                series = ratios(configuration, name, base)
                cells.append(f"{short(float(np.median(series))) if series else '-':>{width}}")
            error = "-" if result["error"] is None else f"{result['error']:.1e}"
            size = "-" if result["cache_bytes"] is None else f"{result['cache_bytes'] / 1e6:.2f}"
            spread = str(Spread.of(result["microseconds"]))
            lines.append(f"  {name:24} {spread:>30} {' '.join(cells)} {error:>9} {size:>8}")
    return "\n".join(lines)


def attention_tables(found: Json) -> str:
    """The bars with pass or miss, then every number."""
    parts = [machine_text(found["machine"])]
    parts += [bars_table(found, base) for base in BASES]
    series: dict[tuple[str, str, int, int], list[Json]] = {}
    for item in found["configurations"]:
        key = (item["mode"], item["shape"]["name"], item["threads"], item["layers"])
        series.setdefault(key, []).append(item)
    parts += [numbers_table(items) for items in series.values()]
    return "\n\n".join(part for part in parts if part) + "\n"


def machine_text(machine: Json) -> str:
    """One sentence about the machine."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, kernel `{machine['kernel']}`, L2 "
        f"{machine['l2_bytes'] / 2**20:g} MiB a core, L3 {machine['l3_bytes'] / 2**20:g} MiB; {versions}."
    )


def bars_table(found: Json, base: str) -> str:
    """Each bar that this run can judge: the worst configuration decides."""
    lines = [
        f"**`{base}` against the bars** (time of the other / time of {base}; median over rounds [quartiles])",
        "",
        "| | bar | worst | at | best | |",
        "| --- | ---: | ---: | --- | ---: | --- |",
    ]
    for bar in BARS:
        judged = list(_judged(found, bar, base))
        if not judged:
            continue
        judged.sort(key=lambda pair: pair[0].median, reverse=bar.inverse)
        (worst, place), (best, _) = judged[0], judged[-1]
        target = bar.target(base)
        passed = worst.median <= target if bar.inverse else worst.median >= target
        sign, label = ("≤" if bar.inverse else "≥"), f"{bar.mode}: {bar.label}"
        lines.append(
            f"| {label} | {sign} {target:.2g} | {worst} | {place} | {short(best.median)} | "
            f"{'pass' if passed else '**miss**'} |"
        )
    return "\n".join(lines) if len(lines) > 4 else ""


def _judged(found: Json, bar: Bar, base: str) -> Iterator[tuple[Spread, str]]:
    """(ratio, where) of every configuration that the bar is about."""
    for item in found["configurations"]:
        if item["mode"] != bar.mode or item["threads"] != bar.threads or item["tokens"] < bar.least_tokens:
            continue
        if bar.levels and kernel_level(found["machine"], bar.mode) not in bar.levels:
            continue
        ran = {name: series for name in contenders_of(bar, base) if (series := ratios(item, name, base))}
        if not ran or (bar.cold_only and not _is_cold(found["machine"], item, next(iter(ran)))):
            continue
        series = min(ran.values(), key=lambda values: float(np.median(values)))
        if bar.inverse:
            series = [1 / value for value in series]
        yield Spread.of(series), f"{item['shape']['name']}, {item['tokens']}"


def _is_cold(machine: Json, item: Json, name: str) -> bool:
    """Whether a step's bytes, over all layers, exceed the second-level caches of the threads."""
    size = next(group[name]["cache_bytes"] for group in item["groups"] if name in group)
    return bool(size * item["layers"] > machine["l2_bytes"] * item["threads"])


def numbers_table(items: Sequence[Json]) -> str:
    """One mode, shape and number of threads: rows are contenders, columns lengths."""
    first, shape = items[0], items[0]["shape"]
    names = list(dict.fromkeys(n for item in items for group in item["groups"] for n in group))
    clock = " of processor time" if first["clock"] == "cpu" else ""
    letter = "T" if first["mode"] == "decode" else "P"
    layers = f", rotating through {first['layers']} caches" if first["layers"] > 1 else ""
    lines = [
        f"**{first['mode']}, shape {shape['name']} ({shape['num_heads']}/{shape['kv_num_heads']}, "
        f"{shape['head_dim']}), {first['threads']} thread{'s' * (first['threads'] > 1)}{layers}**: "
        f"µs a step{clock} [quartiles], × = / kvfuse_int4, / kvfuse_default",
        "",
        "| | " + " | ".join(f"{letter} = {item['tokens']:,}" for item in items) + " |",
        "| --- |" + " ---: |" * len(items),
    ]
    for name in names:
        cells = []
        for item in items:
            series = times(item, name)
            if not series:
                cells.append("–")
                continue
            against = [ratios(item, name, base) for base in BASES]
            factors = ", ".join(f"{short(float(np.median(r)))}" for r in against if r)
            own = name in BASES
            cells.append(f"{Spread.of(series)}" + ("" if own or not factors else f" × {factors}"))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def end_to_end_tables(found: Json) -> str:
    """Tokens per second, speed-up, peak memory and cache by context."""
    parts = [machine_text(found["machine"])]
    for model in found["models"]:
        contexts = [run["context"] for run in model["variants"]["original"]]
        lines = [
            f"**{model['title']}**",
            "",
            "| | " + " | ".join(f"context {context:,}" for context in contexts) + " |",
            "| --- |" + " ---: |" * len(contexts),
        ]
        original = model["variants"]["original"]
        for name, runs in model["variants"].items():
            cells = []
            for run, own in zip(runs, original, strict=True):
                speed = Spread.of(run["tokens_per_second"])
                ratio = speed.median / Spread.of(own["tokens_per_second"]).median
                cells.append(f"{speed}" + ("" if name == "original" else f" × {ratio:.2f}"))
            lines.append(f"| tokens/s, {name} | " + " | ".join(cells) + " |")
        bars = [f"≥ {END_TO_END_BARS[c]:g}" if c in END_TO_END_BARS else "" for c in contexts]
        if any(bars) and model.get("has_bars", False):
            lines.append("| bar for the ratio | " + " | ".join(bars) + " |")
        for label, key in (
            ("peak memory, MiB", "peak_bytes"),
            ("cache, MiB", "cache_bytes"),
            ("prefill, s", "prefill_seconds"),
        ):
            for name, runs in model["variants"].items():
                unit = 2**20 if key.endswith("bytes") else 1
                cells = [short(run[key] / unit) for run in runs]
                lines.append(f"| {label}, {name} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def plain_tables(found: Json) -> str:
    """Tables that are lists of rows already: visible keys, stages, memory."""
    parts = [machine_text(found["machine"])]
    for title, rows in found["tables"].items():
        header = list(rows[0])
        lines = [
            f"**{title}**",
            "",
            "| " + " | ".join(header) + " |",
            "| --- |" + " ---: |" * (len(header) - 1),
        ]
        for row in rows:
            cells = [short(value) if isinstance(value, float) else str(value) for value in row.values()]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


TABLES: Mapping[str, Callable[[Json], str]] = {
    "attention": attention_tables,
    "end_to_end": end_to_end_tables,
    "visible_keys": plain_tables,
    "stages": plain_tables,
    "memory": plain_tables,
}


def save(found: Json, path: Path | None) -> None:
    """Keeps what was measured, for this module to make tables of; nowhere without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def write(page: Path, kind: str, table: str) -> None:
    """Replaces what stands between the marks of `kind`.

    Raises:
        ValueError: the page has no such marks.
    """
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- measured: {kind} -->\n", f"<!-- end of {kind} -->\n"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"[{page}] expected the marks of {kind!r}; found none")
    page.write_text(pattern.sub(lambda _: f"{begin}{table}{end}", text), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints tables or writes them into a page."""
    parser = argparse.ArgumentParser(description="Tables of measured numbers.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, help="the Markdown page with marks")
    parser.add_argument(
        "--fastest", action="store_true", help="of attention, each contender's fastest round, not the median"
    )
    options = parser.parse_args(arguments)
    tables: dict[str, list[str]] = {}
    for path in options.files:
        found = json.loads(path.read_text(encoding="utf-8"))
        if options.fastest and found["kind"] == "attention":
            found = fastest(found)
        tables.setdefault(found["kind"], []).append(TABLES[found["kind"]](found))
    for kind, parts in tables.items():
        if options.write is None:
            print("\n".join(parts))
        else:
            write(options.write, kind, "\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
