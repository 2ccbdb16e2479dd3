"""`kvfuse rewrite --format auto` on the command line."""

import json

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from kvfuse.cli import app
from models.tiny_decoder import build

IDS = np.random.default_rng(5).integers(0, 64, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("auto")
    onnx.save(build(), path / "in.onnx")
    np.save(path / "ids.npy", IDS)
    return path


def invoke(folder, *arguments):
    return CliRunner().invoke(app, ["rewrite", str(folder / "in.onnx"), *map(str, arguments)])


def test_the_choice_and_its_evidence_are_printed(folder):
    done = invoke(
        folder, "-o", folder / "out.onnx", "--format", "auto", "--target", "5%", "--probe", folder / "ids.npy"
    )
    assert done.exit_code == 0, done.output
    assert "key error" in done.output
    assert "the target of +5.00%" in " ".join(done.output.split())
    assert (folder / "out.onnx").is_file()


def test_json_has_it_all_and_dry_run_writes_nothing(folder):
    done = invoke(
        folder, "--dry-run", "--format", "auto", "--target", "0.05", "--probe", folder / "ids.npy", "--json"
    )
    assert done.exit_code == 0, done.output
    choice = json.loads(done.output)["choice"]
    assert choice["target"] == 0.05
    assert choice["met"] is True
    assert [layer["layer"] for layer in choice["layers"]] == ["0", "1"]
    assert choice["damage"]["expected_perplexity_increase"] <= 0.05


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--format", "auto", "--probe", "ids", "--target", "much"], "[target] expected a share such as 1%"),
        (["--target", "1%"], "[target] expected format 'auto' with it"),
        (["--format", "auto", "--target", "1%"], "[target] expected a probe to measure by"),
        (["--guard", "loud"], "[guard] expected one of warn, off"),
    ],
)
def test_bad_usage_is_one_sentence(folder, arguments, sentence):
    np.save(folder / "ids.npy", IDS)
    arguments = [str(folder / "ids.npy") if argument == "ids" else argument for argument in arguments]
    done = invoke(folder, "--dry-run", *arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())
    assert "Traceback" not in done.output
