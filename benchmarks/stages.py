"""Where the time of a decode step goes: each stage of the kernel, the rest of the op, onnxruntime around it.

python benchmarks/stages.py --json build/bench/stages.json

One process counts with KVFUSE_PROFILE=1, another runs the same steps without, because reading the clock costs
something in short stages: the last row tells how much. One thread, and of all bursts the fastest, so that the
stages add up and no other process has been counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import machine, report
from benchmarks.decoding import run_in_process
from benchmarks.kvfuse_contenders import FORMATS, KvFuse
from benchmarks.workload import SHAPES, History, Workload
from kvfuse.library import native

TOKENS = (1024, 4096, 16384)
# The stage that contains all others, as the library names it.
WHOLE = "call"


def run_bursts(contender: KvFuse, bursts: int) -> list[tuple[float, dict[str, float]]]:
    """(seconds of a step, stage -> seconds of a step) of each burst; no stages without KVFUSE_PROFILE."""
    found = []
    for _ in range(bursts):
        contender.prepare()
        native().reset_profile()
        start = time.perf_counter()
        for _ in range(contender.burst):
            contender.step()
        seconds = (time.perf_counter() - start) / contender.burst
        stages = {name: total / contender.burst for name, total, _ in native().profile()}
        found.append((seconds, stages))
    return found


def child(shape: str, tokens: int, bursts: int) -> dict[str, dict[str, float]]:
    """Format -> stage -> microseconds of a step in the fastest burst; "step" is the whole run."""
    history = History(SHAPES[shape], tokens + 1)
    work, result = Workload.of("decode", history, tokens, 1), {}
    for name, cache_format in FORMATS.items():
        contender = KvFuse(work, cache_format)
        seconds, stages = min(run_bursts(contender, bursts), key=lambda burst: burst[0])
        contender.close()
        result[name] = {stage: 1e6 * time for stage, time in {"step": seconds, **stages}.items()}
    return result


def table(profiled: Mapping[int, Mapping[str, float]], plain: Mapping[int, Mapping[str, float]]) -> list[Any]:
    """Rows for one format: tokens -> stage -> microseconds, with and without counting."""
    names = [name for name in next(iter(profiled.values())) if name not in ("step", WHOLE)]
    inner = {tokens: sum(stages[name] for name in names) for tokens, stages in profiled.items()}
    rows: list[tuple[str, Mapping[int, float]]] = [
        (name, {tokens: stages[name] for tokens, stages in profiled.items()}) for name in names
    ]
    rows.append(("rest of the op", {tokens: s[WHOLE] - inner[tokens] for tokens, s in profiled.items()}))
    rows.append(("onnxruntime", {tokens: s["step"] - s[WHOLE] for tokens, s in profiled.items()}))
    whole = {tokens: stages["step"] for tokens, stages in profiled.items()}
    rows.append(("whole step, counted", whole))
    result: list[dict[str, Any]] = []
    for name, values in rows:
        row: dict[str, Any] = {"stage, µs a step": name}
        for tokens, value in values.items():
            row[f"T = {tokens:,}"] = f"{report.short(value)} ({100 * value / whole[tokens]:.0f} %)"
        result.append(row)
    last: dict[str, Any] = {"stage, µs a step": "whole step, not counted"}
    last |= {f"T = {tokens:,}": report.short(stages["step"]) for tokens, stages in plain.items()}
    return [*result, last]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the tables, writes JSON."""
    parser = argparse.ArgumentParser(description="The stages of a decode step.")
    parser.add_argument("--shape", default="A", choices=SHAPES)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--bursts", type=int, default=25)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        result = child(options.shape, options.child, options.bursts)
        options.result.write_text(json.dumps(result), encoding="utf-8")
        return 0
    runs: dict[str, dict[int, Any]] = {"1": {}, "0": {}}
    for tokens in (int(text) for text in options.tokens.split(",")):
        for profile, found in runs.items():
            os.environ["KVFUSE_PROFILE"] = profile
            flags = ("--child", str(tokens), "--shape", options.shape, "--bursts", str(options.bursts))
            found[tokens] = run_in_process(__file__, *flags)
    tables = {
        f"{name}, shape {SHAPES[options.shape]}, decode, one thread": table(
            *({tokens: run[name] for tokens, run in runs[profile].items()} for profile in ("1", "0"))
        )
        for name in FORMATS
    }
    numbers = {"kind": "stages", "machine": machine.describe(), "tables": tables}
    print(report.plain_tables(numbers))
    report.save(numbers, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
