"""Whole models as exported against themselves rewritten: tokens/s, prompt, peak memory, cache, by context.

python benchmarks/end_to_end.py --json build/bench/end_to_end.json
python benchmarks/end_to_end.py --models smollm2 --contexts 64,512 --steps 16 --repeats 1   # a look

Each run is a process of its own, so that peak memory is its own; variants take turns. Models:

* smollm2: SmolLM2-135M-Instruct, f32 weights, all 30 layers.
* qwen3-shape: random f32 weights in the sizes of Qwen3-1.7B (hidden 2048, 16/8 heads of 128, MLP 6144) but 4
  of its 28 layers, 8,192 of its 151,936 tokens, and no norm on queries and keys: it shows how much of a step
  is left to attention where the weights dominate. Its tokens/s are those of these 4 layers, not of the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import kvfuse
from benchmarks import machine, report
from benchmarks.decoding import open_timed, resident_bytes, run_in_process, time_decoding

ROOT = Path(__file__).resolve().parents[1]
CONTEXTS = (64, 512, 2048, 8192)
FORMATS = ("default", "int4")
VOCABULARY = 8192  # prompts are drawn from the first tokens of every vocabulary


def build_smollm2() -> Path:
    """Builds SmolLM2-135M-Instruct unless it is there."""
    from models import smollm2

    return smollm2.build(ROOT / "models" / "build" / "smollm2")


def build_qwen3_shape() -> Path:
    """Builds the random model unless it is there; about 0.9 GB."""
    import onnx_ir as ir

    from models.config import AttentionForm, DecoderConfig
    from models.decoder import build_decoder

    path = ROOT / "build" / "bench" / "qwen3-shape" / "model.onnx"
    if path.is_file():
        return path
    config = DecoderConfig(
        num_layers=4,
        num_heads=16,
        kv_num_heads=8,
        head_dim=128,
        hidden_size=2048,
        intermediate_size=6144,
        vocab_size=VOCABULARY,
        rope_theta=1e6,
    )
    shapes, random = config.weight_shapes(), np.random.default_rng(0)

    def weight(name: str) -> NDArray[np.float32]:
        values: NDArray[np.float32] = np.ones(shapes[name], np.float32)
        if values.ndim == 2:
            values = random.standard_normal(values.shape, dtype=np.float32)
            values /= np.float32(np.sqrt(values.shape[-1]))
        return values

    unfinished = path.with_name("unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    ir.save(
        build_decoder(config, AttentionForm(), weight),
        unfinished / path.name,
        external_data="model.onnx.data",
    )
    for name in ("model.onnx.data", path.name):  # the model last: it says that the build is whole
        (unfinished / name).replace(path.with_name(name))
    unfinished.rmdir()
    return path


MODELS: Mapping[str, tuple[str, Callable[[], Path]]] = {
    "smollm2": ("SmolLM2-135M-Instruct, f32", build_smollm2),
    "qwen3-shape": (
        "Random weights in the sizes of Qwen3-1.7B, 4 of 28 layers, 8,192 of 151,936 tokens, f32",
        build_qwen3_shape,
    ),
}


def measure(
    name: str, contexts: Sequence[int], steps: int, bursts: int, repeats: int, threads: int
) -> dict[str, Any]:
    """Measures one model in all variants; the result is what JSON holds."""
    title, build = MODELS[name]
    paths, cache_bytes = {"original": build()}, {}
    for preset in FORMATS:
        target = paths["original"].with_name(f"model.kvfuse-{preset}.onnx")
        rewritten = kvfuse.rewrite(
            str(paths["original"]), str(target), format=preset, require_all=True
        ).to_dict()
        before = rewritten["bytes_per_token_before"]
        paths[preset], cache_bytes[preset] = target, resident_bytes(target, contexts)
    cache_bytes["original"] = [before * context for context in contexts]
    runs: dict[str, list[Any]] = {variant: [] for variant in paths}
    for index, context in enumerate(contexts):
        found: dict[str, list[Any]] = {variant: [] for variant in paths}
        for _ in range(repeats):  # the variants take turns, so that a slow minute hits all of them
            for variant, path in paths.items():
                arguments = (str(number) for number in (context, steps, bursts, threads))
                found[variant].append(run_in_process(__file__, "--child", path, *arguments))
        for variant, repeated in found.items():
            speeds = [speed for run in repeated for speed in run["tokens_per_second"]]
            run = {
                "context": context,
                "tokens_per_second": speeds,
                "prefill_seconds": float(np.median([run["prefill_seconds"] for run in repeated])),
                "peak_bytes": max(run["peak_bytes"] for run in repeated),
                "cache_bytes": cache_bytes[variant][index],
            }
            runs[variant].append(run)
            print(f"{name}, context {context}, {variant}: {report.Spread.of(speeds)} tokens/s", flush=True)
    return {
        "title": title,
        "has_bars": name == "smollm2",
        "steps": steps * bursts * repeats,
        "threads": threads,
        "variants": runs,
    }


def child(arguments: Sequence[str], result: Path) -> None:
    """Times one model at one context: what runs in a process of its own."""
    context, steps, bursts, threads = (int(text) for text in arguments[1:])
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, context).tolist()
    run = time_decoding(open_timed(Path(arguments[0]), threads), prompt, steps, bursts)
    result.write_text(json.dumps(asdict(run)), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds, rewrites, measures, prints the tables and writes JSON."""
    parser = argparse.ArgumentParser(description="Models before and after rewriting.")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--steps", type=int, default=64, help="tokens of one timed burst")
    parser.add_argument("--bursts", type=int, default=2, help="bursts of one process")
    parser.add_argument("--repeats", type=int, default=3, help="processes of one variant and context")
    parser.add_argument("--threads", type=int, default=0, help="intra-op threads; 0: onnxruntime chooses")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.child, options.result)
        return 0
    contexts = [int(text) for text in options.contexts.split(",")]
    found: dict[str, Any] = {"kind": "end_to_end", "machine": machine.describe(), "models": []}
    for name in options.models.split(","):
        timing = (options.steps, options.bursts, options.repeats, options.threads)
        found["models"].append(measure(name, contexts, *timing))
        report.save(found, options.json)
    print(report.end_to_end_tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
