"""Graph cases as text: before → after, or before → refused; `pytest --update-goldens` rewrites the latter."""

import shutil
from pathlib import Path

import graph_cases
import pytest
from graph_cases import CASES, SUFFIX, assert_equal_runs, load, outcome, paths

import kvfuse
from tools import forms_table

# Larger than any run here: everything is exact.
EXACT = 4096


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", paths(), ids=name)
def test_case(path, update_goldens):
    check(path, update_goldens)


def check(path, update_goldens=False):
    case = load(path)
    model = case.model()
    before = model.SerializeToString(deterministic=True)
    report = kvfuse.rewrite(model, n_recent=EXACT)
    found = outcome(report)
    assert model.SerializeToString(deterministic=True) == before
    if report.fused:
        assert report.refused == ()
        assert_equal_runs(model, report.model)
        if path.parent.name in forms_table.patterns():
            assert {site.pattern for site in report.fused} == {path.parent.name}
    else:
        assert report.model.SerializeToString(deterministic=True) == before
    assert bool(report.fused) != path.stem.startswith("refused_"), found
    if update_goldens:
        if found != case.golden:
            case.write(found)
        return
    assert case.golden, "the case has no AFTER or REFUSED part: run pytest --update-goldens and review it"
    assert found == case.golden


def test_every_file_is_a_case_in_a_folder_that_is_a_source_form():
    strays = [path for path in CASES.rglob("*") if path.is_file() and path not in paths()]
    assert strays == []
    assert {path.parent.name for path in paths()} == set(forms_table.forms())


def test_every_form_has_a_case_that_is_fused_and_one_that_is_refused():
    cases = [load(path) for path in paths()]
    for form in forms_table.forms():
        assert {case.accepted for case in cases if case.path.parent.name == form} == {True, False}


@pytest.fixture
def copy(tmp_path):
    """A case of a fused graph, where it can be changed."""
    folder = tmp_path / "concat_attention"
    folder.mkdir()
    return Path(shutil.copy(CASES / "concat_attention" / f"no_mask{SUFFIX}", folder))


def test_a_golden_that_is_missing_or_stale_fails_until_it_is_updated(copy):
    good = copy.read_text()
    head, after = good.split("# AFTER\n")
    for stale in ("", "# REFUSED: it is no attention\n", f"# AFTER\n{after.replace('causal=0', 'causal=1')}"):
        copy.write_text(head + stale)
        with pytest.raises(AssertionError):
            check(copy)
        check(copy, update_goldens=True)
        assert copy.read_text() == good


def test_a_second_before_is_no_case(copy):
    copy.write_text(copy.read_text().replace("# BEFORE\n", "# BEFORE\n# BEFORE\n"))
    with pytest.raises(ValueError, match="expected a title"):
        load(copy)


def test_a_difference_in_the_numbers_fails(copy):
    model = load(copy).model()
    fused = kvfuse.rewrite(model, n_recent=EXACT).model
    graph_cases.assert_equal_runs(model, fused)
    op = next(node for node in fused.graph.node if node.op_type == "QuantizedKvSdpa")
    next(attribute for attribute in op.attribute if attribute.name == "causal").i = 1
    with pytest.raises(AssertionError, match="behind 0 tokens"):
        graph_cases.assert_equal_runs(model, fused)
