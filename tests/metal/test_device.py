"""Device "metal" through the library: the kernels' own text. Over Metal on a Mac, else over the fake."""

import numpy as np
import pytest

from kvfuse import _native

REASONS = dict(_native.device_choices())

pytestmark = pytest.mark.skipif(REASONS["metal"] != "", reason=f"device metal: {REASONS['metal']}")


def test_kernels_compile_and_compute():
    """probe_scale: values * factor, or rint(values) where function constant 0 is 1; both exact in f32."""
    values = np.array([-2.5, -0.5, 0.5, 1.5, 2.5, 3.25, 1e-3, 7.0], np.float32)
    values.flags.writeable = False
    arguments = np.array([values.size], np.int32).tobytes() + np.array([1.5], np.float32).tobytes()
    for constant, expected in ((0, values * np.float32(1.5)), (1, np.rint(values))):
        out = np.full(values.size, np.nan, np.float32)
        _native.device_launch("metal", "probe_scale", [values, out, arguments], [1], 32, {0: constant})
        np.testing.assert_array_equal(out, expected)


def test_threadgroups_and_simdgroups():
    values = np.random.default_rng(0).integers(-1000, 1000, (3, 256), dtype=np.int32)
    out = np.zeros(3, np.int32)
    _native.device_launch("metal", "probe_sum", [values, out], [3], 256)
    np.testing.assert_array_equal(out, values.sum(axis=1))


@pytest.mark.parametrize(
    ("kernel", "arguments", "threads", "words"),
    [
        ("nothing", [], 32, r"\[metal\] expected kernel 'nothing' in the library; found: "),
        ("probe_sum", [np.zeros(32, np.int32), np.zeros(1, np.int32)], 33, "a multiple of 32"),
        ("probe_sum", [np.zeros(32, np.int32), b""], 32, "1 to 4096 bytes by value"),
    ],
)
def test_errors_are_sentences(kernel, arguments, threads, words):
    with pytest.raises(ValueError, match=words):
        _native.device_launch("metal", kernel, arguments, [1], threads)
