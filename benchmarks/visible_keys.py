"""What a prompt costs by how much of it is visible, and a chunk by how long the cache before it is already.

python benchmarks/visible_keys.py --json build/bench/visible_keys.json

* A prompt of P tokens with a sliding window that leaves 100, 50, 25 % of the query-key pairs visible: time
  must fall with the pairs.
* A chunk of C tokens behind 0, 1, 4, 16 … thousand cached tokens: time per visible pair must not grow.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import kvfuse
from benchmarks import machine, report
from benchmarks.kvfuse_contenders import FORMATS, fill, op_model, op_session
from benchmarks.report import Spread
from benchmarks.workload import SHAPES, History, Shape
from kvfuse.formats import KvFormat

SHARES = (1.0, 0.5, 0.25)
PASTS = (0, 1024, 4096, 16384)


def window_of(prompt: int, share: float) -> int:
    """The window (keys before the query) that leaves this share of a causal prompt's pairs.

    Query p sees min(p, W) + 1 keys; W (P - W / 2) = share * P^2 / 2 solved for W.
    """
    return -1 if share >= 1 else round(prompt * (1 - math.sqrt(1 - share)))


def visible_pairs(new: int, past: int, window: int) -> int:
    """Query-key pairs of `new` tokens after `past` ones."""
    positions = np.arange(past, past + new)
    return int((positions if window < 0 else np.minimum(positions, window)).sum()) + new


def feeds_of(history: History, new: int, past: int) -> dict[str, Any]:
    """The new tokens behind `past`, as the op's inputs."""
    size = (1, history.shape.num_heads, new, history.shape.head_dim)
    part = slice(past, past + new)
    return {
        "query": np.random.default_rng(1).standard_normal(size, dtype=np.float32),
        "key": np.ascontiguousarray(history.key[np.newaxis, :, part]),
        "value": np.ascontiguousarray(history.value[np.newaxis, :, part]),
    }


def interleaved(runs: Mapping[Any, Callable[[], None]], rounds: int) -> dict[Any, Spread]:
    """Milliseconds of each run, in rounds that run every one once; the first round does not count.

    Of processor time: everything here has one thread, and other processes are not to be counted.
    """
    series: dict[Any, list[float]] = {key: [] for key in runs}
    for _ in range(rounds + 1):
        for key, run in runs.items():
            start = time.process_time()
            run()
            series[key].append((time.process_time() - start) * 1e3)
    return {key: Spread.of(values[1:]) for key, values in series.items()}


def by_share(history: History, cache_format: KvFormat, prompt: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of the first table."""
    feeds = feeds_of(history, prompt, 0) | {"kv_past_length": np.array([0])}

    def run_of(window: int) -> Callable[[], None]:
        model = op_model(
            cache_format, history.shape.num_heads, history.shape, attributes={"window_left": window}
        )
        session = op_session(model, 1)
        return lambda: session.run(None, feeds) and None

    windows = {share: window_of(prompt, share) for share in SHARES}
    found = interleaved({share: run_of(window) for share, window in windows.items()}, rounds)
    whole = visible_pairs(prompt, 0, -1)
    return [
        {
            "window": "none" if window < 0 else f"{window:,}",
            "visible pairs, %": 100 * visible_pairs(prompt, 0, window) / whole,
            "ms": str(found[share]),
            "time, %": 100 * found[share].median / found[1.0].median,
        }
        for share, window in windows.items()
    ]


def by_past(history: History, cache_format: KvFormat, chunk: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of the second table."""
    shape = history.shape
    session = op_session(op_model(cache_format, shape.num_heads, shape), 1)
    sequences = {past: kvfuse.KvSequence() for past in PASTS}

    def run_of(past: int) -> Callable[[], None]:
        fill(sequences[past], cache_format, shape, history.key[:, :past], history.value[:, :past])
        feeds = feeds_of(history, chunk, past)

        def run() -> None:
            with sequences[past].fork() as fork:
                session.run(None, feeds | {"kv_sequence": np.array([fork.id])})

        return run

    found = interleaved({past: run_of(past) for past in PASTS}, rounds)
    rows = []
    for past, spread in found.items():
        pairs = visible_pairs(chunk, past, -1) * shape.num_heads
        rows.append(
            {"cached": f"{past:,}", "ms": str(spread), "ns per pair and head": spread.median * 1e6 / pairs}
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the tables, writes JSON."""
    parser = argparse.ArgumentParser(description="Prefill by visible keys.")
    parser.add_argument("--shape", default="A", choices=SHAPES)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    shape: Shape = SHAPES[options.shape]
    history = History(shape, max(options.prompt, PASTS[-1] + options.chunk))
    tables: dict[str, Any] = {}
    for name, cache_format in FORMATS.items():
        title = f"{name}, shape {shape}, one thread: a prompt of {options.prompt:,} tokens in one run"
        tables[title] = by_share(history, cache_format, options.prompt, options.rounds)
        title = f"{name}, shape {shape}, one thread: a chunk of {options.chunk:,} tokens behind a full cache"
        tables[title] = by_past(history, cache_format, options.chunk, options.rounds)
    found = {"kind": "visible_keys", "machine": machine.describe(), "tables": tables}
    print(report.plain_tables(found))
    report.save(found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
