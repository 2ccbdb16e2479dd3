"""The README's Python example runs as it stands."""

import re
from pathlib import Path

import numpy as np
import onnx

import kvfuse
from models import tiny_decoder

README = Path(__file__).resolve().parents[2] / "README.md"


def test_python_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(tiny_decoder.build("decomposed"), "model.onnx")
    basics, sequences = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(basics, names)
    assert [site.outcome for site in names["report"].sites] == ["fused", "fused"]
    assert names["session"].past_length == 3
    names |= {"system_prompt": np.array([[1, 2, 3, 4]]), "first_words": np.array([[5, 6]])}
    exec(sequences, names)
    assert [len(talk) for talk in names["talks"][4:]] == [4] * 96
    assert len(names["again"]) == 4
    assert names["beams"][0].id != names["beams"][1].id
    assert kvfuse.memory_in_use() > 0
