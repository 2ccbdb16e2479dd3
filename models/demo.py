"""The main job on a real model: build it, rewrite it, run both, print what changed.

`python models/demo.py` builds SmolLM2-135M-Instruct, rewrites it with the default preset and with the plain
per-token int4 form, lets every variant continue one prompt greedily, and prints a table. Each variant runs
in a process of its own, so that peak memory is its own. Speeds are of one run on this machine.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import kvfuse
from benchmarks.decoding import peak_bytes, resident_bytes, run_in_process, time_decoding

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "The capital of France is"
NEW_TOKENS = 24
CONTEXTS = (64, 2048)  # where decode speed is measured
SPEED_STEPS = 16
RESIDENT = (1024, 4096, 8192)  # where the cache's memory is measured
PRESETS = {"default": "kvfuse default", "int4": "kvfuse int4 per token"}


def run_variant(model: Path) -> dict[str, Any]:
    """Decodes with one model; returns its text, token ids, tokens/s by context, and peak memory in bytes."""
    from kvfuse.decoder import open_decoder
    from kvfuse.generate import Generation, find_tokenizer

    tokenizer = find_tokenizer(model, ROOT / "models" / "build" / "smollm2" / "tokenizer.json")
    decoder = open_decoder(model)
    greedy = Generation(decoder, tokenizer.encode(PROMPT), max_new_tokens=NEW_TOKENS)
    token_ids = list(greedy)
    speeds = {}
    for context in CONTEXTS:
        ids = (tokenizer.encode(PROMPT + " Paris. ") * context)[:context]
        (speeds[context],) = time_decoding(decoder, ids, SPEED_STEPS).tokens_per_second
    return {
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids),
        "tokens_per_second": speeds,
        "peak_bytes": peak_bytes(),
    }


def variant_in_process(model: Path) -> dict[str, Any]:
    """Runs `run_variant` in a process of its own."""
    result: dict[str, Any] = run_in_process(__file__, "--variant", model)
    return result


def mib(size: float) -> str:
    """Formats bytes as MiB."""
    return f"{size / 2**20:.1f}"


def print_table(runs: dict[str, dict[str, Any]], caches: dict[str, tuple[float, list[int]]]) -> None:
    """Prints the measured table: one column per variant."""
    from rich.console import Console
    from rich.table import Table

    original = next(iter(runs.values()))
    table = Table(title=f"SmolLM2-135M-Instruct, f32 weights, greedy after {PROMPT!r}")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    table.add_row("cache bytes per token", *(f"{caches[name][0]:,.0f}" for name in runs))
    for index, tokens in enumerate(RESIDENT):
        table.add_row(f"resident cache at {tokens} tokens, MiB", *(mib(caches[n][1][index]) for n in runs))
    for context in CONTEXTS:
        cells = (f"{run['tokens_per_second'][str(context)]:.1f}" for run in runs.values())
        table.add_row(f"tokens/s, context {context}", *cells)
    table.add_row(f"peak memory, context {CONTEXTS[-1]}, MiB", *(mib(r["peak_bytes"]) for r in runs.values()))
    table.add_row(
        f"same {NEW_TOKENS} tokens as the original",
        *("yes" if run["token_ids"] == original["token_ids"] else "no" for run in runs.values()),
    )
    console = Console(width=max(110, Console().width))
    console.print(table)
    for name, run in runs.items():
        console.print(f"[bold]{name}[/bold]: {run['text']!r}", highlight=False, markup=True)


def main() -> int:
    """Builds, rewrites, runs and prints; returns 1 when a site is refused or the default's text differs."""
    parser = argparse.ArgumentParser(description="Rewrite and run SmolLM2-135M-Instruct.")
    parser.add_argument("--variant", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        options.result.write_text(json.dumps(run_variant(options.variant)))
        return 0

    from models import smollm2

    print("building SmolLM2-135M-Instruct (the first time takes a minute) …", flush=True)
    model = smollm2.build(ROOT / "models" / "build" / "smollm2")
    print("running the original …", flush=True)
    runs = {"original": variant_in_process(model)}
    caches: dict[str, tuple[float, list[int]]] = {}
    for preset, name in PRESETS.items():
        target = model.with_name(f"model.kvfuse-{preset}.onnx")
        report = kvfuse.rewrite(str(model), str(target), format=preset).to_dict()
        fused = sum(site["outcome"] == "fused" for site in report["sites"])
        print(
            f"rewrote {fused} of {len(report['sites'])} sites into {target.relative_to(ROOT)}; running …",
            flush=True,
        )
        runs[name] = variant_in_process(target)
        before = report["bytes_per_token_before"]
        caches["original"] = (before, [before * tokens for tokens in RESIDENT])
        caches[name] = (report["bytes_per_token_after"], resident_bytes(target, RESIDENT))
        if fused != len(report["sites"]) or not fused:
            print(
                f"[demo] expected every site fused; found {fused} of {len(report['sites'])}", file=sys.stderr
            )
            return 1
    print_table(runs, caches)
    if runs[PRESETS["default"]]["token_ids"] != runs["original"]["token_ids"]:
        print("[demo] expected the original's text with the default preset; found another", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
