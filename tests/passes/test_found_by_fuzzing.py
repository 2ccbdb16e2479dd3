"""Mutants that once ended in a traceback, by what was wrong with them."""

import onnx
import pytest
from merged_graphs import merged

import kvfuse


@pytest.mark.parametrize("condition", ["past.0.decoder.key", "input_ids"])
def test_an_if_that_is_chosen_by_something_else_than_a_flag_is_refused(condition, tmp_path):
    """A cache would be gone from the rewritten model, and with it the choice."""
    model = merged(condition=lambda b: condition)
    source, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    report = kvfuse.rewrite(source, target)
    assert report.fused == ()
    assert "expected one If on a graph input" in report.refused[0].reason
    assert target.read_bytes() == source.read_bytes()
