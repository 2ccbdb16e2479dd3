"""Writes a tiny rewritten decoder for onnxruntime-node: make_model.py OUTPUT.onnx.

onnxruntime-node feeds a session's inputs only (js/node/src/inference_session_wrap.cc), and an input with a
default is not among them: onnxruntime calls it an overridable initializer. What is fed to it is dropped
without a word. So kv_sequence and kv_past_length lose their defaults here, and have to be fed in every run.
"""

import sys
import tempfile
from pathlib import Path

import onnx

import kvfuse

sys.path.append(str(Path(__file__).resolve().parents[2]))

from models.tiny_decoder import build

with tempfile.TemporaryDirectory() as folder:
    onnx.save(build(), Path(folder) / "source.onnx")
    kvfuse.rewrite(Path(folder) / "source.onnx", Path(folder) / "rewritten.onnx")
    model = onnx.load(Path(folder) / "rewritten.onnx")
for initializer in [i for i in model.graph.initializer if i.name in ("kv_sequence", "kv_past_length")]:
    model.graph.initializer.remove(initializer)
onnx.save(model, sys.argv[1])
