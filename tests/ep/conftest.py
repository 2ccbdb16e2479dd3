"""Makes the operator harness importable, builds a tiny decoder; KVFUSE_TEST_DEVICE names another device."""

import os
import sys
from pathlib import Path

import onnx
import pytest

import kvfuse
from models.tiny_decoder import build

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("ep", "ops", "runtime", "sequences", ".")]

DEVICE = os.environ.get("KVFUSE_TEST_DEVICE", "emulated")


@pytest.fixture(scope="module", autouse=True)
def compared_with_exact_weights(exact_weights):
    """What this suite compares with multiplies softmax weights in f32."""


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test; these tests fail where it is not usable, they are not skipped."""
    return DEVICE


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.onnx"
    onnx.save(build(), path)
    return path


@pytest.fixture(scope="session")
def rewritten(original) -> Path:
    """The decoder in the default preset with a window so short that most tokens are low-bit."""
    path = original.with_name("rewritten.onnx")
    kvfuse.rewrite(original, path, n_recent=4, block=4, n_sink=2)
    return path
