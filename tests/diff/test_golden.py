"""The command, its exit codes, and golden files."""

import json

import onnx
import pytest
from typer.testing import CliRunner

import kvfuse
from kvfuse.cli import app
from models.tiny_decoder import build


def command(*arguments):
    result = CliRunner().invoke(app, ["diff", *(str(argument) for argument in arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    onnx.save(build(), folder / "a.onnx")
    kvfuse.rewrite(folder / "a.onnx", folder / "b.onnx")
    kvfuse.rewrite(folder / "a.onnx", folder / "c.onnx", key_bits=8)
    return folder


@pytest.fixture
def pair(folder):
    return folder / "a.onnx", folder / "b.onnx"


def test_equal_files_exit_0(pair):
    done = command(pair[0], pair[0])
    assert (done.exit_code, done.stdout) == (0, "the graphs are equal\n")


def test_different_files_exit_1_and_name_both(pair):
    done = command(*pair)
    assert done.exit_code == 1
    head, body = done.stdout.split("\n@", 1)
    assert head == f"--- {pair[0]}\n+++ {pair[1]}"
    assert f"@{body}" == kvfuse.diff(*pair).text


def test_json_is_all_that_is_printed(pair):
    done = command(*pair, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == kvfuse.diff(*pair).to_dict()


@pytest.mark.parametrize("broken", ["missing.onnx", "text.onnx"])
def test_bad_input_exits_2(pair, broken, tmp_path):
    (tmp_path / "text.onnx").write_text("not a model")
    done = command(pair[0], tmp_path / broken)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert broken in done.stderr


def test_a_golden_file_is_written_and_then_passes(pair, tmp_path):
    golden = tmp_path / "model.diff"
    done = command(*pair, "--golden", golden, "--update")
    assert done.exit_code == 0
    assert "was written" in done.stdout
    assert golden.read_text(encoding="utf-8") == kvfuse.diff(*pair).text
    assert [path.name for path in tmp_path.iterdir()] == ["model.diff"]
    again = command(*pair, "--golden", golden)
    assert again.exit_code == 0
    assert "the difference is the one in" in again.stdout


def test_another_difference_fails_and_shows_what_changed(pair, folder, tmp_path):
    golden = tmp_path / "model.diff"
    command(*pair, "--golden", golden, "--update")
    before = golden.read_bytes()
    done = command(pair[0], folder / "c.onnx", "--golden", golden)
    assert done.exit_code == 1
    removed = [line for line in done.stdout.splitlines() if line.startswith("-+") and "key_bits=4" in line]
    added = [line for line in done.stdout.splitlines() if line.startswith("++") and "key_bits=8" in line]
    assert removed
    assert len(removed) == len(added)
    assert "run again with --update" in done.stdout
    assert golden.read_bytes() == before
    as_json = json.loads(command(pair[0], folder / "c.onnx", "--golden", golden, "--json").stdout)
    assert (as_json["passed"], as_json["updated"]) == (False, False)
    assert command(pair[0], folder / "c.onnx", "--golden", golden, "--update").exit_code == 0
    assert golden.read_text(encoding="utf-8") == kvfuse.diff(pair[0], folder / "c.onnx").text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--golden", "{folder}/missing"], "expected the file {folder}/missing, or --update to write it"),
        (["--golden", "{folder}"], "expected a text file at {folder}"),
        (
            ["--golden", "{folder}/no/such/folder", "--update"],
            "expected a text file at {folder}/no/such/folder",
        ),
        (["--update"], "expected --golden FILE with --update"),
    ],
)
def test_golden_mistakes_are_one_sentence(pair, tmp_path, arguments, sentence):
    done = command(*pair, *(argument.format(folder=tmp_path) for argument in arguments))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert sentence.format(folder=tmp_path) in done.stderr


def test_the_golden_text_says_nothing_about_paths_and_weights(pair, tmp_path):
    """Another seed is another checkpoint of the same model: the reviewed difference stays."""
    onnx.save(build(seed=7), tmp_path / "other.onnx")
    kvfuse.rewrite(tmp_path / "other.onnx", tmp_path / "rewritten.onnx")
    assert kvfuse.diff(tmp_path / "other.onnx", tmp_path / "rewritten.onnx").text == kvfuse.diff(*pair).text
