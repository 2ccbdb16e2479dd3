"""Every contender that can run here computes the same attention; the driver measures all of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import attention
from benchmarks.contender import SkippedError
from benchmarks.kvfuse_contenders import FORMATS, KvFuse, read_bytes
from benchmarks.measure import SETUP_COPIES, Limits, Result, measure
from benchmarks.workload import History, Mode, Shape, Workload, relative_error
from kvfuse.formats import PRESETS

TINY = Shape("tiny", 4, 2, 64)
HISTORY = History(TINY, 301)
# Relative error on unit normal data by what the cache holds. Floats err by roundings of 300 sums, bfloat16
# and ggml's f16 by half an ulp of 8 bits (2^-9 each for keys, values, weights), 8-bit codes by 1/127 of a
# row's largest element over sqrt(12), 4-bit codes by 18 times that: 0.17, with room for so short a history.
BOUNDS = {
    1e-5: ("ort_subgraph", "ort_attention", "ort_gqa_f32"),
    1e-2: ("openvino_bf16_bf16", "ggml_f16"),
    3e-2: ("kvfuse_int8", "ort_gqa_int8", "openvino_f32_u8", "openvino_bf16_u8", "ggml_q8_0"),
    0.3: (
        *("kvfuse_int4", "kvfuse_default", "kvfuse_int4_1thread", "kvfuse_default_1thread"),
        *("ort_gqa_int4", "openvino_f32_u4", "openvino_bf16_u4", "ggml_q4_0"),
    ),
}
ENTRIES = {entry.name: entry for entry in attention.ENTRIES}


@pytest.mark.parametrize(
    ("name", "bound", "mode"),
    [
        (name, bound, mode)
        for bound, names in BOUNDS.items()
        for name in names
        for mode in ENTRIES[name].modes
    ],
)
def test_contender_is_right(name: str, bound: float, mode: Mode) -> None:
    work = Workload.of(mode, HISTORY, 300, 1)
    try:
        contender = ENTRIES[name].make(work)
    except SkippedError as reason:
        pytest.skip(str(reason))
    contender.step()
    found = contender.output()
    contender.close()
    assert found is not None
    assert relative_error(found, work.right_answer()) < bound


def test_every_contender_is_checked_or_attends_to_nothing() -> None:
    checked = {name for names in BOUNDS.values() for name in names}
    assert set(ENTRIES) - checked == {"read_int4", "read_default", "ort_empty"}


def test_decode_of_kvfuse_grows_around_the_tokens_stated() -> None:
    work = Workload.of("decode", HISTORY, 300, 1, layers=2)
    contender = KvFuse(work, PRESETS["default"])
    for _ in range(2):  # every burst begins at the same place
        contender.prepare()
        lengths = []
        for _ in range(contender.burst * work.layers):
            contender.step()
            lengths.append(max(len(fork) for fork in contender.forks))
        assert (lengths[0], lengths[-1]) == (300 - 32 + 1, 300 + 32)
    assert [len(base) for base in contender.bases] == [300 - 34] * 2
    contender.close()


def test_bytes_of_a_step() -> None:
    assert read_bytes(FORMATS["kvfuse_int4"], TINY, 1000) == 1000 * 2 * 2 * (32 + 4)
    low_bit, exact = 1000 - 64 - 31 - 4, 64 + 31 + 4
    expected = low_bit * (2 * 2 * (32 + 4) + 2 * 2 * 64 / 64) + exact * 2 * 2 * 64 * 4
    assert read_bytes(FORMATS["kvfuse_default"], TINY, 1000) == expected


def test_groups_that_do_not_fit_run_apart_beside_the_base() -> None:
    base = [ENTRIES["kvfuse_int4"]]
    others = [ENTRIES[name] for name in ("ort_gqa_f32", "ort_gqa_int8", "ort_empty")]
    work = Workload.of("decode", HISTORY, 64, 1)
    least = base[0].memory(work) + int(SETUP_COPIES * work.float_bytes)
    memory = least + others[0].memory(work) + 1
    groups = measure(work, base, others, Limits(rounds=3, seconds=0, memory=memory))
    assert [list(group) for group in groups] == [["kvfuse_int4", other.name] for other in others]
    for group in groups:
        assert {len(result.microseconds) for result in group.values()} == {3}
    (nothing_fits,) = measure(work, base, others[:1], Limits(3, 0, least))
    assert isinstance(nothing_fits["ort_gqa_f32"], Result)
    assert nothing_fits["ort_gqa_f32"].skipped.startswith("needs about")


def test_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.json"
    arguments = (
        "--shapes C --tokens 64 --prompts 16 --threads 1 --rounds 3 --seconds 0 --contenders gqa_f32|read"
    )
    assert attention.main([*arguments.split(), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [item["mode"] for item in found["configurations"]] == ["decode", "prefill"]
    decode = found["configurations"][0]["groups"][0]
    assert list(decode) == ["kvfuse_int4", "kvfuse_default", "read_int4", "read_default", "ort_gqa_f32"]
    assert all(np.min(result["microseconds"]) > 0 for result in decode.values())
    assert "**decode, shape C (9/3, 64), 1 thread**" in capsys.readouterr().out
