"""The NumPy model is itself checked where an independent truth exists: algebra and plain attention."""

import numpy as np
import pytest
from reference import OpConfig, attend, fwht, hadamard, pack, plain_attention, power_blocks, quantize, unpack

SIZES = (1, 2, 7, 8, 12, 16, 24, 40, 64, 80, 96, 128, 160, 192, 576)


@pytest.mark.parametrize("size", SIZES)
def test_dense_rotation_is_symmetric_and_orthonormal(size: int) -> None:
    matrix = hadamard(size)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix @ matrix, np.eye(size), rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", SIZES)
def test_fwht_is_the_dense_rotation(size: int) -> None:
    rows = np.random.default_rng(size).standard_normal((50, size)).astype(np.float32)
    # Each of log2(n) stages and the last product round once, relative to at most the sum of |x| / sqrt(n):
    # |error| <= (log2(n) + 2) * 2^-24 * sum|x| / sqrt(n), where the 2 counts the product and its constant.
    bound = np.zeros_like(rows, np.float64)
    begin = 0
    for n in power_blocks(size):
        part = slice(begin, begin + n)
        magnitude = np.abs(rows[:, part]).astype(np.float64).sum(axis=1, keepdims=True) / np.sqrt(n)
        bound[:, part] = (np.log2(n) + 2) * 2.0**-24 * magnitude
        begin += n
    error = np.abs(fwht(rows) - rows.astype(np.float64) @ hadamard(size))
    assert (error <= bound).all()


@pytest.mark.parametrize("size", [1, 7, 8, 12])
@pytest.mark.parametrize("bits", [4, 8])
def test_unpack_inverts_pack(size: int, bits: int) -> None:
    half = 1 << (bits - 1)
    codes = np.random.default_rng(bits).integers(-half, half, (20, size)).astype(np.int8)
    np.testing.assert_array_equal(unpack(pack(codes, bits), bits, size), codes)


def test_codes_reconstruct_within_half_a_step() -> None:
    rows = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    for bits, codes in ((4, "symmetric"), (8, "symmetric"), (8, "full")):
        quantized, scales = quantize(rows, bits, 0, codes)
        error = np.abs(quantized * scales.astype(np.float64) - rows)
        assert (error <= 0.5 * np.abs(scales) * (1 + 1e-5)).all()


@pytest.mark.parametrize("causal", [0, 1])
def test_all_exact_model_is_plain_attention(causal: int) -> None:
    rng = np.random.default_rng(1)
    query = rng.standard_normal((2, 4, 3, 8)).astype(np.float32)
    key, value = rng.standard_normal((2, 2, 2, 9, 8)).astype(np.float32)
    modelled = attend(OpConfig(n_recent=100, causal=causal), query, key, value, past=6)
    expected = plain_attention(query, key, value, scale=8**-0.5, causal=bool(causal))
    np.testing.assert_allclose(modelled, expected, rtol=0, atol=1e-13)
