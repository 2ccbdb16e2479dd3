"""An independent NumPy model of kvfuse's operator, written from the specification and not from the C++.

`numerics` holds rotation, quantization and packing, `cache` the canonical state of one layer, `attention` the
output. Codes are computed in float32 where the specification fixes the rounding; everything else is float64.
"""

from .attention import attend, attend_row, plain_attention
from .cache import EncodedRows, OpConfig, canonical_state, encode_rows, encoded_end
from .numerics import (
    bytes_per_row,
    fwht,
    group_count,
    hadamard,
    half_round,
    pack,
    power_blocks,
    quantize,
    unpack,
)

__all__ = [
    "EncodedRows",
    "OpConfig",
    "attend",
    "attend_row",
    "bytes_per_row",
    "canonical_state",
    "encode_rows",
    "encoded_end",
    "fwht",
    "group_count",
    "hadamard",
    "half_round",
    "pack",
    "plain_attention",
    "power_blocks",
    "quantize",
    "unpack",
]
