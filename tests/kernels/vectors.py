"""Named rows for quantizer and rotation tests; every vector is float32 [N, D] and has a meaning."""

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


def _normal(size: int) -> Rows:
    return np.random.default_rng(size).standard_normal((16, size)).astype(np.float32)


def _one_outlier_channel(size: int) -> Rows:
    rows = _normal(size)
    rows[:, size // 2] *= 50
    return rows


def _ties(size: int) -> Rows:
    """Multiples of half a step: with max abs 7 (or 127 / 2) every odd one lies exactly between two codes."""
    rows = np.resize(np.arange(-13, 14, dtype=np.float32) / 2, (4, size))
    rows[:, 0] = [7, -7, 3.5, 63.5]
    return rows


def _ties_of_thirds(size: int) -> Rows:
    """Ties of steps 3 and 6: exact in a division by the scale, broken by a product with its reciprocal."""
    steps = np.resize(np.arange(-126.5, 127, dtype=np.float32), (4, size)) * np.float32(3)
    rows = np.concatenate([steps, np.fmod(steps, np.float32(21)), 2 * steps])
    rows[:, 0] = np.repeat(np.array([381, 21, -762], np.float32), 4)
    return rows


def _equal_extremes(size: int) -> Rows:
    """Both signs reach the largest magnitude: `full` takes the first, so the sign of its scale differs."""
    rows = _normal(size)[:2]
    rows[0, :2], rows[1, :2] = [9, -9], [-9, 9]
    return rows


def _code_extremes(size: int) -> Rows:
    return np.resize(np.array([1, -1, 0.999, -0.999, 0.07], np.float32), (3, size))


def _short_scale(size: int) -> Rows:
    """Scales that lose most when rounded to half, up and down, so that codes depend on the rounded scale."""
    scale = np.array([1 + 2**-11 + 2**-20, 1 + 2**-11 - 2**-20, 3 * 2**-25, 2**-24, 6e4, 7e4], np.float32)
    return np.resize(np.linspace(-7, 7, 57, dtype=np.float32), (6, size)) * scale[:, None]


def _non_finite(size: int) -> Rows:
    """One bad element spoils its whole row, wherever it is, and no other row."""
    rows = _normal(size)[:6]
    rows[0, 0], rows[1, size - 1], rows[2, size // 2] = np.nan, np.inf, -np.inf
    return rows


def named_vectors(size: int) -> dict[str, Rows]:
    """All vectors for one head size."""
    normal = _normal(size)
    return {
        "zeros": np.zeros((2, size), np.float32),
        "minus_zeros": -np.zeros((2, size), np.float32),
        "normal": normal,
        "one_outlier_channel": _one_outlier_channel(size),
        "ties": _ties(size),
        "ties_of_thirds": _ties_of_thirds(size),
        "equal_extremes": _equal_extremes(size),
        "code_extremes": _code_extremes(size),
        "denormals": normal * np.float32(2.0**-140),
        "scale_underflows": normal * np.float32(1e-30),
        "smallest": np.resize(np.array([1, -2, 3, -4, 7, 0], np.float32) * np.float32(2.0**-149), (2, size)),
        "huge": np.clip(normal, -3, 3) * np.float32(1e38),
        "short_scale": _short_scale(size),
        "non_finite": _non_finite(size),
    }


VECTOR_NAMES = sorted(named_vectors(8))
