"""What one layer remembers of one sequence: K kv_num_heads, L length, D head_dim, G scales of a row."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .numerics import Float32, bytes_per_row, fwht, group_count, half_round, pack, quantize


@dataclass(frozen=True)
class OpConfig:
    """The attributes of one QuantizedKvSdpa node; a `scale` of None leaves the attribute out."""

    axis: int = 2
    scale: float | None = None
    causal: int = 1
    n_recent: int = 0
    block: int = 1
    n_sink: int = 0
    key_bits: int = 4
    value_bits: int = 4
    group_size: int = 0
    codes: str = "symmetric"
    rotation: str = "hadamard"
    key_center: str = "none"
    window_left: int = -1
    softcap: float = 0.0
    layer: str = "layers.0"

    def attributes(self) -> dict[str, int | float | str]:
        """The node attributes as onnx.helper.make_node takes them."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def centred(self) -> bool:
        """Whether block means are subtracted from keys: half storage keeps keys as they are."""
        return self.key_center == "block" and self.key_bits != 16


@dataclass(frozen=True)
class EncodedRows:
    """Low-bit rows of one side: bytes [K, n, …], scales [K, n, G], codes [K, n, D], or halves at 16 bits."""

    packed: NDArray[np.uint8]
    scales: Float32
    codes: NDArray[np.int8] | None
    halves: Float32 | None
    means: Float32 | None


def encoded_end(config: OpConfig, length: int) -> int:
    """First position that is not in the low-bit store after `length` tokens."""
    if config.block == 1:
        return length
    return max(0, (length - config.n_recent) // config.block * config.block)


def block_means(rows: Float32, block: int) -> Float32:
    """Means [K, n / block, D] of blocks over their entirely finite rows, summed in token order in float32."""
    kv_heads, count, size = rows.shape
    means = np.zeros((kv_heads, count // block, size), np.float32)
    with np.errstate(all="ignore"):
        for head in range(kv_heads):
            for index in range(count // block):
                total, used = np.zeros(size, np.float32), 0
                for row in rows[head, index * block : (index + 1) * block]:
                    if np.isfinite(row).all():
                        total, used = total + row, used + 1
                if used:
                    means[head, index] = half_round(total / np.float32(used))
    return means


def encode_rows(config: OpConfig, rows: Float32, *, is_key: bool) -> EncodedRows:
    """Encodes rows float32 [K, n, D] of keys or values; with centred keys n is a multiple of `block`."""
    bits = config.key_bits if is_key else config.value_bits
    kv_heads, count, size = rows.shape
    if bits == 16:
        halves = half_round(rows)
        raw = (
            np.ascontiguousarray(halves.astype(np.float16)).view(np.uint8).reshape(kv_heads, count, 2 * size)
        )
        return EncodedRows(raw, np.zeros((kv_heads, count, 0), np.float32), None, halves, None)
    means = None
    if is_key and config.centred:
        means = block_means(rows, config.block)
        with np.errstate(all="ignore"):
            rows = rows - np.repeat(means, config.block, axis=1)
    rotated = fwht(rows) if config.rotation == "hadamard" else rows
    codes, scales = quantize(rotated, bits, config.group_size, config.codes)
    return EncodedRows(pack(codes, bits), scales, codes, None, means)


def canonical_state(config: OpConfig, key: Float32, value: Float32, length: int) -> dict[str, Any]:
    """What `dump_layer` must give for a sequence of `length` tokens, apart from how much slack it keeps.

    Args:
        config: the node's attributes.
        key: float32 [K, >=length, D], the key history.
        value: float32 [K, >=length, Dv], the value history.
        length: tokens in the sequence.
    """
    end = encoded_end(config, length)
    keys = encode_rows(config, key[:, :end], is_key=True)
    values = encode_rows(config, value[:, :end], is_key=False)
    sinks = min(config.n_sink, length)
    state: dict[str, Any] = {
        "length": length,
        "encoded_end": end,
        "key_codes": keys.packed,
        "key_scales": keys.scales,
        "value_codes": values.packed,
        "value_scales": values.scales,
        "sink_key": key[:, :sinks],
        "sink_value": value[:, :sinks],
    }
    if keys.means is not None:
        state["key_means"] = keys.means
    return state


def bytes_per_token(config: OpConfig, kv_heads: int, head_dim: int, value_dim: int) -> float:
    """Bytes of one low-bit token in one layer, from the formula of the specification.

    Codes take head_dim * bits / 8 bytes a side, scales 4 bytes for a whole head or 2 per group, block means
    2 bytes per channel shared by the tokens of a block.
    """
    total = 0.0
    for size, bits in ((head_dim, config.key_bits), (value_dim, config.value_bits)):
        scale_bytes = 2 if config.group_size else 4
        total += bytes_per_row(size, bits) + scale_bytes * group_count(size, bits, config.group_size)
    if config.centred:
        total += 2 * head_dim / config.block
    return kv_heads * total
