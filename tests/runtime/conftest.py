import sys
from pathlib import Path

import onnx
import pytest

import kvfuse
from models.tiny_decoder import build

sys.path.insert(0, str(Path(__file__).parent))


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
    """The same decoder rewritten in exact mode: every token of these tests stays in the exact window."""
    path = folder / "exact.onnx"
    kvfuse.rewrite(original, path, n_recent=4096)
    return path


@pytest.fixture(scope="session")
def low_bit(original, folder) -> Path:
    """The same decoder with 4-bit codes for every token, so that no test passes by staying in a window."""
    path = folder / "low_bit.onnx"
    kvfuse.rewrite(original, path, n_recent=0, block=1, n_sink=0, key_center="none")
    return path


@pytest.fixture
def session(exact) -> kvfuse.InferenceSession:
    return kvfuse.InferenceSession(exact)
