"""What docs/ci.md shows is what runs."""

import re
import shlex
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner

import kvfuse
from kvfuse.cli import app
from models.tiny_decoder import build

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ci.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(build(), "model.onnx")
    onnx.save(build(), "re-exported.onnx")
    return tmp_path


def invoke(line):
    words = shlex.split(line.split("#")[0].split("> ")[0])
    assert words.pop(0) == "kvfuse"
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_workflow_runs(folder):
    steps = [step.split("||")[0].strip() for step in re.findall(r"run: (kvfuse .*)", PAGE)]
    assert [step.split()[1] for step in steps] == ["rewrite", "diff", "verify", "diff"]
    assert invoke(steps[0]).exit_code == 0
    missing = invoke(steps[1])
    assert (missing.exit_code, missing.stdout) == (2, "")
    (update,) = re.findall(r"^kvfuse diff .*--update", PAGE, re.MULTILINE)
    assert invoke(update).exit_code == 0
    assert invoke(steps[1]).exit_code == 0
    assert invoke(steps[2]).exit_code in (0, 1), (
        "random weights may miss the limit, but the options are right"
    )
    assert invoke(steps[3]).exit_code == 1


def test_the_exact_mode_passes_as_said(folder):
    sentence = " ".join(PAGE.split())
    rewrite, verify = re.findall(r"`(kvfuse (?:rewrite|verify) [^`]*exact[^`]*)`", sentence)
    assert invoke(rewrite).exit_code == 0
    done = invoke(verify)
    assert done.exit_code == 0, done.stdout


def test_the_pytest_example_passes(folder):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    space = {"__file__": str(folder / "test_model.py")}
    exec(compile(example, "docs/ci.md", "exec"), space)
    kvfuse.rewrite("model.onnx", "model.kvfuse.onnx")
    (folder / "model.diff").write_text(kvfuse.diff("model.onnx", "model.kvfuse.onnx").text, encoding="utf-8")
    space["test_the_rewrite_is_the_reviewed_one"](folder)
    space["test_a_re_export_changed_nothing"]()
    (folder / "model.diff").write_text("something else", encoding="utf-8")
    with pytest.raises(AssertionError):
        space["test_the_rewrite_is_the_reviewed_one"](folder)
