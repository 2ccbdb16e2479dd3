"""The lists and tables of `make quality`, without running a model."""

from pathlib import Path

from benchmarks import quality_tables
from benchmarks.quality_variants import ABLATIONS, CHOSEN, FLOAT_QUERIES, PRESET_VARIANTS, WITH_EXTRAS
from kvfuse.formats import PRESETS, make_format

PAGE = Path(__file__).parents[2] / "docs" / "quality.md"
FIGURES = {
    "name": "x", "kind": "preset", "bits_per_element": 4.625, "change": 0.0043, "change_se": 0.0015,
    "kl": 0.0025, "kl_se": 0.0002, "kl_p99": 0.0242, "top1": 0.9751,
}  # fmt: skip


def test_every_variant_is_a_format_of_its_own():
    variants = [*PRESET_VARIANTS, *ABLATIONS, *FLOAT_QUERIES]
    formats = [make_format(variant.preset, variant.overrides) for variant in variants]
    assert {variant.name for variant in PRESET_VARIANTS} == set(PRESETS)
    for variant, chosen in zip(variants, formats, strict=True):
        if variant in ABLATIONS and not variant.environment:
            assert chosen != PRESETS["default"], variant.name
    slugs = [variant.slug for variant in [*variants, CHOSEN]]
    assert len(set(slugs)) == len(slugs)
    assert set(WITH_EXTRAS) <= {variant.name for variant in [*variants, CHOSEN]}


def test_a_line_says_what_was_measured():
    assert quality_tables.line(FIGURES) == "| x | 4.625 | +0.43 ± 0.15 | 0.00250 ± 0.00020 | 0.0242 | 97.51 |"
    alone = FIGURES | {"change_se": None, "kl_se": None}
    assert quality_tables.line(alone) == "| x | 4.625 | +0.43 | 0.00250 | 0.0242 | 97.51 |"


def test_blocks_are_replaced_between_their_markers():
    text = "a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\n"
    changed = quality_tables.replace_block(text, "two", "new \\1")
    assert changed == "a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\nnew \\1\n<!-- end -->\n"
    assert quality_tables.replace_block(changed, "one", "x").count("old") == 0
    assert quality_tables.replace_block(text, "three", "x") == text


def test_the_page_has_room_for_the_tables():
    page = PAGE.read_text(encoding="utf-8")
    for setting in ("smollm2-512", "smollm2-4096", "gemma3-512", "gemma3-4096"):
        assert f"<!-- {setting} formats -->" in page
