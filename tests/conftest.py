"""Paths and the few fixtures that all suites share."""

import os
import sys
from pathlib import Path

import onnxruntime
import pytest

ROOT = Path(__file__).resolve().parents[1]
# Last, so that an installed kvfuse wins over the source folder of the same name.
sys.path += [str(ROOT), str(ROOT / "tests")]

# Errors under test are printed by onnxruntime as well; keep the output readable.
onnxruntime.set_default_logger_severity(4)

expected = os.environ.get("KVFUSE_EXPECT_ORT")
if expected and not onnxruntime.__version__.startswith(expected):
    raise RuntimeError(f"[tests] expected onnxruntime {expected}; found {onnxruntime.__version__}")


def pytest_addoption(parser):
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="write what the golden files should hold, to be reviewed",
    )


@pytest.fixture(scope="module")
def exact_weights():
    """Softmax weights in f32 on the CPU; tests/ops/test_kernel_paths.py tells what the integers change."""
    from kvfuse import _native

    before = _native.exact_weights()
    _native.set_exact_weights(True)
    yield
    _native.set_exact_weights(before)


@pytest.fixture
def update_goldens(request):
    """Whether golden files are rewritten and not compared."""
    return request.config.getoption("--update-goldens")
