"""The native rotation, quantizer and half rounding against the NumPy model: codes and scale bits with ==."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from reference import bytes_per_row, fwht, group_count, hadamard, half_round, pack, quantize, unpack
from vectors import VECTOR_NAMES, named_vectors

from kvfuse import _native

SIZES = (1, 7, 8, 12, 16, 24, 40, 64, 80, 96, 128, 160, 192, 576)


def assert_same_floats(found: np.ndarray, expected: np.ndarray) -> None:
    """Bit equality of float32 arrays, except that every NaN is the same NaN."""
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    bits = [np.where(np.isnan(array), np.float32(0), array).view(np.uint32) for array in (found, expected)]
    np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize("size", SIZES)
def test_rotation_is_the_dense_hadamard(size: int) -> None:
    rows = np.random.default_rng(size).standard_normal((20, size)).astype(np.float32)
    # (log2 D + 2) roundings relative to sum|x| / sqrt(n) <= ||x||; derived in test_reference_model.py.
    bound = (np.log2(size) + 2) * 2.0**-24 * np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    assert (np.abs(_native.rotate(rows) - rows.astype(np.float64) @ hadamard(size)) <= bound).all()


@pytest.mark.parametrize("name", VECTOR_NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_rotation_adds_in_the_fixed_order(size: int, name: str) -> None:
    rows = named_vectors(max(size, 2))[name][:, :size].copy()
    assert_same_floats(_native.rotate(rows), fwht(rows))


def test_rotation_of_no_rows_is_no_rows() -> None:
    assert _native.rotate(np.zeros((0, 16), np.float32)).shape == (0, 16)


@pytest.mark.parametrize("name", VECTOR_NAMES)
@pytest.mark.parametrize("codes", ["symmetric", "full"])
@pytest.mark.parametrize("group_size", [0, 32, 64])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [7, 12, 64, 80, 96, 192])
def test_quantizer(size: int, bits: int, group_size: int, codes: str, name: str) -> None:
    rows = named_vectors(size)[name]
    packed, scales = _native.quantize(rows, bits, group_size, codes)
    expected_codes, expected_scales = quantize(rows, bits, group_size, codes)
    packed = np.asarray(packed).view(np.uint8)
    assert packed.shape == (len(rows), bytes_per_row(size, bits))
    assert scales.shape == (len(rows), group_count(size, bits, group_size))
    np.testing.assert_array_equal(unpack(packed, bits, size), expected_codes)
    np.testing.assert_array_equal(packed, pack(expected_codes, bits))  # also the unused nibble of odd sizes
    assert_same_floats(scales, expected_scales)


def test_every_code_occurs_and_lands_in_its_nibble() -> None:
    symmetric = np.arange(-7, 8, dtype=np.float32)[None]
    packed, scales = _native.quantize(symmetric, 4, 0, "symmetric")
    assert scales.tolist() == [[1.0]]
    assert np.asarray(packed).view(np.uint8).tobytes().hex() == "a9cbed0f2143" + "6507"
    full = -np.arange(-7, 9, dtype=np.float32)[None]  # 7 … -8, extreme -8, scale 1
    packed, scales = _native.quantize(full, 4, 0, "full")
    assert scales.tolist() == [[1.0]]
    assert np.asarray(packed).view(np.uint8).tobytes().hex() == "674523" + "01efcdab89"


def test_half_rounding_is_ieee_and_saturates() -> None:
    every_half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = every_half[np.isfinite(every_half)].astype(np.float32)
    finite.sort()
    between = (finite[:-1].astype(np.float64) + finite[1:]) / 2  # exact ties in float32
    ties = between.astype(np.float32)
    huge = np.array([65504, 65519.996, 65520, 1e6, 3.4e38], np.float32)
    below, above = np.nextafter(ties, np.float32(-np.inf)), np.nextafter(ties, np.float32(np.inf))
    special = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 2.0**-149], np.float32)
    values = np.concatenate([finite, ties, below, above, huge, -huge, special])
    assert_same_floats(_native.half_round(values), half_round(values))
    assert _native.half_round(np.array([1e6, -1e6], np.float32)).tolist() == [65504.0, -65504.0]


ANY_FLOATS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 70)),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)


@settings(deadline=None, max_examples=150)
@given(rows=ANY_FLOATS, bits=st.sampled_from([4, 8]), group=st.sampled_from([0, 32, 64]), full=st.booleans())
def test_any_rows_quantize_as_the_model(rows: np.ndarray, bits: int, group: int, full: bool) -> None:
    codes = "full" if full else "symmetric"
    packed, scales = _native.quantize(rows, bits, group, codes)
    expected_codes, expected_scales = quantize(rows, bits, group, codes)
    np.testing.assert_array_equal(np.asarray(packed).view(np.uint8), pack(expected_codes, bits))
    assert_same_floats(scales, expected_scales)


@settings(deadline=None, max_examples=150)
@given(rows=ANY_FLOATS)
def test_any_rows_rotate_as_the_model(rows: np.ndarray) -> None:
    assert_same_floats(_native.rotate(rows), fwht(rows))


@settings(deadline=None, max_examples=50)
@given(rows=hnp.arrays(np.float32, (2, 24), elements=st.floats(-1e3, 1e3, width=32)))
def test_rotating_twice_gives_the_row_back(rows: np.ndarray) -> None:
    # Two passes of (log2 n + 2) roundings relative to the norm, which a rotation keeps: n <= 16 here.
    bound = (
        2 * (4 + 2) * 2.0**-24 * np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True) + 2.0**-140
    )
    assert (np.abs(_native.rotate(_native.rotate(rows)).astype(np.float64) - rows) <= bound).all()
