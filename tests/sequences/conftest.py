"""Makes the operator harness and the NumPy model importable, and builds a tiny decoder."""

import sys
from pathlib import Path

import onnx
import pytest

import kvfuse
from models.tiny_decoder import build

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "ops"), str(HERE.parent / "runtime"), str(HERE.parent)]


@pytest.fixture(scope="session")
def decoder_path(tmp_path_factory) -> Path:
    """A tiny decoder in 4 bits, with a window so short that a few tokens leave it."""
    folder = tmp_path_factory.mktemp("models")
    onnx.save(build(), folder / "tiny.onnx")
    kvfuse.rewrite(folder / "tiny.onnx", folder / "rewritten.onnx", n_recent=4, block=4, n_sink=2)
    return folder / "rewritten.onnx"


@pytest.fixture
def decoder(decoder_path) -> kvfuse.InferenceSession:
    return kvfuse.InferenceSession(decoder_path)


@pytest.fixture(scope="module", autouse=True)
def compared_with_exact_weights(exact_weights):
    """What this suite compares with multiplies softmax weights in f32."""
