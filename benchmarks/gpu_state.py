"""Sequences of any length without a prefill: a frozen state whose tokens repeat those of a short one.

A prefill of T tokens costs O(T^2); what is measured is one decode step over T tokens, whose time does not
depend on what the codes are.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_ITEM = {"U8": np.uint8, "F16": np.float16, "F32": np.float32}


@numba.njit(cache=True)
def _fnv1a(state: Any, data: Bytes) -> Any:
    for byte in data:
        state = (state ^ np.uint64(byte)) * np.uint64(0x100000001B3)
    return state


def parse(state: bytes) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Returns metadata and tensors of a frozen state."""
    (size,) = struct.unpack("<Q", state[:8])
    header = json.loads(state[8 : 8 + size])
    metadata: dict[str, str] = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(state[begin:end], _ITEM[entry["dtype"]]).reshape(entry["shape"])
    return metadata, tensors


def build(metadata: dict[str, str], tensors: dict[str, NDArray[Any]]) -> bytes:
    """Returns a frozen state with a valid checksum."""
    names = {np.dtype(item): name for name, item in _ITEM.items()}
    header: dict[str, Any] = {"__metadata__": {"checksum": "0" * 16} | metadata}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entry = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        header[name] = entry
        offset = end
    text = json.dumps(header, separators=(",", ":"))
    text += " " * ((8 - len(text) % 8) % 8)
    state = np.uint64(0xCBF29CE484222325)
    pieces = [text.encode(), *(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())]
    for piece in pieces:
        state = _fnv1a(np.uint64(state), np.frombuffer(piece, np.uint8))
    pieces[0] = text.replace('"checksum":"' + "0" * 16, f'"checksum":"{int(state):016x}', 1).encode()
    return struct.pack("<Q", len(pieces[0])) + b"".join(pieces)


def lengthen(state: bytes, length: int) -> bytes:
    """Returns a one-layer state of `length` tokens that repeat those of `state`; both multiples of a block.

    Raises:
        ValueError: the short state's exact window reaches into tokens that a longer one would have encoded.
    """
    metadata, tensors = parse(state)
    shorter = int(metadata["length"])
    block = int(metadata["0.block"])
    tail = shorter - int(metadata["0.encoded_end"])  # tokens of the open window
    exact = shorter - int(metadata["0.exact_begin"])
    if length % block or shorter % block or length < shorter:
        raise ValueError(f"[lengthen] expected multiples of {block} from {shorter} on; found {length}")
    encoded = length - tail

    def repeat(tensor: NDArray[Any], count: int) -> NDArray[Any]:
        times = -(-count // tensor.shape[1])
        return np.ascontiguousarray(np.tile(tensor, (1, times, 1))[:, :count])

    for side in ("key", "value"):
        for part in ("codes", "scales"):
            tensors[f"0.{side}_{part}"] = repeat(tensors[f"0.{side}_{part}"], encoded)
    if "0.key_means" in tensors:
        tensors["0.key_means"] = repeat(tensors["0.key_means"], encoded // block)
    metadata |= {
        "length": str(length),
        "0.encoded_end": str(encoded),
        "0.exact_begin": str(length - exact),
    }
    return build({name: value for name, value in metadata.items() if name != "checksum"}, tensors)
