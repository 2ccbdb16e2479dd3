"""The other measurements: what they compute beside the clock, and that they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import decoding, memory, plot, report, stages, visible_keys
from benchmarks.kvfuse_contenders import FORMATS
from benchmarks.workload import Shape
from kvfuse.decoder import open_decoder
from models.tiny_decoder import build

TINY = Shape("tiny", 4, 2, 64)


@pytest.mark.parametrize("share", visible_keys.SHARES)
def test_window_leaves_its_share_of_the_pairs(share: float) -> None:
    """To 1 %: the formula is that of the continuous triangle."""
    window = visible_keys.window_of(4096, share)
    pairs = visible_keys.visible_pairs(4096, 0, window) / visible_keys.visible_pairs(4096, 0, -1)
    assert pairs == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("window", [-1, 0, 3, 100])
@pytest.mark.parametrize("past", [0, 2, 50])
def test_visible_pairs_by_counting(past: int, window: int) -> None:
    positions, keys = np.arange(past, past + 20)[:, np.newaxis], np.arange(past + 20)
    visible = (keys <= positions) & (keys >= positions - (window if window >= 0 else 1000))
    assert visible_keys.visible_pairs(20, past, window) == visible.sum()


def test_memory_rows_agree_with_the_formula() -> None:
    (row,) = memory.rows_of(FORMATS["kvfuse_int4"], TINY, [4096])
    assert row["formula, MiB"] == 4096 * 2 * 2 * (32 + 4) / 2**20
    assert row["held, MiB"] == pytest.approx(row["formula, MiB"], rel=0.02)


def test_stages_add_up_to_the_step() -> None:
    profiled = {1024: {"step": 10.0, "call": 8.0, "one": 3.0, "two": 4.0}}
    rows = stages.table(profiled, {1024: {"step": 9.0}})
    cells = {row["stage, µs a step"]: row["T = 1,024"] for row in rows}
    assert cells == {
        "one": "3.00 (30 %)",
        "two": "4.00 (40 %)",
        "rest of the op": "1.00 (10 %)",
        "onnxruntime": "2.00 (20 %)",
        "whole step, counted": "10.0 (100 %)",
        "whole step, not counted": "9.00",
    }


def test_stages_are_counted_in_a_process_that_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for profile, names in (("1", {"step", "call", "encode"}), ("0", {"step"})):
        monkeypatch.setenv("KVFUSE_PROFILE", profile)
        script = Path(stages.__file__)
        found = decoding.run_in_process(script, "--child", "64", "--shape", "C", "--bursts", "2")
        assert set(found) == set(FORMATS)
        for measured in found.values():
            assert names <= set(measured)
            assert len(measured) == 1 or profile == "1"
            assert measured["step"] > measured.get("call", 0)


def test_decoding_is_timed_after_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(build().SerializeToString())
    decoder = open_decoder(path)
    run = decoding.time_decoding(decoder, [1, 2, 3], steps=4, bursts=2)
    assert run.context == 3
    assert len(run.tokens_per_second) == 2
    assert decoder.length == 3 + 1 + 2 * 4
    assert run.peak_bytes > 10 << 20


def end_to_end() -> dict[str, Any]:
    def run(context: int, speed: float) -> dict[str, Any]:
        return {
            "context": context,
            "tokens_per_second": [speed, speed, 2 * speed],
            "prefill_seconds": 1.0,
            "peak_bytes": 1 << 20,
            "cache_bytes": context << 10,
        }

    variants = {"original": 10.0, "default": 25.0, "int4": 30.0}
    runs = {name: [run(64, speed), run(2048, speed)] for name, speed in variants.items()}
    machine = {
        "processor": "p",
        "cores": 1,
        "kernel": "k",
        "l2_bytes": 0,
        "l3_bytes": 0,
        "versions": {"kvfuse": "1"},
    }
    model = {"title": "Model", "has_bars": True, "steps": 1, "threads": 0, "variants": runs}
    return {"kind": "end_to_end", "machine": machine, "models": [model]}


def test_whole_models_are_compared_by_medians() -> None:
    text = report.end_to_end_tables(end_to_end())
    assert "| tokens/s, default | 25.0 [25.0–37.5] × 2.50 | 25.0 [25.0–37.5] × 2.50 |" in text
    assert "| bar for the ratio | ≥ 0.95 | ≥ 2 |" in text


def test_picture_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    numbers = tmp_path / "numbers.json"
    numbers.write_text(json.dumps(end_to_end()))
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        assert plot.main([str(numbers), str(picture)]) == 0
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert "kvfuse, default" in pictures[0].read_text()
