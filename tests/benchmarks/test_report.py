"""Tables and bars from raw numbers whose ratios are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.bars import BARS, Bar, kernel_level

SHAPE = {"name": "A", "num_heads": 16, "kv_num_heads": 8, "head_dim": 128}
MACHINE = {
    "processor": "p",
    "cores": 2,
    "kernel": "avx512_vnni",
    "l2_bytes": 1 << 20,
    "l3_bytes": 1 << 25,
    "versions": {"kvfuse": "1"},
}


def result(microseconds: list[float], cache_bytes: int | None = 1 << 22) -> dict[str, Any]:
    return {"microseconds": microseconds, "error": 0.1, "cache_bytes": cache_bytes, "skipped": ""}


def configuration(groups: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    fixed = {
        "mode": "decode",
        "shape": SHAPE,
        "tokens": 4096,
        "threads": 1,
        "layers": 1,
        "load": 0.0,
        "clock": "wall",
    }
    return fixed | changes | {"groups": groups}


def bar_row(text: str, base: str, label: str) -> list[str]:
    """The cells of a bar's row in the table for `base`."""
    table = text.split(f"**`{base}` against the bars**")[1].split("\n\n**")[0]
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratio_is_taken_within_a_round() -> None:
    """Both double in the second round: the ratio stays 12, whatever the medians of the times are."""
    item = configuration([{"kvfuse_int4": result([10, 20, 10]), "ort_gqa_f32": result([120, 240, 120])}])
    assert report.ratios(item, "ort_gqa_f32", "kvfuse_int4") == [12, 12, 12]


def test_ratio_is_taken_within_a_group() -> None:
    """The contender of the second group is compared with the base that ran beside it."""
    first = {"kvfuse_int4": result([10, 10])}
    second = {"kvfuse_int4": result([100, 100]), "ort_subgraph": result([500, 500])}
    assert report.ratios(configuration([first, second]), "ort_subgraph", "kvfuse_int4") == [5, 5]


def test_the_worst_configuration_decides() -> None:
    items = [
        configuration(
            [{base: result([10.0] * 3) for base in report.BASES} | {"ort_gqa_f32": result([time] * 3)}],
            tokens=tokens,
        )
        for tokens, time in ((1024, 130.0), (4096, 115.0), (256, 1.0))  # 256 is below the bar's range
    ]
    text = report.attention_tables({"machine": MACHINE, "configurations": items})
    found = bar_row(text, "kvfuse_int4", "decode: ORT GQA f32, shared")
    assert found[1:] == ["≥ 12", "11.5 [11.5–11.5]", "A, 4096", "13.0", "**miss**"]
    found = bar_row(text, "kvfuse_default", "decode: ORT GQA f32, shared")
    assert found[1:] == ["≥ 10", "11.5 [11.5–11.5]", "A, 4096", "13.0", "pass"]


def test_the_fastest_variant_of_a_contender_counts() -> None:
    group = {
        "kvfuse_int4": result([10.0]),
        "openvino_f32_u8": result([90.0]),
        "openvino_bf16_u8": result([50.0]),
    }
    text = report.attention_tables({"machine": MACHINE, "configurations": [configuration([group])]})
    assert bar_row(text, "kvfuse_int4", "decode: OpenVINO u8 (faster of f32, bf16)")[-1] == "**miss**"


@pytest.mark.parametrize(("size", "judged"), [(1 << 19, False), (1 << 21, True)])
def test_byte_limit_counts_outside_of_the_second_level_only(size: int, judged: bool) -> None:
    group = {"kvfuse_int4": result([12.0]), "read_int4": result([10.0], size)}
    text = report.attention_tables({"machine": MACHINE, "configurations": [configuration([group])]})
    assert ("byte limit" in text) == judged
    if judged:
        found = bar_row(text, "kvfuse_int4", "decode: byte limit (times it, at most)")
        assert found[1:] == ["≤ 1.3", "1.20 [1.20–1.20]", "A, 4096", "1.20", "pass"]


def test_bars_of_other_instruction_sets_are_not_judged() -> None:
    group = {"kvfuse_int4": result([10.0]), "ort_gqa_f32": result([55.0])}
    found = {"machine": MACHINE | {"kernel": "avx2"}, "configurations": [configuration([group])]}
    text = report.attention_tables(found)
    assert bar_row(text, "kvfuse_int4", "decode: ORT GQA f32, shared, AVX2 kernel")[-1] == "pass"
    assert "decode: ORT GQA f32, shared |" not in text


@pytest.mark.parametrize(
    ("kernel", "decode", "prefill"),
    [
        ("avx512_vnni", "avx512", "avx512"),
        ("amx", "avx512", "amx"),
        ("avx2", "avx2", "avx2"),
        ("avx_vnni", "avx2", "avx2"),
        ("neon_dotprod", "neon_dotprod", "neon_dotprod"),
    ],
)
def test_instruction_set_of_a_kernel(kernel: str, decode: str, prefill: str) -> None:
    assert kernel_level({"kernel": kernel}, "decode") == decode
    assert kernel_level({"kernel": kernel}, "prefill") == prefill


def test_preset_may_cost_a_fifth_more() -> None:
    bar: Bar = next(bar for bar in BARS if bar.inverse)
    assert bar.target("kvfuse_default") == pytest.approx(1.56)
    assert next(bar for bar in BARS if bar.least == 30).target("kvfuse_default") == pytest.approx(25)


def test_fastest_rounds_only() -> None:
    item = configuration([{"kvfuse_int4": result([20, 10, 30]), "ort_gqa_f32": result([100, 300, 90])}])
    found = report.fastest({"configurations": [item]})["configurations"][0]
    assert report.ratios(found, "ort_gqa_f32", "kvfuse_int4") == [9]
    assert len(item["groups"][0]["kvfuse_int4"]["microseconds"]) == 3


def test_skipped_contender_says_why() -> None:
    skipped = {"microseconds": [], "error": None, "cache_bytes": None, "skipped": "no such thing"}
    item = configuration([{"kvfuse_int4": result([1.0]), "ggml_f16": skipped}])
    assert "no such thing" in report.configuration_text(item)
    assert "| ggml_f16 | – |" in report.attention_tables({"machine": MACHINE, "configurations": [item]})


def test_tables_replace_what_stands_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- measured: memory -->\nold\n<!-- end of memory -->\nb\n", encoding="utf-8")
    for table in ("new\n", "newer\n"):
        report.write(page, "memory", table)
    expected = "a\n<!-- measured: memory -->\nnewer\n<!-- end of memory -->\nb\n"
    assert page.read_text(encoding="utf-8") == expected
    with pytest.raises(ValueError, match=r"expected the marks of 'stages'; found none"):
        report.write(page, "stages", "new\n")


def test_the_page_has_a_place_for_every_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for kind in report.TABLES:
        assert f"<!-- measured: {kind} -->\n" in text
        assert f"<!-- end of {kind} -->\n" in text
