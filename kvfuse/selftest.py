"""Proves the compiled op on this machine: one node in onnxruntime against the same formula in NumPy.

Dims: H num_heads, K kv_num_heads, S new tokens, T total tokens, D head_dim; the batch size is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_HEADS, KV_NUM_HEADS, HEAD_DIM = 4, 2, 16
SCHEDULE = (5, 1, 1, 3)  # tokens of each run: a prompt, two decode steps, a chunk


@dataclass(frozen=True)
class CaseResult:
    """One case: the largest difference between the op and NumPy, and what is allowed."""

    name: str
    max_abs_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance (never, if it is NaN)."""
        return self.max_abs_error <= self.tolerance


def plain_attributes(head_dim: int) -> dict[str, Any]:
    """Returns all attributes of a plain 4-bit node."""
    return {
        "axis": 2,
        "scale": head_dim**-0.5,
        "causal": 1,
        "n_recent": 0,
        "block": 1,
        "n_sink": 0,
        "key_bits": 4,
        "value_bits": 4,
        "group_size": 0,
        "codes": "symmetric",
        "rotation": "hadamard",
        "key_center": "none",
        "window_left": -1,
        "softcap": 0.0,
        "layer": "selftest",
    }


def run_selftest() -> list[CaseResult]:
    """Runs every case.

    Raises:
        LibraryError: the compiled library is missing.
        Exception: whatever onnxruntime raises when it cannot load or run the node.
    """
    query, key, value = _tokens()
    rotation = hadamard(HEAD_DIM)
    codes_key, codes_value = dequantize(key @ rotation), dequantize(value @ rotation)
    codes_query = dequantize(query @ rotation, limit=127)
    low_bit = attention(codes_query, codes_key, codes_value) @ rotation
    return [
        # f32 against f64 over 10 tokens of unit variance
        CaseResult("exact window", _gap({"n_recent": 64}, attention(query, key, value)), 1e-5),
        # the integer parts are equal, the rest is f32 again, on values that went through two rotations
        CaseResult("4-bit cache", _gap({}, low_bit), 1e-4),
    ]


def attention(query: Array, key: Array, value: Array) -> Array:
    """Returns causal attention [H, S, D] of query [H, S, D] over key and value [K, S, D]."""
    group = query.shape[0] // key.shape[0]
    key, value = np.repeat(key, group, axis=0), np.repeat(value, group, axis=0)
    scores = query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1])
    length = scores.shape[-1]
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True) @ value)


def hadamard(size: int) -> Array:
    """Returns the normalized Walsh-Hadamard matrix [size, size] in natural order; size is a power of two."""
    signs = [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    matrix: Array = np.array(signs, np.float64) / np.sqrt(size)
    return matrix


def dequantize(rows: Array, limit: int = 7) -> Array:
    """Rounds each row to integers within +-limit times max|row| / limit, as the op stores it."""
    scale: Array = np.abs(rows).max(axis=-1, keepdims=True) / limit
    return np.asarray(np.clip(np.rint(rows / scale), -limit, limit) * scale)


def _tokens() -> tuple[Array, Array, Array]:
    """Returns seeded query [H, T, D], key and value [K, T, D], representable in f32."""
    random = np.random.default_rng(2024)
    heads = (NUM_HEADS, KV_NUM_HEADS, KV_NUM_HEADS)
    shapes = [(count, sum(SCHEDULE), HEAD_DIM) for count in heads]
    query, key, value = (random.standard_normal(s, np.float32).astype(np.float64) for s in shapes)
    return query, key, value


def _gap(attributes: dict[str, Any], expected: Array) -> float:
    """Runs the node over SCHEDULE and returns the largest difference from `expected` [H, T, D]."""
    from kvfuse.session import InferenceSession

    session = InferenceSession(one_node_model(plain_attributes(HEAD_DIM) | attributes))
    feeds = dict(zip(("query", "key", "value"), _tokens(), strict=True))
    start, rows = 0, []
    for count in SCHEDULE:
        chunk = {n: np.float32(a[np.newaxis, :, start : start + count]) for n, a in feeds.items()}
        rows.append(session.run(None, chunk)[0][0])
        start += count
    return float(np.abs(np.concatenate(rows, axis=1) - expected).max())


def one_node_model(attributes: dict[str, Any]) -> bytes:
    """Returns a serialized model that is one QuantizedKvSdpa with its own private state."""
    from onnx import TensorProto, helper

    heads = {"query": NUM_HEADS, "key": KV_NUM_HEADS, "value": KV_NUM_HEADS}
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", count, "sequence", HEAD_DIM])
        for name, count in heads.items()
    ]
    shape: list[int | str | None] = ["batch", NUM_HEADS, "sequence", HEAD_DIM]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, shape)
    node = helper.make_node("QuantizedKvSdpa", list(heads), ["output"], domain="kvfuse", **attributes)
    graph = helper.make_graph([node], "selftest", inputs, [output])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("kvfuse", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return bytes(model.SerializeToString())
