"""Layer caches on the CPU and on a device, fed the same tokens; K kv heads, H heads, T tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference import OpConfig, attend_row, canonical_state

from kvfuse import _native

Array = NDArray[Any]
# KVFUSE_TEST_DEVICE names another one.
DEVICE = os.environ.get("KVFUSE_TEST_DEVICE", "emulated")
_FORMAT = [
    "key_bits",
    "value_bits",
    "group_size",
    "codes",
    "rotation",
    "n_recent",
    "block",
    "n_sink",
    "window_left",
    "key_center",
]


def make(config: OpConfig, tokens: Tokens, device: str = DEVICE, **options: Any) -> _native.LayerCache:
    """An empty cache for such tokens."""
    sizes = {
        "kv_num_heads": tokens.key.shape[0],
        "head_dim": tokens.key.shape[2],
        "value_dim": tokens.value.shape[2],
    }
    return _native.LayerCache(
        device=device, **sizes, **{name: getattr(config, name) for name in _FORMAT}, **options
    )


@dataclass(frozen=True)
class Tokens:
    """Query [H, T, D], key [K, T, D] and value [K, T, V] of one sequence."""

    query: Array
    key: Array
    value: Array

    def part(self, begin: int, end: int) -> Tokens:
        """The tokens [begin, end)."""
        return Tokens(*(getattr(self, field.name)[:, begin:end] for field in fields(self)))

    def then(self, other: Tokens) -> Tokens:
        """These tokens and those of another."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return Tokens(*(np.concatenate(pair, axis=1) for pair in pairs))

    @property
    def count(self) -> int:
        return int(self.key.shape[1])


def random_tokens(
    seed: int,
    count: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    value_dim: int | None = None,
) -> Tokens:
    """Unit normal tokens."""
    rng = np.random.default_rng(seed)
    shapes = ((heads, count, head_dim), (kv_heads, count, head_dim), (kv_heads, count, value_dim or head_dim))
    return Tokens(*(rng.standard_normal(shape).astype(np.float32) for shape in shapes))


def step(cache: _native.LayerCache, config: OpConfig, tokens: Tokens, **options: Any) -> Array:
    """Appends the tokens and attends: the output [H, T, V]."""
    scale = float(np.float32(1 / np.sqrt(tokens.key.shape[2])) if config.scale is None else config.scale)
    result: Array = cache.step(
        tokens.query,
        tokens.key,
        tokens.value,
        scale=scale,
        causal=bool(config.causal),
        softcap=config.softcap,
        **options,
    )
    return result


def feed(cache: _native.LayerCache, config: OpConfig, tokens: Tokens, chunks: list[int]) -> Array:
    """Appends the tokens in chunks: all outputs [H, T, V]."""
    outputs, begin = [], 0
    for size in chunks:
        outputs.append(step(cache, config, tokens.part(begin, begin + size)))
        begin += size
    return np.concatenate(outputs, axis=1)


def model(config: OpConfig, history: Tokens, steps: int, **masks: Any) -> NDArray[np.float64]:
    """What the NumPy model gives for the last `steps` tokens of a history."""
    return attend_row(config, history.query[:, history.count - steps :], history.key, history.value, **masks)


def assert_close(found: Array, expected: Array, what: str = "") -> None:
    """Compares outputs of unit normal tokens with the model in float64.

    Scores are sums of at most D = 256 products of size |s| <= 8, each rounded once: a random walk of
    sqrt(256) * 2^-24 * 8 = 8e-6 at most, and exp and tanh (2 ulp in every math library used, 4 ulp promised
    by Metal) add 8 * 2^-22 = 2e-6 to a score. Softmax and a weighted mean of |v| <= 5 keep that size: 1e-5.
    """
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=what)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=what)


def assert_same(found: dict[str, Any], expected: dict[str, Any], skip: tuple[str, ...] = ()) -> None:
    """Bit equality of two states, except that every NaN is the same NaN."""
    assert found.keys() == expected.keys()
    for name in found.keys() - set(skip):
        if isinstance(found[name], int):
            assert found[name] == expected[name], name
            continue
        left, right = np.ascontiguousarray(found[name]), np.ascontiguousarray(expected[name])
        assert left.dtype == right.dtype
        assert left.shape == right.shape, name
        if left.dtype.kind == "f":
            np.testing.assert_array_equal(np.isnan(left), np.isnan(right), err_msg=name)
            left, right = (np.nan_to_num(side, nan=0.0).view(np.uint32) for side in (left, right))
        np.testing.assert_array_equal(left, right, err_msg=name)


def assert_canonical(found: dict[str, Any], config: OpConfig, tokens: Tokens) -> None:
    """The state is that of the NumPy model after these tokens, window and sinks included."""
    expected = canonical_state(config, tokens.key, tokens.value, tokens.count)
    begin = found["begin"]
    for name in ("key_codes", "key_scales", "value_codes", "value_scales"):
        expected[name] = expected[name][:, begin:]
    if config.centred:
        expected["key_means"] = expected["key_means"][:, begin // config.block :]
    exact_begin = found["exact_begin"]
    expected["exact_key"], expected["exact_value"] = (
        tokens.key[:, exact_begin:],
        tokens.value[:, exact_begin:],
    )
    expected |= {"begin": begin, "exact_begin": exact_begin}
    assert_same(found, expected)
