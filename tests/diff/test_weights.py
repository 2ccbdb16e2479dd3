"""Weights: told by name, type and hash; external data is read only where its place does not settle it."""

import onnx
import pytest

import kvfuse
import kvfuse.diff_sections
from models.tiny_decoder import build


def save(model, path, data):
    onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=64)


@pytest.fixture
def models(tmp_path):
    """A model, and another that refers to the very same data."""
    save(build(), tmp_path / "a.onnx", "weights")
    model = onnx.load(tmp_path / "a.onnx", load_external_data=False)
    model.graph.node[5].name = "changed"
    onnx.save(model, tmp_path / "b.onnx")
    return tmp_path / "a.onnx", tmp_path / "b.onnx"


@pytest.fixture
def reads(monkeypatch):
    """The names of the tensors that are read."""
    names = []
    original = kvfuse.diff_sections.pieces

    def pieces(tensor):
        names.append(tensor.name)
        return original(tensor)

    monkeypatch.setattr("kvfuse.diff_sections.pieces", pieces)
    monkeypatch.setattr("kvfuse.text.pieces", pieces)
    return names


def external(path):
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    return {tensor.name for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL}


def test_the_same_place_is_not_read(models, reads):
    assert kvfuse.diff(*models).equal
    assert external(models[0])
    assert not external(models[0]) & set(reads)


def test_a_copy_elsewhere_is_read_and_equal(models, reads, tmp_path):
    (tmp_path / "other").mkdir()
    save(build(), tmp_path / "other" / "a.onnx", "elsewhere")
    assert kvfuse.diff(models[0], tmp_path / "other" / "a.onnx").equal
    assert external(models[0]) <= set(reads)


def test_one_changed_byte_is_found_and_shown_by_hash(models, tmp_path):
    (tmp_path / "other").mkdir()
    save(build(), tmp_path / "other" / "a.onnx", "weights")
    data = bytearray((tmp_path / "other" / "weights").read_bytes())
    data[-1] ^= 1
    (tmp_path / "other" / "weights").write_bytes(data)
    found = kvfuse.diff(models[0], tmp_path / "other" / "a.onnx")
    (section,) = found.sections
    assert section.title == "initializers"
    lines = [text for hunk in section.hunks for _, text in hunk.lines]
    assert len(lines) == 2
    assert lines[0].split("#")[0] == lines[1].split("#")[0]
    assert lines[0] != lines[1]


def test_external_data_in_one_model_only_is_told_by_its_place(models, reads):
    model = onnx.load(models[1], load_external_data=False)
    extra = onnx.TensorProto()
    extra.CopyFrom(next(t for t in model.graph.initializer if t.name in external(models[0])))
    extra.name = "another"
    model.graph.initializer.append(extra)
    onnx.save(model, models[1])
    text = kvfuse.diff(*models).text
    assert "+ @another: f32[" in text
    assert "] in weights at " in text
    assert "another" not in reads
