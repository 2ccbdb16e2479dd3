"""Makes the NumPy model (tests/reference) and the operator harness importable."""

import sys
from pathlib import Path

import pytest

from kvfuse import _native

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.fixture(scope="module", autouse=True)
def exact_weights():
    """Softmax weights in f32, as in the model; test_weights.py tells what the integers change."""
    before = _native.exact_weights()
    _native.set_exact_weights(True)
    yield
    _native.set_exact_weights(before)
