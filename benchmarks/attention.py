"""kvfuse's attention beside onnxruntime's, OpenVINO's, llama.cpp's and the byte limit, in one process.

python benchmarks/attention.py --quick                       # minutes: one shape, few lengths
python benchmarks/attention.py --json build/bench/attention.json   # the whole table, more than an hour
python benchmarks/attention.py --modes decode --shapes A --tokens 2048 --threads 1 --contenders 'kvfuse|gqa'

Every contender of a configuration is set up on the same data, checked against float64, and timed in
interleaved rounds; ratios are taken within a round, and the median with quartiles is kept. What each
contender pays for its state is said in contender.py. Other work on the machine makes the quartiles wide.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import (
    byte_limit,
    ggml_contenders,
    kvfuse_contenders,
    machine,
    openvino_contenders,
    ort_contenders,
    report,
)
from benchmarks.contender import Entry
from benchmarks.measure import Limits, measure
from benchmarks.workload import SHAPES, History, Mode, Workload

ENTRIES: Sequence[Entry] = (
    *kvfuse_contenders.ENTRIES,
    *byte_limit.ENTRIES,
    *ort_contenders.ENTRIES,
    *openvino_contenders.ENTRIES,
    *ggml_contenders.ENTRIES,
)
DECODE_TOKENS = (256, 1024, 4096, 16384, 65536, 131072)
PREFILL_TOKENS = (512, 1024, 2048, 4096)
QUICK = {"shapes": "A", "tokens": "1024,4096", "prompts": "512", "threads": "1", "rounds": 7, "seconds": 8.0}


def numbers(text: str) -> list[int]:
    """Reads "1,2,3"."""
    return [int(part) for part in text.split(",")]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Attention of one layer, kvfuse beside others.")
    parser.add_argument("--modes", default="decode,prefill")
    parser.add_argument("--shapes", default="A,B,C", help="; ".join(map(str, SHAPES.values())))
    parser.add_argument("--tokens", default=",".join(map(str, DECODE_TOKENS)), help="cached tokens, decode")
    parser.add_argument("--prompts", default=",".join(map(str, PREFILL_TOKENS)), help="tokens, prefill")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--layers", type=int, default=1, help="caches that decode rotates through")
    parser.add_argument("--contenders", default="", help="a regular expression; kvfuse always runs")
    parser.add_argument("--rounds", type=int, default=15, help="at most, for each group of contenders")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a group of contenders, after setup")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for one thread on a busy machine"
    )
    parser.add_argument("--memory", type=float, help="GiB for contenders; default: 75 %% of what is free")
    parser.add_argument("--quick", action="store_true", help=" ".join(f"--{k} {v}" for k, v in QUICK.items()))
    parser.add_argument("--json", type=Path, help="file for the raw numbers; report.py makes tables of it")
    parser.add_argument("--list", action="store_true", help="names and descriptions of the contenders")
    options = parser.parse_args(arguments)
    if options.quick:
        parser.set_defaults(**QUICK)
        options = parser.parse_args(arguments)
    if options.clock == "cpu" and options.threads != "1":
        parser.error("[clock] expected --threads 1 with --clock cpu; found --threads " + options.threads)
    return options


def workloads(options: argparse.Namespace) -> Iterator[Workload]:
    """All configurations asked for, shortest first within a shape."""
    decode, prefill = numbers(options.tokens), numbers(options.prompts)
    modes: list[Mode] = [mode for mode in ("decode", "prefill") if mode in options.modes.split(",")]
    for name in options.shapes.split(","):
        longest = max([tokens + 1 for tokens in decode] if "decode" in modes else prefill)
        history = History(SHAPES[name], max(longest, *prefill) if "prefill" in modes else longest)
        for mode in modes:
            for threads in numbers(options.threads):
                for tokens in decode if mode == "decode" else prefill:
                    yield Workload.of(mode, history, tokens, threads, options.layers)


def run(work: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one configuration; the result is what JSON holds."""
    able = [entry for entry in ENTRIES if work.mode in entry.modes and entry.threads < work.threads]
    base = [entry for entry in able if entry.name in kvfuse_contenders.FORMATS]
    others = [entry for entry in able if entry not in base and re.search(options.contenders, entry.name)]
    memory = int(options.memory * 2**30) if options.memory else int(0.75 * machine.available_memory())
    groups = measure(work, base, others, Limits(options.rounds, options.seconds, memory, options.clock))
    return {
        "mode": work.mode,
        "shape": asdict(work.shape),
        "tokens": work.tokens,
        "threads": work.threads,
        "layers": work.layers,
        "clock": options.clock,
        "load": machine.describe()["load"],
        "groups": [{name: asdict(result) for name, result in group.items()} for group in groups],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints each configuration as it comes, writes JSON, prints the table with the bars."""
    options = parse(arguments)
    if options.list:
        for entry in ENTRIES:
            print(f"{entry.name:24} {entry.about}")
        return 0
    found: dict[str, Any] = {"kind": "attention", "machine": machine.describe(), "configurations": []}
    for work in workloads(options):
        configuration = run(work, options)
        found["configurations"].append(configuration)
        print(report.configuration_text(configuration), flush=True)
        report.save(found, options.json)  # after each, so that an interrupted run is not lost
    print(report.attention_tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
