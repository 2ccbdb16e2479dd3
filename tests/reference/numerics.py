"""Rotation, quantization and packing of one row; D is head_dim, G the number of scales of a row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
HALF_MAX = np.float32(65504.0)


def power_blocks(size: int) -> list[int]:
    """Splits head_dim into descending powers of two: 80 -> [64, 16], 7 -> [4, 2, 1]."""
    return [1 << bit for bit in range(size.bit_length() - 1, -1, -1) if size >> bit & 1]


def hadamard(size: int) -> NDArray[np.float64]:
    """Returns the dense rotation [D, D]; each diagonal block is H[i, j] = (-1)^popcount(i & j) / sqrt(n)."""
    matrix = np.zeros((size, size))
    begin = 0
    for n in power_blocks(size):
        index = np.arange(n)
        parity = np.array([[int(i & j).bit_count() & 1 for j in index] for i in index])
        matrix[begin : begin + n, begin : begin + n] = (1.0 - 2.0 * parity) / np.sqrt(n)
        begin += n
    return matrix


def fwht(rows: NDArray[np.floating]) -> Float32:
    """Rotates rows [..., D] in float32 in the fixed order: stages h = 1, 2, 4, …, then one multiplication."""
    rows = np.asarray(rows, np.float32)
    parts = []
    begin = 0
    with np.errstate(
        all="ignore"
    ):  # rows near the float32 limit overflow here, which the quantizer must notice
        for n in power_blocks(rows.shape[-1]):
            part = rows[..., begin : begin + n]
            half = 1
            while half < n:
                pairs = part.reshape(*rows.shape[:-1], n // (2 * half), 2, half)
                low, high = pairs[..., 0, :], pairs[..., 1, :]
                part = np.stack([low + high, low - high], axis=-2).reshape(*rows.shape[:-1], n)
                half *= 2
            parts.append(part * np.float32(1.0 / np.sqrt(n)) if n > 1 else part)
            begin += n
    return np.concatenate(parts, axis=-1).astype(np.float32)


def half_round(values: NDArray[np.floating]) -> Float32:
    """Rounds to IEEE half, to nearest even; finite values saturate at 65504, infinities and NaN stay."""
    values = np.asarray(values, np.float32)
    clipped = np.where(np.isfinite(values), np.clip(values, -HALF_MAX, HALF_MAX), values)
    return clipped.astype(np.float16).astype(np.float32)


def group_count(size: int, bits: int, group_size: int) -> int:
    """Number of scales of one row: none for half storage, one for a head, else one per started group."""
    if bits == 16:
        return 0
    return 1 if group_size == 0 else -(-size // group_size)


def _group_scale(group: Float32, bits: int, codes: str) -> Float32:
    """Scale [..., 1] of one group [..., n], before any rounding to half."""
    index = np.argmax(np.abs(group), axis=-1)[..., None]  # argmax takes the first of equal maxima
    extreme = np.take_along_axis(group, index, axis=-1)
    if bits == 8:
        return np.abs(extreme) / np.float32(127)
    return extreme / np.float32(-8) if codes == "full" else np.abs(extreme) / np.float32(7)


def quantize(rows: Float32, bits: int, group_size: int, codes: str) -> tuple[NDArray[np.int8], Float32]:
    """Quantizes rotated rows [..., D] to 4 or 8 bits.

    Returns:
        codes int8 [..., D] and scales float32 [..., G]; non-finite rows have zero codes and NaN scales.
    """
    rows = np.asarray(rows, np.float32)
    finite = np.isfinite(rows).all(axis=-1, keepdims=True)
    safe = np.where(finite, rows, np.float32(0))
    low, high = (-127, 127) if bits == 8 else (-8, 7) if codes == "full" else (-7, 7)
    width = group_size or rows.shape[-1]
    code_parts, scale_parts = [], []
    for begin in range(0, rows.shape[-1], width):
        group = safe[..., begin : begin + width]
        scale = _group_scale(group, bits, codes)
        if group_size:
            scale = half_round(scale)
        scale = np.where(scale == 0, np.float32(1), scale).astype(np.float32)
        code_parts.append(np.clip(np.rint(group / scale), low, high).astype(np.int8))
        scale_parts.append(np.where(finite, scale, np.float32(np.nan)))
    return np.concatenate(code_parts, axis=-1), np.concatenate(scale_parts, axis=-1).astype(np.float32)


def bytes_per_row(size: int, bits: int) -> int:
    """Bytes of the packed codes of one row, scales not counted."""
    return -(-size * bits // 8)


def pack(codes: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """Packs codes [..., D] to bytes; at 4 bits channel 2i is the low nibble, an odd last high nibble is 0."""
    if bits == 8:
        return np.ascontiguousarray(codes, np.int8).view(np.uint8)
    nibbles = codes.astype(np.int16) & 15
    if codes.shape[-1] % 2:
        nibbles = np.concatenate([nibbles, np.zeros_like(nibbles[..., :1])], axis=-1)
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).astype(np.uint8)


def unpack(packed: NDArray[np.uint8], bits: int, size: int) -> NDArray[np.int8]:
    """Inverse of `pack`: bytes [..., n] to codes int8 [..., D]."""
    if bits == 8:
        return packed.view(np.int8)
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)[..., :size]
    return ((nibbles.astype(np.int8) ^ 8) - 8).astype(np.int8)
