"""Codes, scale bits, block means and int32 scores of the device kernels `==` the model's and the CPU's."""

import numpy as np
import pytest
from caches import Tokens, assert_canonical, assert_same, feed, make, random_tokens, step
from reference import OpConfig, fwht, quantize, unpack
from vectors import VECTOR_NAMES, named_vectors

FORMATS = [
    OpConfig(),
    OpConfig(codes="full"),
    OpConfig(codes="full", group_size=32),
    OpConfig(group_size=64, rotation="none"),
    OpConfig(key_bits=8, value_bits=8),
    OpConfig(key_bits=8, value_bits=8, group_size=32),
    OpConfig(key_bits=16, value_bits=4),
    OpConfig(key_bits=4, value_bits=16, rotation="none"),
    OpConfig(block=2, key_center="block", codes="full", group_size=32),
]


@pytest.mark.parametrize("name", VECTOR_NAMES)
@pytest.mark.parametrize("size", [7, 64, 80, 192])
def test_named_vectors_become_the_models_bytes(size: int, name: str) -> None:
    rows = named_vectors(size)[name]
    rows = rows[: len(rows) // 2 * 2]
    tokens = Tokens(rows[None], rows[None], rows[None, ::-1])
    for config in FORMATS:
        cache = make(config, tokens)
        step(cache, config, tokens)
        assert_canonical(cache.snapshot(), config, tokens)


@pytest.mark.parametrize("config", FORMATS, ids=str)
@pytest.mark.parametrize("value_dim", [5, 96])
def test_any_chunks_give_the_same_bytes(config: OpConfig, value_dim: int) -> None:
    tokens = random_tokens(1, 75, heads=2, head_dim=40, value_dim=value_dim)
    for chunks in ([75], [1] * 11 + [64], [3, 60, 1, 1, 10]):
        cache = make(config, tokens)
        feed(cache, config, tokens, chunks)
        assert_canonical(cache.snapshot(), config, tokens)


def integer_scores(config: OpConfig, tokens: Tokens, codes: np.ndarray) -> np.ndarray:
    """The dots [K, T * H / K, n, groups] of all queries with encoded keys of packed codes [K, n, bytes]."""
    query = fwht(tokens.query) if config.rotation == "hadamard" else tokens.query
    query_codes = quantize(query, 8, 0, "symmetric")[0].astype(np.int64)
    kv_heads, _, size = tokens.key.shape
    share, width = query.shape[0] // kv_heads, config.group_size or size
    query_codes = query_codes.reshape(kv_heads, share, tokens.count, size).swapaxes(1, 2)
    query_codes = query_codes.reshape(kv_heads, tokens.count * share, size)  # token by token
    key_codes = unpack(codes, config.key_bits, size).astype(np.int64)
    parts = [slice(begin, begin + width) for begin in range(0, size, width)]
    return np.stack([query_codes[..., part] @ key_codes[..., part].swapaxes(1, 2) for part in parts], axis=-1)


@pytest.mark.parametrize("simd", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [0, 32, 64])
@pytest.mark.parametrize("head_dim", [7, 64, 80, 160, 288])
def test_integer_scores(head_dim: int, group_size: int, bits: int, simd: bool) -> None:
    config = OpConfig(key_bits=bits, group_size=group_size, codes="full")
    tokens = random_tokens(head_dim, 67, heads=6, head_dim=head_dim, value_dim=4)
    tokens.key[:, 3] *= 1e4  # a token whose codes are all the extreme one or small
    tokens.query[:, 5] = 0
    cache = make(config, tokens, simd=simd)
    step(cache, config, tokens)
    queries = Tokens(tokens.query[:, 3:8], tokens.key[:, 3:8], tokens.value)
    found = cache.integer_scores(queries.query)
    np.testing.assert_array_equal(found, integer_scores(config, queries, cache.snapshot()["key_codes"]))
    assert found.any()


def test_every_code_times_every_query_code() -> None:
    """The extremes of both sides, where a 16-bit product or an unsigned code would show."""
    rows = np.resize(np.array([127, -127, -128, 1, -1, 64], np.float32), (6, 32))
    for bits, codes in ((8, "symmetric"), (4, "full"), (4, "symmetric")):
        config = OpConfig(key_bits=bits, codes=codes, rotation="none")
        key = np.concatenate([rows, -rows])[None]
        tokens = Tokens(key, key, key)
        for simd in (False, True):
            cache = make(config, tokens, simd=simd)
            step(cache, config, tokens)
            expected = integer_scores(config, tokens, cache.snapshot()["key_codes"])
            np.testing.assert_array_equal(cache.integer_scores(tokens.query), expected)


def test_block_means_skip_rows_that_are_not_finite() -> None:
    config = OpConfig(block=40, key_center="block", n_sink=2)
    tokens = random_tokens(3, 90, heads=2, head_dim=16)
    tokens.key[0, 7, 3], tokens.key[1, 35, 15], tokens.key[0, 36] = np.nan, np.inf, -np.inf
    tokens.key[1, 40:80] = np.nan  # a block without a finite row
    cpu, device = make(config, tokens, "cpu"), make(config, tokens)
    for begin, end in ((0, 33), (33, 34), (34, 90)):
        step(cpu, config, tokens.part(begin, end))
        step(device, config, tokens.part(begin, end))
        assert_same(device.snapshot(), cpu.snapshot())
    assert_canonical(device.snapshot(), config, tokens)
