"""Files: weights are referenced and not loaded, output is whole or absent, bad input is one sentence."""

import os
import stat
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decoder_graphs import decoder

import kvfuse


def save_external(model, path, location="weights.data"):
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def load(path):
    """Loads with onnx's own checks of external data (containment, hard links)."""
    return onnx.load(path)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in" / "model.onnx"
    path.parent.mkdir()
    save_external(decoder(layers=2), path)
    return path


def test_data_in_the_same_folder_is_referenced_in_place(source):
    before = (source.parent / "weights.data").stat()
    kvfuse.rewrite(source, source.with_name("out.onnx"))
    assert files(source.parent) == ["model.onnx", "out.onnx", "weights.data"]
    after = (source.parent / "weights.data").stat()
    assert (after.st_mtime_ns, after.st_ino, after.st_nlink) == (before.st_mtime_ns, before.st_ino, 1)
    load(source.with_name("out.onnx"))


def test_data_below_the_output_folder_is_referenced_in_place(source):
    kvfuse.rewrite(source, source.parent.parent / "out.onnx")
    assert files(source.parent.parent) == ["in/model.onnx", "in/weights.data", "out.onnx"]
    load(source.parent.parent / "out.onnx")


def test_data_elsewhere_is_copied_once(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    kvfuse.rewrite(source, out / "a.onnx")
    copied = (out / "weights.data").stat()
    kvfuse.rewrite(source, out / "b.onnx")
    assert files(out) == ["a.onnx", "b.onnx", "weights.data"]
    assert (out / "weights.data").stat().st_ino == copied.st_ino
    assert (out / "weights.data").read_bytes() == (source.parent / "weights.data").read_bytes()
    for path in (source, out / "a.onnx", out / "b.onnx"):
        load(path)


def test_another_models_data_is_not_overwritten(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "weights.data").write_bytes(b"someone else's")
    kvfuse.rewrite(source, out / "a.onnx")
    assert (out / "weights.data").read_bytes() == b"someone else's"
    assert files(out) == ["a.onnx", "a.onnx.weights.data", "weights.data"]
    load(out / "a.onnx")


def test_a_sparse_file_is_copied_with_its_holes(tmp_path):
    model = decoder()
    source = tmp_path / "in" / "model.onnx"
    source.parent.mkdir()
    save_external(model, source)
    data = source.parent / "weights.data"
    size = data.stat().st_size
    os.truncate(data, size + (1 << 30))
    out = tmp_path / "out"
    out.mkdir()
    kvfuse.rewrite(source, out / "a.onnx")
    copy = out / "weights.data"
    assert copy.stat().st_size == size + (1 << 30)
    with copy.open("rb") as copied, data.open("rb") as original:
        assert copied.read(size) == original.read(size)
    if data.stat().st_blocks * 512 < 1 << 29:  # the file system shows holes
        assert copy.stat().st_blocks * 512 < 1 << 29


def test_the_source_may_be_the_destination(source):
    report = kvfuse.rewrite(source, source)
    assert len(report.fused) == 2
    assert files(source.parent) == ["model.onnx", "weights.data"]
    assert kvfuse.rewrite(source, source).sites == ()


def test_nothing_to_fuse_copies_the_bytes(tmp_path):
    source = tmp_path / "model.onnx"
    onnx.save(decoder(repeat="tile_wrong"), source)
    report = kvfuse.rewrite(source, tmp_path / "out.onnx")
    assert report.fused == ()
    assert (tmp_path / "out.onnx").read_bytes() == source.read_bytes()


def test_dry_run_and_inspect_write_nothing(source):
    assert len(kvfuse.rewrite(source, source.with_name("out.onnx"), dry_run=True).fused) == 2
    assert len(kvfuse.inspect(source).fused) == 2
    assert files(source.parent) == ["model.onnx", "weights.data"]


def test_require_all_writes_nothing_when_something_is_refused(tmp_path):
    source = tmp_path / "model.onnx"
    onnx.save(decoder(repeat="tile_wrong"), source)
    with pytest.raises(kvfuse.RefusedError, match="does not compute"):
        kvfuse.rewrite(source, tmp_path / "out.onnx", require_all=True)
    assert files(tmp_path) == ["model.onnx"]


def test_require_all_needs_at_least_one_site(tmp_path):
    fused = kvfuse.rewrite(decoder()).model
    with pytest.raises(kvfuse.RefusedError, match="no attention with a growing KV cache"):
        kvfuse.rewrite(fused, require_all=True)


def test_models_in_memory_are_not_modified():
    proto = decoder()
    before = proto.SerializeToString(deterministic=True)
    report = kvfuse.rewrite(proto)
    assert isinstance(report.model, onnx.ModelProto)
    assert proto.SerializeToString(deterministic=True) == before
    model = ir.from_proto(proto)
    report = kvfuse.rewrite(model)
    assert isinstance(report.model, ir.Model)
    assert any(node.op_type == "QuantizedKvSdpa" for node in report.model.graph)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == ir.to_proto(
        ir.from_proto(proto)
    ).SerializeToString(deterministic=True)


def test_a_model_in_memory_can_be_written(tmp_path):
    report = kvfuse.rewrite(decoder(), tmp_path / "out.onnx")
    assert report.destination == str(tmp_path / "out.onnx")
    assert load(tmp_path / "out.onnx") == report.model


def test_a_path_needs_a_destination(source):
    with pytest.raises(kvfuse.ModelError, match="destination"):
        kvfuse.rewrite(source)


@pytest.mark.parametrize("content", [b"not a model at all", b"", b"\x08\x09\x12\xff\xff\xff"])
def test_a_file_that_is_no_model_is_one_sentence(tmp_path, content):
    source = tmp_path / "model.onnx"
    source.write_bytes(content)
    with pytest.raises(kvfuse.ModelError, match="expected an ONNX model") as raised:
        kvfuse.rewrite(source, tmp_path / "out.onnx")
    assert "\n" not in str(raised.value)
    assert files(tmp_path) == ["model.onnx"]


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9, 0.99])
def test_a_truncated_model_is_one_sentence(tmp_path, keep):
    source = tmp_path / "model.onnx"
    data = decoder().SerializeToString()
    source.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(kvfuse.ModelError, match=r"model\.onnx\] expected") as raised:
        kvfuse.rewrite(source, tmp_path / "out.onnx")
    assert "\n" not in str(raised.value)
    assert files(tmp_path) == ["model.onnx"]


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(kvfuse.ModelError, match="No such file"):
        kvfuse.rewrite(tmp_path / "absent.onnx", tmp_path / "out.onnx")


def test_missing_and_short_external_data_are_named(source):
    data = source.parent / "weights.data"
    size = data.stat().st_size
    os.truncate(data, size - 1)
    with pytest.raises(kvfuse.ModelError, match=rf"at least {size} bytes"):
        kvfuse.rewrite(source, source.with_name("out.onnx"))
    data.unlink()
    with pytest.raises(kvfuse.ModelError, match=r"weights\.data; found: No such file"):
        kvfuse.rewrite(source, source.with_name("out.onnx"))
    assert files(source.parent) == ["model.onnx"]


@pytest.mark.parametrize("location", ["../weights.data", "/etc/hostname"])
def test_external_data_outside_the_folder_is_refused(source, location):
    model = onnx.load(source, load_external_data=False)
    for tensor in model.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "location").value = location
    source.write_bytes(model.SerializeToString())
    with pytest.raises(kvfuse.ModelError, match="inside the model's folder"):
        kvfuse.rewrite(source, source.with_name("out.onnx"))


def test_an_unwritable_output_leaves_nothing_behind(source, tmp_path):
    (tmp_path / "folder.onnx").mkdir()
    for target in (tmp_path / "no" / "such" / "out.onnx", tmp_path / "folder.onnx"):
        with pytest.raises(kvfuse.ModelError, match="expected a writable place"):
            kvfuse.rewrite(source, target)
    assert files(tmp_path) == ["in/model.onnx", "in/weights.data"]


def test_a_failing_write_keeps_the_old_output(source, monkeypatch):
    target = source.with_name("out.onnx")
    target.write_bytes(b"old")

    def fail(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(kvfuse.ModelError, match="No space left"):
        kvfuse.rewrite(source, target)
    assert target.read_bytes() == b"old"
    assert files(source.parent) == ["model.onnx", "out.onnx", "weights.data"]


def test_the_mode_of_a_replaced_file_is_kept(source):
    target = source.with_name("out.onnx")
    target.write_bytes(b"old")
    target.chmod(0o640)
    kvfuse.rewrite(source, target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_big_weights_are_never_read(tmp_path, monkeypatch):
    """A weight of 1 GiB that only exists as a hole: neither its bytes nor its pages are touched."""
    model = decoder(touch=lambda b, names: b.output(b.op("MatMul", names["x"], "big"), "wide", None))
    source = tmp_path / "model.onnx"
    big = onnx.TensorProto(
        name="big", data_type=1, dims=[16, 1 << 24], data_location=onnx.TensorProto.EXTERNAL
    )
    for key, value in (("location", "big.data"), ("offset", "0"), ("length", str(1 << 30))):
        big.external_data.add(key=key, value=value)
    model.graph.initializer.append(big)
    source.write_bytes(model.SerializeToString())
    with (tmp_path / "big.data").open("wb") as file:
        file.truncate(1 << 30)

    def fail(self):
        raise AssertionError("external data was loaded")

    monkeypatch.setattr(ir.ExternalTensor, "_load", fail)
    assert len(kvfuse.rewrite(source, tmp_path / "out.onnx").fused) == 1


def test_small_external_constants_are_read_where_the_meaning_needs_them(source):
    # The scale and the mask's constants are external here too; without them nothing could be proven.
    assert len(kvfuse.inspect(source).fused) == 2
    assert np.isclose(kvfuse.inspect(source).fused[0].details["scale"], 8**-0.5)
