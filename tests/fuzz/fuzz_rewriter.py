"""Rewrites damaged decoders: never a crash, a hang or a traceback, and what is fused still computes the same.

    python tests/fuzz/fuzz_rewriter.py --count 10000 --seed 1 --corpus tests/data/corpus --keep /tmp/mutants

One worker process takes mutant after mutant (`mutants.py`); it is replaced when it dies or exceeds its time.
A mutant passes when it ends in one of these:

  error            kvfuse refused the file with one sentence and wrote nothing
  refused          nothing was fused and the output is the input, byte for byte
  equal            fused, and the logits are the mutant's own in exact mode, in every schedule
  does not run     fused, and onnxruntime cannot run the mutant itself (or its caches, logits are not finite)
  not finite       fused, and the mutant's own attention computes NaN, which an IsNaN of its own hides
  inconsistent     fused, and the mutant's own logits depend on how its tokens are split into runs
  stopped          fused, and the op refuses the mutant's tensors with one sentence

Anything else is a finding; with findings the exit status is 1. `--start` and `--count 1` repeat one mutant.
"""

import argparse
import collections
import json
import multiprocessing
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "passes")]

from mutants import mutant  # noqa: E402
from sources import Decoder, load, run  # noqa: E402

PASSED = ("error", "refused", "equal", "does not run", "not finite", "inconsistent", "stopped")
SCHEDULES = ((9,), (4, 1, 3, 1), (1,) * 9)
ROUNDING = 8.0  # times the mutant's own noise
UNSURE = 50.0  # times the limit: more noise than rounding makes
EXACT = 4096
MEMORY = 8 << 30  # bytes of address space; a mutant may ask for any number


def examine(source: Decoder, data: bytes, folder: Path, phase: Any) -> tuple[str, str]:
    """Outcome and detail of one mutant; calls `phase` with what comes next."""
    import kvfuse

    path, target = folder / "mutant.onnx", folder / "fused.onnx"
    path.write_bytes(data)
    target.unlink(missing_ok=True)
    phase("rewriting")
    try:
        report = kvfuse.rewrite(path, target, n_recent=EXACT)
    except kvfuse.KVFuseError as error:
        clean = "\n" not in str(error) and not target.exists()
        return ("error" if clean else "UNTIDY ERROR"), str(error)
    except Exception:  # what the fuzzer looks for
        return "TRACEBACK", traceback.format_exc()
    if not all(site.outcome == "fused" or site.reason for site in report.sites):
        return "NO REASON", ""
    if not report.fused:
        return ("refused" if target.read_bytes() == data else "REFUSED AND CHANGED"), ""
    phase("running the mutant")
    expected = reference(path, source)
    if expected is None:
        return "does not run", ""
    phase("running the rewritten mutant")
    try:
        found = [run(kvfuse.InferenceSession(target, options()), source, schedule) for schedule in SCHEDULES]
    except kvfuse.SequenceError as error:
        return "stopped", str(error)
    except Exception:  # what the fuzzer looks for
        return "REWRITTEN FAILS", traceback.format_exc()
    outcome, detail = compare(expected, found, source.tolerance)
    if outcome == "WRONG":
        outcome, detail = compare(expected, found, source.tolerance, sensitivity(data, source, expected))
    if outcome == "WRONG" and guards_meet_nan(data, source):
        return "not finite", detail
    return outcome, detail


def options() -> Any:
    import onnxruntime

    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = 1
    chosen.log_severity_level = 4
    return chosen


def reference(path: Path, source: Decoder) -> list[list[np.ndarray]] | None:
    """The mutant's own logits by schedule and run, None when there are none that are finite."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(path, options(), providers=["CPUExecutionProvider"])
        rows = [run(session, source, schedule) for schedule in SCHEDULES]
    except Exception:  # an invalid mutant: onnxruntime's errors share no base class
        return None
    usable = all(row.ndim == 3 and np.isfinite(row).all() for steps in rows for row in steps)
    return rows if usable else None


def sensitivity(data: bytes, source: Decoder, expected: Any) -> float:
    """How far the mutant's logits move when its weights do by at most their last bit."""
    import onnx
    import onnxruntime
    from onnx import numpy_helper

    model, random = onnx.load_from_string(data), np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if len(tensor.dims) >= 2 and tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
            array = numpy_helper.to_array(tensor)
            bit = np.finfo(array.dtype).eps * random.integers(-1, 2, array.shape)
            with np.errstate(all="ignore"):
                moved = (array * (1 + bit)).astype(array.dtype)
            tensor.CopyFrom(numpy_helper.from_array(moved, tensor.name))
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options())
        rows = run(session, source, SCHEDULES[0])
    except Exception:  # one bit more and it is not finite: onnxruntime's errors share no base class
        return float("inf")
    return max(distance(*pair) for pair in zip(expected[0], rows, strict=True))


def guards_meet_nan(data: bytes, source: Decoder) -> bool:
    """Whether an IsNaN of the mutant finds any, where no row is masked: NaN is what its attention computes.

    The guard turns a whole row into zeros then; the op does so with a fully masked row only, and keeps NaN.
    """
    import onnx
    import onnxruntime

    model = onnx.load_from_string(data)
    found = [node.input[0] for node in model.graph.node if node.op_type == "IsNaN"]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in found)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options())
    seen: list[bool] = []

    class Watched:
        get_inputs, get_outputs = session.get_inputs, session.get_outputs

        def run(self, names: Any, feeds: Any) -> Any:
            got = session.run(names, feeds)
            seen.extend(bool(np.isnan(array).any()) for array in got[len(got) - len(found) :])
            return got

    run(Watched(), source, SCHEDULES[0])
    return any(seen)


def compare(expected: Any, found: Any, tolerance: float, noise: float = 0.0) -> tuple[str, str]:
    """Holds the rewritten logits against the mutant's own, as far as those are sure of themselves.

    A damaged graph may divide by nearly nothing; how far its own logits move when its tokens are split
    otherwise (or its weights are rounded otherwise: `noise`) is then what rounding alone does to them.
    """
    whole, *others = (np.concatenate(steps, axis=1) for steps in expected)
    limit = tolerance * max(1.0, float(np.abs(whole).max(initial=0.0)))
    noise = max(noise, *(distance(whole, other) for other in others))
    pairs = [pair for steps in zip(expected, found, strict=True) for pair in zip(*steps, strict=True)]
    worst = max(distance(*pair) for pair in pairs)
    detail = f"differs by {worst:.3g}; limit {limit:.3g}; the mutant from itself by {noise:.3g}"
    if worst <= max(limit, ROUNDING * min(noise, UNSURE * limit)):
        return "equal", detail
    return ("inconsistent" if noise > UNSURE * limit else "WRONG"), detail


def distance(one: np.ndarray, other: np.ndarray) -> float:
    if one.shape != other.shape:
        return float("inf")
    gap = float(np.abs(one - other).max(initial=0.0))
    return gap if np.isfinite(gap) else float("inf")


def work(pipe: Connection, sources: Sequence[Decoder], seed: int) -> None:
    """Takes indices from the pipe and answers ("phase", name)… ("done", outcome, detail)."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        while (index := pipe.recv()) is not None:
            source, data, _ = mutant(sources, seed, index)
            outcome, detail = examine(source, data, Path(folder), lambda name: pipe.send(("phase", name)))
            pipe.send(("done", outcome, detail))


class Worker:
    """The process that does the work; replaced when it dies."""

    def __init__(self, sources: Sequence[Decoder], seed: int) -> None:
        self._pipe, inner = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=work, args=(inner, sources, seed))
        self._process.start()
        inner.close()

    def examine(self, index: int, seconds: float) -> tuple[str, str]:
        """Outcome and detail; a death while the mutant itself runs is onnxruntime's and passes."""
        self._pipe.send(index)
        deadline, phase = time.monotonic() + seconds, "making the mutant"
        while True:
            try:
                if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                    self.stop()
                    return self._lost("HANG", phase)
                kind, *rest = self._pipe.recv()
            except EOFError:
                self._process.join()
                return self._lost("CRASH", f"{phase} (exit {self._process.exitcode})")
            if kind == "done":
                return rest[0], rest[1]
            phase = rest[0]

    @staticmethod
    def _lost(outcome: str, phase: str) -> tuple[str, str]:
        return ("does not run" if phase.startswith("running the mutant") else outcome), phase

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def fuzz(
    sources: Sequence[Decoder], seed: int, indices: Sequence[int], seconds: float
) -> Iterator[tuple[int, str, str]]:
    """Index, outcome and detail of every mutant."""
    worker = Worker(sources, seed)
    try:
        for index in indices:
            if not worker.alive:
                worker = Worker(sources, seed)
            yield index, *worker.examine(index, seconds)
    finally:
        worker.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--start", type=int, default=0, help="index of the first mutant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="a folder with manifest.json; else only tiny decoders")
    parser.add_argument("--seconds", type=float, default=60.0, help="what one mutant may take")
    parser.add_argument("--keep", type=Path, help="where the mutants of findings are written")
    parser.add_argument("--json", type=Path, help="where counts and findings are written")
    args = parser.parse_args()
    sources = load(args.corpus) if args.corpus else []
    counts: collections.Counter[str] = collections.Counter()
    findings = []
    begun = time.monotonic()
    indices = range(args.start, args.start + args.count)
    for done, (index, outcome, detail) in enumerate(fuzz(sources, args.seed, indices, args.seconds), 1):
        counts[outcome] += 1
        if outcome not in PASSED:
            findings.append(describe(sources, args, index, outcome, detail))
        if done % 500 == 0 or done == args.count:
            passed = f"{done} mutants, {time.monotonic() - begun:.0f} s"
            print(f"{passed}: {dict(counts.most_common())}", flush=True)
    if args.json:
        result = {"seed": args.seed, "counts": counts, "findings": findings}
        args.json.write_text(json.dumps(result, indent=1))
    return 1 if findings else 0


def describe(
    sources: Sequence[Decoder], args: argparse.Namespace, index: int, outcome: str, detail: str
) -> dict[str, Any]:
    """Prints and keeps one finding."""
    source, data, how = mutant(sources, args.seed, index)
    print(f"{index}: {outcome} ({source.name}: {how}) {detail.strip().splitlines()[-1:]}", flush=True)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        (args.keep / f"{args.seed}-{index}.onnx").write_bytes(data)
    return {"index": index, "outcome": outcome, "source": source.name, "how": how, "detail": detail}


if __name__ == "__main__":
    sys.exit(main())
