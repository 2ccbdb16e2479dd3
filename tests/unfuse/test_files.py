"""Files: what is read, referenced, replaced and refused."""

import json
import os
import shutil

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import kvfuse
from kvfuse.cli import app
from models.tiny_decoder import build


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose weights are in a file beside it, and the same rewritten."""
    folder = tmp_path_factory.mktemp("models")
    path = folder / "original.onnx"
    onnx.save(build(), path, save_as_external_data=True, location="weights.data", size_threshold=64)
    assert len(kvfuse.rewrite(path, folder / "rewritten.onnx").fused) == 2
    return folder


@pytest.fixture
def rewritten(folder, tmp_path):
    for file in folder.iterdir():
        shutil.copy2(file, tmp_path)
    return tmp_path / "rewritten.onnx"


@pytest.fixture
def original(rewritten):
    return rewritten.with_name("original.onnx")


@pytest.fixture(scope="module")
def in_memory():
    return kvfuse.rewrite(build()).model


def with_record(path, change):
    """Edits the metadata of a rewritten file."""
    model = onnx.load(path, load_external_data=False)
    entry = next(entry for entry in model.metadata_props if entry.key == "kvfuse")
    record = json.loads(entry.value)
    changed = change(record)
    entry.value = json.dumps(record) if changed is None else changed
    onnx.save(model, path)


def test_external_data_is_referenced_and_never_read(original, rewritten, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("external data was loaded")

    before = rewritten.read_bytes()
    monkeypatch.setattr(ir.ExternalTensor, "numpy", refuse)
    monkeypatch.setattr(ir.ExternalTensor, "tobytes", refuse)
    kvfuse.unfuse(rewritten, tmp_path / "restored.onnx")
    assert rewritten.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [
        "original.onnx",
        "restored.onnx",
        "rewritten.onnx",
        "weights.data",
    ]
    onnx.checker.check_model(tmp_path / "restored.onnx")


def test_the_same_bytes_every_time(rewritten, tmp_path):
    kvfuse.unfuse(rewritten, tmp_path / "one.onnx")
    kvfuse.unfuse(rewritten, tmp_path / "two.onnx")
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()


def test_the_command_reports_and_replaces_only_when_told(rewritten, tmp_path):
    out = tmp_path / "restored.onnx"
    done = command("unfuse", rewritten, "-o", out, "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["layers"] == ["0", "1"]
    assert found["inputs"] == [
        f"past_key_values.{layer}.{side}" for layer in "01" for side in ("key", "value")
    ]
    assert found["outputs"] == [f"present.{layer}.{side}" for layer in "01" for side in ("key", "value")]
    again = command("unfuse", rewritten, "-o", out)
    assert (again.exit_code, again.stdout) == (2, "")
    assert "expected a path that is free, or --force" in again.stderr
    in_place = command("unfuse", rewritten, "-o", rewritten, "--force")
    assert in_place.exit_code == 0
    assert "2 layers have float caches again: 4 inputs, 4 outputs" in in_place.stdout
    assert rewritten.read_bytes() == out.read_bytes()


def test_what_kvfuse_did_not_write_is_refused(original, rewritten, tmp_path):
    kvfuse.unfuse(rewritten, tmp_path / "restored.onnx")
    for source in (original, tmp_path / "restored.onnx"):
        done = command("unfuse", source, "-o", tmp_path / "out.onnx")
        assert done.exit_code == 2
        assert done.stderr.count("\n") == 1
        assert "expected a model that kvfuse rewrote; found no metadata 'kvfuse' in it" in done.stderr
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda record: "no JSON", "expected metadata 'kvfuse' as a rewriting writes it"),
        (lambda record: "[]", "expected metadata 'kvfuse' as a rewriting writes it"),
        (lambda record: record.pop("caches") and None, "expected metadata 'kvfuse' as a rewriting writes it"),
        (lambda record: record["caches"].pop() and None, "expected metadata of layer '1' of QuantizedKvSdpa"),
        (lambda record: record["caches"][0].update(key_layout="BHSX"), "the layout 'BHSX'"),
        (lambda record: record["caches"][0].update(dtype="decimal"), "DECIMAL"),
        (
            lambda record: record["dropped"]["past_key_values.0.key"].update(shape=["batch", 2, 16, 16]),
            "expected caches that grow; found past_key_values.0.key with the fixed length 16",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_one_sentence(rewritten, tmp_path, change, sentence):
    with_record(rewritten, change)
    with pytest.raises(kvfuse.ModelError) as error:
        kvfuse.unfuse(rewritten, tmp_path / "out.onnx")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.onnx").exists()


def test_a_record_without_the_interface_still_gives_a_model_that_runs(original, rewritten, tmp_path):
    def forget(record):
        for key in ("inputs", "outputs", "dropped"):
            del record[key]

    with_record(rewritten, forget)
    report = kvfuse.unfuse(rewritten, tmp_path / "restored.onnx")
    model = onnx.load(tmp_path / "restored.onnx")
    names = [value.name for value in model.graph.input]
    assert names == ["input_ids", "attention_mask", "position_ids", *report.inputs]
    shape = model.graph.input[3].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in shape] == ["batch_size", 2, "past_sequence_length", 16]
    onnx.checker.check_model(model, full_check=True)


def test_models_in_memory_are_not_modified(in_memory):
    model = in_memory
    before = model.SerializeToString(deterministic=True)
    report = kvfuse.unfuse(model)
    assert isinstance(report.model, onnx.ModelProto)
    assert model.SerializeToString(deterministic=True) == before
    as_ir = kvfuse.unfuse(ir.from_proto(model))
    assert isinstance(as_ir.model, ir.Model)
    assert kvfuse.diff(as_ir.model, report.model).equal


def test_a_file_needs_a_destination(rewritten):
    with pytest.raises(kvfuse.ModelError, match="expected a destination path"):
        kvfuse.unfuse(rewritten)


def test_an_inner_value_with_a_caches_name_gives_way(in_memory):
    model = onnx.ModelProto()
    model.CopyFrom(in_memory)
    renamed = model.graph.node[3].output[0]
    for node in model.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == renamed:
                    names[place] = "present.0.key"
    restored = kvfuse.unfuse(model).model
    onnx.checker.check_model(restored, full_check=True)
    assert kvfuse.diff(restored, kvfuse.unfuse(in_memory).model).equal


def test_a_copy_of_a_present_comes_back_as_well():
    model = build()
    model.graph.node.append(onnx.helper.make_node("Identity", ["present.1.key"], ["copy"]))
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(next(value for value in model.graph.output if value.name == "present.1.key"))
    copy.name = "copy"
    model.graph.output.append(copy)
    report = kvfuse.rewrite(model)
    assert len(report.fused) == 2
    restored = kvfuse.unfuse(report.model).model
    assert [value.name for value in restored.graph.output] == [value.name for value in model.graph.output]
    onnx.checker.check_model(restored, full_check=True)


def test_metadata_and_domain_of_others_stay():
    model = build()
    entry = model.metadata_props.add()
    entry.key, entry.value = "owner", "someone"
    restored = kvfuse.unfuse(kvfuse.rewrite(model).model).model
    assert [(entry.key, entry.value) for entry in restored.metadata_props] == [("owner", "someone")]
    assert [opset.domain for opset in restored.opset_import] == [opset.domain for opset in model.opset_import]
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for tensor in restored.graph.initializer:
        if tensor.name in weights:
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), weights[tensor.name])
