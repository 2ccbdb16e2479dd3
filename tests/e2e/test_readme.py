"""The README's Python example runs as it stands."""

import re
from pathlib import Path

import onnx

import kvfuse
from models import tiny_decoder

README = Path(__file__).resolve().parents[2] / "README.md"


def test_python_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(tiny_decoder.build("decomposed"), "model.onnx")
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    assert [site.outcome for site in names["report"].sites] == ["fused", "fused"]
    assert names["session"].past_length == 3
    with kvfuse.KvSequence() as fresh:
        assert len(fresh) == 0
