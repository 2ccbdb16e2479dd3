"""A fixed set of mutants in every test run, and proof that the fuzzer would notice.

`python tests/fuzz/fuzz_rewriter.py --count 10000 --corpus tests/data/corpus` is the long form.
"""

import collections
import os
import random
import time
from pathlib import Path

import fuzz_rewriter
import numpy as np
import onnx
import onnxruntime
import pytest
from fuzz_rewriter import PASSED, compare, examine, fuzz
from mutants import mutant, tiny
from sources import Decoder, load

import kvfuse

CORPUS = Path(__file__).parents[1] / "data" / "corpus"
COUNT = 100


def can_run(source: Decoder) -> bool:
    """Whether this onnxruntime knows the source's operators."""
    try:
        onnxruntime.InferenceSession(source.model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception:  # onnxruntime's errors share no base class
        return False
    return True


@pytest.fixture(scope="module")
def corpus():
    return [source for source in load(CORPUS) if can_run(source)]


def test_a_fixed_set_of_mutants(corpus):
    counts = collections.Counter()
    for index, outcome, detail in fuzz(corpus, seed=3, indices=range(COUNT), seconds=60.0):
        assert outcome in PASSED, f"mutant {index}: {outcome}: {detail}"
        counts[outcome] += 1
    assert min(counts[outcome] for outcome in ("equal", "refused", "error")) >= 5, counts


def test_whole_decoders_are_fused_and_equal(corpus, tmp_path):
    for source in corpus:
        fused = len(kvfuse.inspect(source.model).fused)
        outcome, detail = examine(source, source.model.SerializeToString(), tmp_path, lambda phase: None)
        assert outcome == ("equal" if fused else "refused"), f"{source.name}: {detail}"


def test_mutants_are_the_same_every_time(corpus):
    for index in range(20):
        assert mutant(corpus, 1, index)[1:] == mutant(corpus, 1, index)[1:]
    assert len({mutant(corpus, 1, index)[1] for index in range(20)}) > 15


def fusable() -> Decoder:
    sources = (tiny(random.Random(seed)) for seed in range(20))
    return next(source for source in sources if kvfuse.inspect(source.model).fused)


def outcome_with(monkeypatch, rewrite, tmp_path):
    source = fusable()
    monkeypatch.setattr(kvfuse, "rewrite", rewrite)
    return examine(source, source.model.SerializeToString(), tmp_path, lambda phase: None)[0]


def test_a_wrong_scale_is_found(monkeypatch, tmp_path):
    genuine = kvfuse.rewrite

    def wrong(source, target, **options):
        report = genuine(source, target, **options)
        model = onnx.load(target)
        for node in model.graph.node:
            for entry in node.attribute:
                if node.op_type == "QuantizedKvSdpa" and entry.name == "scale":
                    entry.f *= 1.5
        onnx.save(model, target)
        return report

    assert outcome_with(monkeypatch, wrong, tmp_path) == "WRONG"


def test_a_traceback_and_a_file_beside_an_error_are_found(monkeypatch, tmp_path):
    def untidy(source, target, **options):
        Path(target).write_bytes(b"half")
        raise kvfuse.ModelError("[here] expected nothing; found half a file")

    assert outcome_with(monkeypatch, lambda *_, **__: 1 // 0, tmp_path) == "TRACEBACK"
    monkeypatch.undo()
    assert outcome_with(monkeypatch, untidy, tmp_path) == "UNTIDY ERROR"


def test_a_crash_and_a_hang_are_found_and_do_not_end_the_run(monkeypatch):
    def odd(source, data, folder, phase):
        phase("rewriting")
        if odd.count == 0:
            os._exit(11)
        time.sleep(60)

    odd.count = 0
    monkeypatch.setattr(fuzz_rewriter, "examine", odd)
    found = list(fuzz([], seed=1, indices=range(2), seconds=20.0))
    assert [outcome for _, outcome, _ in found] == ["CRASH", "CRASH"]
    odd.count = 1
    found = list(fuzz([], seed=1, indices=range(1), seconds=0.5))
    assert [(outcome, detail) for _, outcome, detail in found] == [("HANG", "rewriting")]


@pytest.mark.parametrize(
    ("found", "noise", "outcome"),
    [(0.0, 0.0, "equal"), (1e-3, 0.0, "WRONG"), (1e-4, 5e-5, "equal"), (1e-2, 5e-5, "WRONG"),
     (0.5, 0.2, "inconsistent"), (float("nan"), 0.0, "WRONG")],
)  # fmt: skip
def test_logits_are_held_against_the_noise_of_the_mutant(found, noise, outcome):
    rows = np.zeros((1, 2, 3), np.float32)
    own = [[rows], [rows[:, :1], rows[:, 1:] + np.float32(noise)]]
    rewritten = [[rows + np.float32(found)], [row + np.float32(found) for row in own[1]]]
    assert compare(own, rewritten, 2e-5)[0] == outcome
