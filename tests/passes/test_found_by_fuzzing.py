"""Mutants that once ended badly, by what was wrong with them."""

import onnx
import pytest
from decoder_graphs import decoder
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


def test_a_name_with_line_breaks_stays_one_sentence(tmp_path):
    """Damaged bytes may end up in a name."""
    model = decoder(repeat="tile_wrong")
    for node in model.graph.node:
        node.name = f"{node.name}\n\x12"
    (site,) = kvfuse.rewrite(model).sites
    assert site.reason.isprintable()
    assert "\\n" in site.node
    assert site.node.isprintable()


def test_an_output_that_nothing_makes_ends_in_one_sentence(tmp_path):
    source, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    model = decoder(layers=2)
    next(value for value in model.graph.output if value.name == "present.0.key").name = "no\nbody"
    onnx.save(model, source)
    with pytest.raises(kvfuse.ModelError, match=r"no\\nbody") as raised:
        kvfuse.rewrite(source, target)
    assert str(raised.value).isprintable()
    assert not target.exists()
