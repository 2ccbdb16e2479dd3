"""What is measured: one attention layer, its sizes, its data, and what the right answer is.

Dims: H num_heads, K kv_num_heads, D head_dim, T cached tokens (decode) or prompt tokens (prefill).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Mode = Literal["decode", "prefill"]

# Rows of a prefill's output that are compared with the right answer.
CHECKED_ROWS = 4


@dataclass(frozen=True)
class Shape:
    """Head counts and size of one attention layer.

    Attributes:
        name: letter in tables.
        num_heads: query heads.
        kv_num_heads: key/value heads.
        head_dim: channels of a head.
    """

    name: str
    num_heads: int
    kv_num_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.name} ({self.num_heads}/{self.kv_num_heads}, {self.head_dim})"


# Qwen3-1.7B and its like; Llama-3-8B and its like; SmolLM2-135M.
SHAPES = {
    "A": Shape("A", 16, 8, 128),
    "B": Shape("B", 32, 8, 128),
    "C": Shape("C", 9, 3, 64),
}


class History:
    """Unit normal keys and values of one shape, drawn once and cut to each length.

    Args:
        shape: the layer.
        tokens: the longest history wanted.
    """

    def __init__(self, shape: Shape, tokens: int) -> None:
        random = np.random.default_rng(0)
        size = (shape.kv_num_heads, tokens, shape.head_dim)
        self.shape = shape
        self.key: Float32 = random.standard_normal(size, dtype=np.float32)  # K T D
        self.value: Float32 = random.standard_normal(size, dtype=np.float32)  # K T D


@dataclass(frozen=True)
class Workload:
    """One configuration: every contender gets the same one.

    Attributes:
        mode: "decode": `tokens` are cached, one step appends one token and attends; "prefill": one step
            starts from nothing, appends `tokens` and attends causally.
        shape: head counts and size.
        tokens: T.
        threads: intra-op threads.
        layers: caches that decode steps rotate through, so that each is as cold as in a model.
        query: f32 [H, S, D], S = 1 or T.
        key, value: f32 [K, n, D]: T tokens, and in decode mode the new one after them.
    """

    mode: Mode
    shape: Shape
    tokens: int
    threads: int
    layers: int
    query: Float32
    key: Float32
    value: Float32

    @classmethod
    def of(cls, mode: Mode, history: History, tokens: int, threads: int, layers: int = 1) -> Workload:
        """Cuts a history to one configuration."""
        shape, new = history.shape, 1 if mode == "decode" else tokens
        total = tokens + (mode == "decode")
        query = np.random.default_rng(1).standard_normal(
            (shape.num_heads, new, shape.head_dim), dtype=np.float32
        )
        key, value = history.key[:, :total], history.value[:, :total]
        return cls(mode, shape, tokens, threads, layers if mode == "decode" else 1, query, key, value)

    @property
    def new_tokens(self) -> int:
        """Tokens that one step appends."""
        return int(self.query.shape[1])

    @property
    def past(self) -> int:
        """Tokens before the new ones."""
        return int(self.key.shape[1]) - self.new_tokens

    @property
    def float_bytes(self) -> int:
        """Bytes of all keys and values as f32."""
        return self.key.nbytes + self.value.nbytes

    def right_answer(self) -> NDArray[np.float64]:
        """Float64 attention [H, R, D] of the last R query rows, at most CHECKED_ROWS."""
        rows = min(CHECKED_ROWS, self.new_tokens)
        total, group = self.key.shape[1], self.shape.num_heads // self.shape.kv_num_heads
        hidden = np.arange(total) > np.arange(total - rows, total)[:, np.newaxis]
        outputs = []
        for head in range(self.shape.num_heads):
            query = self.query[head, -rows:].astype(np.float64)
            key = self.key[head // group].astype(np.float64)
            scores = query @ key.T / np.sqrt(self.shape.head_dim)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            outputs.append(weights @ self.value[head // group].astype(np.float64))
        return np.stack(outputs)


def relative_error(found: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
