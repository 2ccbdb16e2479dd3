"""Attention layers that break low-bit caches, as synthetic data that is otherwise like a real layer.

`python benchmarks/stress_layers.py [--head-dim 128 64] [--json FILE]` prints the relative error of the
attention's output, |output - exact| / |exact| over the second half of 2048 tokens, for every layer and
format, through the product's own op.

What "like a real layer" means, measured on SmolLM2-135M (30 layers, 1024 tokens of the Python language
reference, `benchmarks/stress_layers.py` prints the same figures of the synthetic layers): the first tokens
take 0.24 of the attention (0.00-0.53 in the middle 80 % of the heads), the newest 64 tokens 0.42
(0.17-0.74), the effective number of tokens is 6-104, and a constant vector makes 0.58 of the keys' energy
and 0.17 of the values'. Plain normal random numbers have none of this: their attention is spread over the
whole context, and their values cancel, so that every error is large against the output.

Dims: H num_heads, K kv_num_heads, T tokens, D head_dim.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from kvfuse.auto.attention import Attention
from kvfuse.auto.rewritten import EXACT
from kvfuse.formats import PRESETS, KvFormat

Float32 = NDArray[np.float32]
NUM_HEADS, KV_NUM_HEADS, TOKENS = 8, 2, 2048
_THETA = 10000.0
_MEMORY = 0.95  # correlation of neighbouring tokens' content
_LOCALITY = 8.5  # the score of a token's own content
_SPREAD = 1.5  # standard deviation of the scores otherwise
_SINK_SCORE = 8.0  # of the first token


@dataclasses.dataclass(frozen=True)
class Layer:
    """Operands of one layer over a whole sequence.

    Attributes:
        query: f32 [H, T, D].
        key, value: f32 [K, T, D].
        about: What is hard about it.
    """

    query: Float32
    key: Float32
    value: Float32
    about: str

    @property
    def attention(self) -> Attention:
        """The op's own form of it."""
        attributes = {
            "axis": 2,
            "scale": float(self.query.shape[-1] ** -0.5),
            "causal": 1,
            "window_left": -1,
            "softcap": 0.0,
        }
        operands = {"query": self.query[None], "key": self.key[None], "value": self.value[None]}
        return Attention(attributes, operands)


def rotate(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotary embedding of rows [..., T, D]; pairs are (i, i + D/2), fast for small i."""
    size = rows.shape[-1]
    angles = np.arange(rows.shape[-2])[:, None] * _THETA ** (-2 * np.arange(size // 2) / size)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = rows[..., : size // 2], rows[..., size // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _content(rng: np.random.Generator, heads: int, size: int) -> NDArray[np.float64]:
    """Unit-variance content [heads, T, D] that changes slowly from token to token."""
    noise = rng.standard_normal((heads, TOKENS, size))
    for t in range(1, TOKENS):
        noise[:, t] = _MEMORY * noise[:, t - 1] + np.sqrt(1 - _MEMORY**2) * noise[:, t]
    return noise


def usual(size: int, seed: int = 0, *, locality: float = _LOCALITY, sink: float = _SINK_SCORE) -> Layer:
    """A layer without anything hard: local content, a sink, constant parts in keys and values."""
    rng = np.random.default_rng(seed)
    content = _content(rng, KV_NUM_HEADS, size)
    group = NUM_HEADS // KV_NUM_HEADS
    wanted = np.repeat(content, group, 0) * locality / np.sqrt(size)
    query = rotate(wanted + _SPREAD * rng.standard_normal((NUM_HEADS, TOKENS, size)))
    key = rotate(content) + np.sqrt(0.58 / 0.42) * rng.standard_normal((KV_NUM_HEADS, 1, size))
    value = rng.standard_normal((KV_NUM_HEADS, TOKENS, size))
    value += np.sqrt(0.17 / 0.83) * rng.standard_normal((KV_NUM_HEADS, 1, size))
    # The first token: one channel of the slowest pair, which all queries look for, and a small value.
    query[..., -1] = 2.0
    key[:, 0, -1] += sink * np.sqrt(size) / 2.0
    value[:, 0] *= 0.1
    return _layer(query, key, value, "nothing hard: for comparison")


def _layer(
    query: NDArray[np.float64], key: NDArray[np.float64], value: NDArray[np.float64], about: str
) -> Layer:
    return Layer(query.astype(np.float32), key.astype(np.float32), value.astype(np.float32), about)


def _changed(layer: Layer, about: str, **arrays: NDArray[np.floating]) -> Layer:
    return dataclasses.replace(
        layer, about=about, **{name: array.astype(np.float32) for name, array in arrays.items()}
    )


def _rms(rows: NDArray[np.floating]) -> float:
    return float(np.sqrt(np.mean(np.square(rows, dtype=np.float64))))


def constant_offset(size: int) -> Layer:
    """30 rms on two channels of every key, as a bias behind the rotary embedding would give them."""
    layer = usual(size)
    key = layer.key.copy()
    key[..., [5, size // 2 + 13]] += 30 * _rms(key) * np.array([1.0, -1.0], np.float32)
    return _changed(layer, "constant key offset, 30 rms on two channels", key=key)


def moving_offset(size: int) -> Layer:
    """30 rms on the two channels of a slow rotary pair before the embedding: it turns by one radian in T."""
    layer = usual(size)
    slow = int(np.ceil(np.log(TOKENS) / np.log(_THETA) * size / 2))
    offset = np.zeros((1, TOKENS, size))
    offset[..., slow] = 30 * _rms(layer.key)
    query = layer.query.copy()
    # A model with such a bias has learned queries that do not drown in it.
    query[..., [slow, slow + size // 2]] /= 30
    return _changed(
        layer, "key offset of 30 rms in a slow rotary pair", key=layer.key + rotate(offset), query=query
    )


def _outliers(size: int, factor: float) -> Layer:
    """Two channels of the keys are large; a trained model's queries are small there in turn."""
    layer = usual(size)
    key, query = layer.key.copy(), layer.query.copy()
    channels = [5, 77 % size]
    key[..., channels] *= factor
    query[..., channels] /= np.sqrt(factor)
    return _changed(layer, f"two key channels scaled by {factor:g}", key=key, query=query)


def outliers_8(size: int) -> Layer:
    """Two channels of the keys scaled by 8."""
    return _outliers(size, 8.0)


def outliers_20(size: int) -> Layer:
    """Two channels of the keys scaled by 20."""
    return _outliers(size, 20.0)


def massive_first_token(size: int) -> Layer:
    """The first token's key and value are 100 times the others' on a few channels."""
    layer = usual(size, sink=0.0)
    key, value = layer.key.copy(), layer.value.copy()
    channels = [3, size // 2 + 9, size - 1]
    key[:, 0, channels] += 100 * _rms(key)
    # What all queries see of it: a score of 6.5, not of hundreds.
    query = layer.query.copy()
    query[..., channels] *= 0.05
    query[..., channels] += _SINK_SCORE * np.sqrt(size) / (3 * 100 * _rms(layer.key))
    value[:, 0, channels] += 100 * _rms(value) * 0.05
    return _changed(layer, "massive first token", query=query, key=key, value=value)


def strong_sinks(size: int) -> Layer:
    """Nine tenths of the attention are on the first token, whose value is nearly zero."""
    return dataclasses.replace(usual(size, sink=13.5), about="attention sinks: 0.9 on the first token")


def low_entropy(size: int) -> Layer:
    """Every query looks for one token anywhere before it, as induction heads do."""
    layer = usual(size, locality=0.0, sink=2.0)
    rng = np.random.default_rng(1)
    content = rng.standard_normal((KV_NUM_HEADS, TOKENS, size))
    target = (rng.random(TOKENS) * np.arange(TOKENS)).astype(int)
    group = NUM_HEADS // KV_NUM_HEADS
    constant = layer.key.mean(1, keepdims=True)
    key = rotate(content) + constant
    key[:, 0] = layer.key[:, 0]
    wanted = rotate(content)[:, target] * 14.0 / np.sqrt(size)
    query = np.repeat(wanted, group, 0) + 0.5 * layer.query
    return _changed(layer, "low entropy: each query looks for one token", query=query, key=key)


def plain_outliers(size: int, seed: int = 0) -> Layer:
    """Normal random numbers, two key channels scaled by 8: a hard case, and unlike a real layer."""
    rng = np.random.default_rng(seed)
    query = 1.5 * rng.standard_normal((NUM_HEADS, TOKENS, size))
    key, value = (rng.standard_normal((KV_NUM_HEADS, TOKENS, size)) for _ in range(2))
    key[..., [5, 77 % size]] *= 8
    return _layer(query, key, value, "random numbers, two key channels scaled by 8")


LAYERS: Mapping[str, Callable[[int], Layer]] = {
    "usual": usual,
    "constant_offset": constant_offset,
    "moving_offset": moving_offset,
    "outliers_8": outliers_8,
    "outliers_20": outliers_20,
    "massive_first_token": massive_first_token,
    "strong_sinks": strong_sinks,
    "low_entropy": low_entropy,
    "plain_outliers": plain_outliers,
}
FORMATS: Mapping[str, KvFormat] = {
    "int4, no rotation": dataclasses.replace(PRESETS["int4"], rotation="none"),
    "int4": PRESETS["int4"],
    "default": PRESETS["default"],
    "default, 8-bit keys": dataclasses.replace(PRESETS["default"], key_bits=8),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the attention of the second half is spread: means over heads and queries."""

    sink: float
    newest: float
    effective_tokens: float


def shape_of(layer: Layer, newest: int = 64, first: int = 4) -> Shape:
    """Shares of the first and the newest tokens, and the exponential of the entropy."""
    size, group = layer.query.shape[-1], NUM_HEADS // KV_NUM_HEADS
    positions = np.arange(TOKENS // 2, TOKENS, 16)
    sinks, recent, tokens = [], [], []
    for head in range(NUM_HEADS):
        query, key = layer.query[head, positions].astype(np.float64), layer.key[head // group]
        scores = query @ key.T.astype(np.float64) / np.sqrt(size)
        age = positions[:, None] - np.arange(TOKENS)
        scores = np.where(age >= 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        sinks.append(weights[:, :first].sum(1).mean())
        recent.append(np.where((age >= 0) & (age < newest), weights, 0).sum(1).mean())
        tokens.append(np.exp(-(weights * np.log(np.maximum(weights, 1e-300))).sum(1)).mean())
    return Shape(float(np.mean(sinks)), float(np.mean(recent)), float(np.mean(tokens)))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Relative output errors of hard attention layers.")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--json", type=Path, help="append one record for each layer to this file")
    options = parser.parse_args()
    print(f"| layer | head size | {' | '.join(FORMATS)} | first 4 | newest 64 | effective tokens |")
    print("|" + " --- |" * (len(FORMATS) + 5))
    for name, make in LAYERS.items():
        for size in options.head_dim:
            layer = make(size)
            exact = layer.attention.output(EXACT)
            errors = {kind: layer.attention.error(chosen, exact) for kind, chosen in FORMATS.items()}
            shape = shape_of(layer)
            cells = " | ".join(f"{error:.3f}" for error in errors.values())
            print(
                f"| {name} | {size} | {cells} | {shape.sink:.2f} | {shape.newest:.2f} | "
                f"{shape.effective_tokens:.0f} |",
                flush=True,
            )
            if options.json:
                record = {"layer": name, "head_dim": size, "errors": errors, **dataclasses.asdict(shape)}
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
