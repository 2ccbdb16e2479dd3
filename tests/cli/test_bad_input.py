"""Every bad file, path and option ends in one sentence, the right exit code, and no output."""

import os
import sys

import onnx
import pytest
from onnx.external_data_helper import convert_model_to_external_data

import kvfuse
from models.tiny_decoder import build


@pytest.fixture
def garbage(tmp_path):
    path = tmp_path / "garbage.onnx"
    path.write_bytes(b"this is not an ONNX model, whatever its name says\n" * 50)
    return path


@pytest.fixture
def truncated(tmp_path, original):
    path = tmp_path / "truncated.onnx"
    content = original.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


@pytest.fixture
def without_data(tmp_path):
    path = tmp_path / "without_data.onnx"
    model = build()
    convert_model_to_external_data(model, location="weights.bin", size_threshold=0)
    onnx.save(model, path)
    (tmp_path / "weights.bin").unlink()
    return path


@pytest.fixture
def missing(tmp_path):
    return tmp_path / "missing.onnx"


@pytest.fixture
def empty(tmp_path):
    path = tmp_path / "empty.onnx"
    path.write_bytes(b"")
    return path


BAD_FILES = ("garbage", "truncated", "without_data", "missing", "empty")


@pytest.fixture
def bad_file(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("bad_file", BAD_FILES, indirect=True)
def test_a_bad_model_is_not_rewritten(run, bad_file, tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    out = tmp_path / "deep" / "out.onnx"
    out.parent.mkdir()
    result = run("rewrite", bad_file, "-o", out)
    assert result.code == 2
    assert bad_file.stem in result.sentence or "weights.bin" in result.sentence
    assert list(out.parent.iterdir()) == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("bad_file", BAD_FILES, indirect=True)
def test_a_bad_model_raises_a_kvfuse_error_in_python(bad_file, tmp_path):
    with pytest.raises(kvfuse.ModelError):
        kvfuse.rewrite(bad_file, tmp_path / "out.onnx")


@pytest.mark.parametrize("bad_file", ["garbage", "truncated", "missing", "empty"], indirect=True)
def test_a_bad_model_is_not_inspected(run, bad_file):
    result = run("inspect", bad_file, "--json")
    assert result.code == 2
    assert bad_file.stem in result.sentence


@pytest.mark.parametrize("bad_file", BAD_FILES, indirect=True)
@pytest.mark.parametrize("bad_side", ["original", "rewritten"])
def test_a_bad_model_is_not_verified(run, bad_file, bad_side, original, exact):
    pair = (bad_file, exact) if bad_side == "original" else (original, bad_file)
    result = run("verify", *pair, "--prompt-length", 3, "--tokens", 2)
    assert result.code == 2
    assert bad_file.stem in result.sentence


@pytest.mark.parametrize("bad_file", BAD_FILES, indirect=True)
def test_a_bad_model_does_not_generate(run, bad_file):
    result = run("generate", bad_file, "1 2", "--token-ids", "--json")
    assert result.code == 2
    assert bad_file.stem in result.sentence


def test_an_output_in_no_folder_is_refused(run, original, tmp_path):
    result = run("rewrite", original, "-o", tmp_path / "nowhere" / "out.onnx")
    assert result.code == 2
    assert "nowhere" in result.sentence
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_a_folder_is_refused(run, original, tmp_path):
    result = run("rewrite", original, "-o", tmp_path, "--force")
    assert result.code == 2
    assert str(tmp_path) in result.sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root writes where nobody else may")
def test_an_output_in_a_read_only_folder_is_refused(run, original, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    result = run("rewrite", original, "-o", locked / "out.onnx")
    assert result.code == 2
    assert "locked" in result.sentence
    assert list(locked.iterdir()) == []


def test_an_output_below_a_file_is_refused(run, original, tmp_path):
    """An output nobody can write, root included."""
    (tmp_path / "file").write_bytes(b"kept")
    result = run("rewrite", original, "-o", tmp_path / "file" / "out.onnx")
    assert result.code == 2
    assert "out.onnx" in result.sentence
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_an_existing_output_needs_force(run, original, tmp_path):
    out = tmp_path / "out.onnx"
    out.write_bytes(b"precious")
    result = run("rewrite", original, "-o", out)
    assert result.code == 2
    assert "--force" in result.sentence
    assert out.read_bytes() == b"precious"
    assert run("rewrite", original, "-o", out, "--force").code == 0
    assert onnx.load(out).graph.node


def test_a_failed_rewrite_leaves_the_old_output(run, garbage, tmp_path):
    out = tmp_path / "out.onnx"
    out.write_bytes(b"precious")
    assert run("rewrite", garbage, "-o", out, "--force").code == 2
    assert out.read_bytes() == b"precious"


def test_the_input_is_replaced_by_force_only(run, original, tmp_path):
    model = tmp_path / "model.onnx"
    model.write_bytes(original.read_bytes())
    result = run("rewrite", model, "-o", model)
    assert result.code == 2
    assert "--force" in result.sentence
    assert model.read_bytes() == original.read_bytes()
    assert run("rewrite", model, "-o", model, "--force").code == 0
    assert "QuantizedKvSdpa" in {node.op_type for node in onnx.load(model).graph.node}
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_no_output_is_a_usage_error(run, original):
    result = run("rewrite", original)
    assert result.code == 2
    assert "--dry-run" in result.sentence


def test_no_site_is_reported_and_fails_only_on_demand(run, siteless, tmp_path):
    result = run("rewrite", siteless, "-o", tmp_path / "out.onnx", "--json")
    assert result.code == 0
    assert result.json["sites"] == []
    strict = run("rewrite", siteless, "-o", tmp_path / "strict.onnx", "--require-all")
    assert strict.code == 1
    assert strict.out == "no attention with a growing KV cache found\n"
    assert strict.err == (
        f"kvfuse: [{siteless}] expected every cache site to be fused; found: "
        "no attention with a growing KV cache found\n"
    )
    assert not (tmp_path / "strict.onnx").exists()


def test_a_refused_site_fails_only_on_demand(run, mixed, tmp_path):
    result = run("rewrite", mixed, "-o", tmp_path / "out.onnx", "--json")
    assert result.code == 0
    assert sorted(site["outcome"] for site in result.json["sites"]) == ["fused", "refused"]
    strict = run("rewrite", mixed, "-o", tmp_path / "strict.onnx", "--require-all", "--json")
    assert strict.code == 1
    assert "expected every cache site to be fused; found: cache data of past_key_values.1.key" in strict.err
    assert strict.err.count("\n") == 1
    assert [site["outcome"] for site in strict.json["sites"]] == ["fused", "refused"]
    assert strict.json["destination"] is None
    assert not (tmp_path / "strict.onnx").exists()
    table = run("rewrite", mixed, "--dry-run", "--require-all")
    assert (table.code, table.err.count("\n")) == (1, 1)
    assert "1 of 2 cache sites fused" in table.out


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--format", "nonsense"),
        ("--key-bits", 5),
        ("--value-bits", 0),
        ("--codes", "nonsense"),
        ("--group-size", 7),
        ("--rotation", "nonsense"),
        ("--n-recent", -1),
        ("--block", 0),
        ("--n-sink", -1),
        ("--key-center", "nonsense"),
    ],
)
def test_an_unknown_option_value_is_named(run, original, tmp_path, option, value):
    result = run("rewrite", original, "-o", tmp_path / "out.onnx", option, value)
    assert result.code == 2
    assert option.strip("-").replace("-", "_") in result.sentence.replace("-", "_")
    assert str(value) in result.sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [("rewrit",), ("rewrite", "in.onnx", "--key-bits", "four"), ("verify", "one")]
)
def test_usage_errors_exit_with_2(run, arguments):
    result = run(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert "Traceback" not in result.err


def test_generate_needs_a_tokenizer_for_text(run, exact, tmp_path):
    model = tmp_path / "model.onnx"
    model.write_bytes(exact.read_bytes())
    result = run("generate", model, "hello")
    assert result.code == 2
    assert "[tokenizer] expected" in result.sentence


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("1 two 3", "'1 two 3'"), ("", "found none"), ("1 64", "indices"), ("-65", "indices")],
)
def test_generate_refuses_bad_token_ids(run, exact, prompt, found):
    result = run("generate", exact, "--token-ids", "--json", "--", prompt)
    assert result.code == 2
    assert found in result.sentence


def test_a_model_that_is_no_decoder_does_not_generate(run, siteless):
    result = run("generate", siteless, "1 2", "--token-ids")
    assert result.code == 2
    assert "[decoder] expected" in result.sentence


def test_another_models_rewrite_is_no_rewrite_of_this_one(run, original, exact, tmp_path):
    onnx.save(build(vocab_size=48), tmp_path / "other.onnx")
    assert run("rewrite", tmp_path / "other.onnx", "-o", tmp_path / "out.onnx").code == 0
    result = run("verify", original, tmp_path / "out.onnx", "--prompt-length", 3, "--tokens", 2)
    assert result.code == 2
    assert result.sentence
