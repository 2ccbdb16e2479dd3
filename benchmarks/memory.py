"""Resident bytes of a cache against the printed formula, at 1 K to 128 K tokens.

python benchmarks/memory.py --json build/bench/memory.json

Counts what the process really takes (private memory before and after the cache is filled) beside what the
library says it holds, so that a copy which the library does not count would show.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import kvfuse
from benchmarks import machine, report
from benchmarks.kvfuse_contenders import FILL_TOKENS, FORMATS, op_model, op_session
from benchmarks.workload import SHAPES, Shape
from kvfuse.formats import KvFormat

TOKENS = (1024, 8192, 32768, 131072)


def process_bytes() -> int:
    """Private resident memory of this process, freed heap pages returned first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise ValueError("[smaps_rollup] expected a line Private_Dirty; found none")


def rows_of(cache_format: KvFormat, shape: Shape, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Fills one sequence and looks at each length."""
    session = op_session(op_model(cache_format, shape.kv_num_heads, shape, padding=True), 1)
    random, length, rows = np.random.default_rng(0), 0, []

    def append(sequence: kvfuse.KvSequence, count: int) -> None:
        size = (1, shape.kv_num_heads, count, shape.head_dim)
        part = random.standard_normal(size, dtype=np.float32)
        feeds = dict.fromkeys(("query", "key", "value"), part)
        feeds |= {
            "kv_sequence": np.array([sequence.id]),
            "padding": np.zeros((1, len(sequence) + count), np.bool_),
        }
        session.run(None, feeds)

    with kvfuse.KvSequence() as warm:  # onnxruntime's arena and the largest chunk are not the cache's
        append(warm, FILL_TOKENS)
    with kvfuse.KvSequence() as sequence:
        before = process_bytes()
        for target in lengths:
            while length < target:
                count = min(FILL_TOKENS, target - length)
                append(sequence, count)
                length += count
            per_token = cache_format.bytes_per_token(shape.kv_num_heads, shape.head_dim, shape.head_dim)
            formula, held = per_token * length, sequence.nbytes
            rows.append(
                {
                    "tokens": f"{length:,}",
                    "formula, MiB": formula / 2**20,
                    "held, MiB": held / 2**20,
                    "of these exact floats, MiB": (held - formula) / 2**20,
                    "process, MiB": (process_bytes() - before) / 2**20,
                    "as f32, MiB": length * 2 * shape.kv_num_heads * shape.head_dim * 4 / 2**20,
                }
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the tables, writes JSON."""
    parser = argparse.ArgumentParser(description="Memory of one layer's cache.")
    parser.add_argument("--shape", default="A", choices=SHAPES)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    shape, lengths = SHAPES[options.shape], [int(text) for text in options.tokens.split(",")]
    tables = {
        f"{name}, shape {shape}, one layer": rows_of(cache_format, shape, lengths)
        for name, cache_format in FORMATS.items()
    }
    found = {"kind": "memory", "machine": machine.describe(), "tables": tables}
    print(report.plain_tables(found))
    report.save(found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
