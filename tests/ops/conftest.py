"""Makes the NumPy model (tests/reference) and the operator harness importable."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.fixture(scope="module", autouse=True)
def compared_with_exact_weights(exact_weights):
    """What this suite compares with multiplies softmax weights in f32."""
