"""Decode steps and prompts on a CUDA device, beside PyTorch's f16 attention and the byte limit.

    python benchmarks/gpu_decode.py                      the whole table, as Markdown
    python benchmarks/gpu_decode.py --lengths 512 2048   a part of it

Needs torch with CUDA and numba. For each shape (query heads / kv heads / head size), format and length T:

    run      µs of session.run from Python, one node, one new token, float tensors in CPU memory
    kernels  µs of the step's kernels alone, summed, from CUPTI through torch.profiler
    copies   µs of its copies between host and device, likewise
    cuDNN, flash   µs of one replayed graph of scaled_dot_product_attention with GQA on an f16 cache
    limit    µs that reading the cache once takes at the measured read-and-write bandwidth of a copy

All are medians with a cold L2: before every step 256 MB are written, as the other layers of a model would.
The errors are the largest differences from the CPU's outputs for the same state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gpu_state
import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import kvfuse
from kvfuse.device_selftest import CASES, two_node_model
from kvfuse.library import native

SHAPES = {"A 16/8/128": (16, 8, 128), "B 32/8/128": (32, 8, 128)}
LENGTHS = (512, 2048, 8192, 32768, 131072)
FORMATS = {
    "int4": CASES["4 bits"],
    "default": CASES["default preset"],
}
RIVALS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
STEPS = 20
PROFILED = 8  # steps of one recording
SHORT = 512  # tokens of the state that longer ones repeat
L2_FLUSH_BYTES = 256 << 20


class Flush:
    """Writes more than the L2 holds."""

    def __init__(self) -> None:
        self.buffer = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self) -> None:
        """Returns when all is written."""
        self.buffer.fill_(1)  # a kernel: zero_ would be a memset, and count as one of ours
        torch.cuda.synchronize()


def copy_bandwidth() -> float:
    """Bytes per µs, counting read and written ones, of a copy of 4 GB."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [_event_us(lambda: target.copy_(source)) for _ in range(10)]
    return 2 * source.numel() / statistics.median(times)


def _event_us(call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def torch_us(
    backend: SDPBackend, shape: tuple[int, int, int], tokens: int, past: int, causal: bool, flush: Flush
) -> float | None:
    """Median µs of PyTorch's attention on f16, as one replayed graph; None where the back end declines."""
    heads, kv_heads, size = shape
    query = torch.randn(1, heads, tokens, size, device="cuda", dtype=torch.float16)
    key, value = (
        torch.randn(1, kv_heads, past + tokens, size, device="cuda", dtype=torch.float16) for _ in range(2)
    )

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

    try:
        with sdpa_kernel(backend):
            for _ in range(3):
                attend()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                attend()
    except RuntimeError:
        return None
    times = []
    for _ in range(STEPS):
        flush()
        times.append(_event_us(graph.replay))
    return statistics.median(times)


class Case:
    """One node of one shape and format with `length` tokens in its cache."""

    def __init__(
        self, shape: tuple[int, int, int], attributes: dict[str, Any], device: str, variant: str | None
    ):
        self.shape = shape
        heads, kv_heads, size = shape
        attributes = attributes | {"scale": size**-0.5}
        model = two_node_model(attributes, heads, kv_heads, size)
        self.session = kvfuse.InferenceSession(model, device=device, variant=variant)
        random = np.random.default_rng(1)
        self.tokens = {
            name: random.standard_normal((1, count, 4096, size), np.float32)
            for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads))
        }

    def feeds(self, begin: int, count: int, sequence: int, past: int = -1) -> dict[str, Any]:
        """The tokens [begin, begin + count) for a sequence that goes on, or goes back to `past` first."""
        chunk = {
            name: np.ascontiguousarray(t[:, :, begin : begin + count]) for name, t in self.tokens.items()
        }
        return chunk | {"kv_sequence": np.array([sequence]), "kv_past_length": np.array([past])}

    def step(self, feeds: dict[str, Any]) -> tuple[float, Any]:
        """Runs once; returns µs and the output."""
        start = time.perf_counter()
        (output,) = self.session.run(["output"], feeds)
        return (time.perf_counter() - start) * 1e6, output

    def measure(self, make: Callable[[int], dict[str, Any]], flush: Flush) -> dict[str, float]:
        """Medians in µs over STEPS runs of make(step): the run, its kernels, its copies."""
        for step in range(3):
            self.step(make(step))
        runs = []
        for step in range(STEPS):
            feeds = make(step)
            flush()
            runs.append(self.step(feeds)[0])
        names: dict[str, list[float]] = {}
        with recorded() as events:
            for step in range(PROFILED):
                feeds = make(step)
                flush()
                self.step(feeds)
        for event in events():
            if "kvfuse" in event.name or event.name.startswith(("Memcpy", "Memset")):
                names.setdefault(event.name, []).append(event.time_range.elapsed_us())
        self.by_name = {
            name: (statistics.median(times), len(times) / PROFILED) for name, times in names.items()
        }
        spent = {"kvfuse": 0.0, "copies": 0.0}
        for name, (us, count) in self.by_name.items():
            spent["kvfuse" if "kvfuse" in name else "copies"] += us * count
        return {"run": statistics.median(runs), "kernels": spent["kvfuse"], "copies": spent["copies"]}


@contextmanager
def recorded() -> Iterator[Callable[[], list[Any]]]:
    """Records what the GPU does inside; the yielded function gives the events afterwards."""
    found: list[Any] = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield lambda: found
        torch.cuda.synchronize()
    found += [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def short_state(attributes: dict[str, Any]) -> bytes:
    """A frozen state of SHORT tokens, made on the CPU; it fits all shapes, whose kv heads are the same."""
    case = Case(next(iter(SHAPES.values())), attributes, "cpu", None)
    with kvfuse.KvSequence() as sequence:
        case.step(case.feeds(0, SHORT, sequence.id, 0))
        return sequence.freeze()


def decode_rows(arguments: argparse.Namespace, flush: Flush, bandwidth: float) -> Iterator[list[str]]:
    """One step after T - 1 tokens."""
    rivals: dict[tuple[str, int], list[float | None]] = {}
    for format_name, attributes in ((name, FORMATS[name]) for name in arguments.formats):
        short = short_state(attributes)
        for length in arguments.lengths:
            state = gpu_state.lengthen(short, length) if length > SHORT else short
            with kvfuse.KvSequence.unfreeze(state) as base:
                for name in arguments.shapes:
                    if (name, length) not in rivals:
                        rivals[name, length] = [
                            torch_us(backend, SHAPES[name], 1, length - 1, False, flush) for backend in RIVALS
                        ]
                    f16_limit = 2 * 2 * SHAPES[name][1] * SHAPES[name][2] * length / bandwidth
                    with base.fork() as fork:
                        expected = after(Case(SHAPES[name], attributes, "cpu", None), fork)
                    for variant in arguments.variants:
                        case = Case(SHAPES[name], attributes, arguments.device, variant)
                        with base.fork() as fork:
                            error = float(np.abs(after(case, fork) - expected).max())
                            handle = fork.id
                            spent = case.measure(lambda step, h=handle, c=case: c.feeds(step, 1, h), flush)
                            limit = fork.nbytes / bandwidth
                        if arguments.kernels:
                            for kernel, (us, count) in sorted(case.by_name.items()):
                                print(f"  {kernel[:70]}: {us:.1f} µs x {count:g}")
                        times = [spent["run"], spent["kernels"], spent["copies"], limit]
                        times += [*rivals[name, length], f16_limit]
                        cells = ["–" if t is None else f"{t:.1f}" for t in times]
                        yield [name, format_name, variant, str(length), *cells, f"{error:.1g}"]


def after(case: Case, sequence: kvfuse.KvSequence) -> Any:
    """The output of the next token."""
    return case.step(case.feeds(SHORT, 1, sequence.id))[1]


def prompt_rows(arguments: argparse.Namespace, flush: Flush) -> Iterator[list[str]]:
    """A prompt into an empty cache, whose queries see all, half or a quarter of all pairs."""
    tokens = arguments.prompt
    quarter = round((1 - 0.5**0.5) * tokens) - 1  # tokens to the left that make a causal window a quarter
    kinds = {"100 %": {"causal": 0}, "50 %": {"causal": 1}, "25 %": {"causal": 1, "window_left": quarter}}
    for name in arguments.shapes:
        for share, mask in kinds.items():
            rivals = [None, None]
            if "window_left" not in mask:
                rivals = [
                    torch_us(backend, SHAPES[name], tokens, 0, mask["causal"] == 1, flush)
                    for backend in RIVALS
                ]
            for variant in arguments.variants:
                case = Case(SHAPES[name], FORMATS["int4"] | mask, arguments.device, variant)
                with kvfuse.KvSequence() as sequence:
                    feeds = case.feeds(0, tokens, sequence.id, 0)
                    spent = case.measure(lambda step, f=feeds: f, flush)
                times = [spent["run"], spent["kernels"], *rivals]
                yield [name, share, variant, *("–" if t is None else f"{t:.0f}" for t in times)]


def table(heads: list[str], rows: Iterator[list[str]]) -> None:
    """Prints a Markdown table, each row as soon as it is there."""
    print("| " + " | ".join(heads) + " |")
    print("|" + " --- |" * len(heads))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--variants", nargs="+", default=["simd", "scalar"])
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--kernels", action="store_true", help="print the time of every kernel")
    arguments = parser.parse_args()
    native().set_exact_weights(True)  # in the CPU's outputs, which the errors are taken from
    bandwidth = copy_bandwidth()
    flush = Flush()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e6:.2f} TB/s\n")
    heads = ["shape", "format", "variant", "T", "run", "kernels", "copies", "limit", "cuDNN", "flash"]
    table([*heads, "f16 limit", "error"], decode_rows(arguments, flush, bandwidth))
    if arguments.prompt:
        print(f"\nA prompt of {arguments.prompt} tokens, µs\n")
        heads = ["shape", "visible", "variant", "run", "kernels", "cuDNN", "flash"]
        table(heads, prompt_rows(arguments, flush))


if __name__ == "__main__":
    main()
