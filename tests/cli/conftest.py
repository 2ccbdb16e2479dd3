import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
from typer.testing import CliRunner

from kvfuse.cli import app
from models.tiny_decoder import build


@dataclass
class Run:
    """One finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The error, which must be one line on stderr with nothing on stdout."""
        assert self.out == ""
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("kvfuse: ")
        return self.err.removeprefix("kvfuse: ").rstrip("\n")


def run(*arguments: object) -> Run:
    """Runs `kvfuse` in this process; whatever it does not report itself is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Run(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(name="run")
def run_fixture():
    return run


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def original(folder) -> Path:
    """A tiny decoder with its caches as graph inputs and outputs."""
    path = folder / "tiny.onnx"
    onnx.save(build(), path)
    return path


@pytest.fixture(scope="session")
def exact(original, folder) -> Path:
    """The same decoder, rewritten by the command in exact mode."""
    path = folder / "exact.onnx"
    assert run("rewrite", original, "-o", path, "--n-recent", 4096).code == 0
    return path


@pytest.fixture(scope="session")
def mixed(folder) -> Path:
    """A decoder of which one layer is refused: something else reads its cache."""
    path = folder / "mixed.onnx"
    model = build()
    model.graph.node.append(onnx.helper.make_node("Neg", ["present.1.key"], ["reader"]))
    reader = onnx.ValueInfoProto()
    reader.CopyFrom(next(value for value in model.graph.output if value.name == "present.1.key"))
    reader.name = "reader"
    model.graph.output.append(reader)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="session")
def siteless(folder) -> Path:
    """A model without any attention."""
    path = folder / "siteless.onnx"
    node = onnx.helper.make_node("Neg", ["x"], ["y"])
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "siteless", values[:1], values[1:])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8), path
    )
    return path


@pytest.fixture(scope="session")
def tokenizer(folder) -> Path:
    """A tokenizer of 64 words, w0 to w63, beside the models."""
    pytest.importorskip("tokenizers", reason="the optional package tokenizers is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path = folder / "tokenizer.json"
    words.save(str(path))
    return path
