"""Outputs of the device kernels against the NumPy model: formats, masks, groups of heads, splits, chunks."""

from dataclasses import replace

import numpy as np
import pytest
from caches import Tokens, assert_close, feed, make, model, random_tokens, step
from reference import OpConfig

PRESET = OpConfig(codes="full", group_size=32, n_recent=64, block=64, n_sink=4, key_center="block")
FORMATS = [
    OpConfig(),
    OpConfig(key_bits=8, value_bits=8, group_size=64),
    OpConfig(key_bits=16, value_bits=8),
    OpConfig(key_bits=8, value_bits=16, rotation="none"),
    OpConfig(n_recent=5, n_sink=3),
    OpConfig(n_recent=1000),
    OpConfig(n_recent=3, block=4, n_sink=2, key_center="block", codes="full"),
    replace(PRESET, n_recent=16),
]


def check_chunks(config: OpConfig, tokens: Tokens, chunks: list[int], **options: object) -> None:
    cache = make(config, tokens, **options)
    begin = 0
    for size in chunks:
        end = begin + size
        found = step(cache, config, tokens.part(begin, end))
        assert_close(found, model(config, tokens.part(0, end), size), f"tokens {begin} to {end}")
        begin = end


@pytest.mark.parametrize("config", FORMATS, ids=str)
@pytest.mark.parametrize("simd", [False, True])
def test_formats(config: OpConfig, simd: bool) -> None:
    check_chunks(config, random_tokens(0, 150, head_dim=64), [130, 1, 1, 18], simd=simd)


def test_preset_over_several_pages() -> None:
    check_chunks(PRESET, random_tokens(1, 300, heads=2, kv_heads=1, head_dim=64), [1, 200, 1, 97, 1])


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 9])
def test_groups_of_heads(heads: int) -> None:
    tokens = random_tokens(heads, 80, heads=2 * heads, kv_heads=2, head_dim=32)
    check_chunks(OpConfig(n_recent=7, n_sink=1), tokens, [77, 1, 2])


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(1, 3), (7, 12), (24, 20), (80, 96), (128, 256), (96, 300), (576, 40)]
)
@pytest.mark.parametrize("group_size", [0, 32, 64])
def test_head_sizes(head_dim: int, value_dim: int, group_size: int) -> None:
    tokens = random_tokens(head_dim, 70, heads=2, kv_heads=1, head_dim=head_dim, value_dim=value_dim)
    check_chunks(OpConfig(group_size=group_size, n_recent=3), tokens, [68, 1, 1])


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "config", [OpConfig(), OpConfig(n_recent=1000), replace(PRESET, n_recent=0)], ids=str
)
def test_splits_merge(config: OpConfig, splits: int) -> None:
    check_chunks(
        config, random_tokens(splits, 333, heads=3, kv_heads=1, head_dim=16), [331, 1, 1], splits=splits
    )


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("window", [-1, 0, 9, 70])
@pytest.mark.parametrize("n_recent", [0, 4, 100])
def test_windows(window: int, n_recent: int, causal: int) -> None:
    config = OpConfig(window_left=window, n_recent=n_recent, causal=causal, n_sink=2)
    check_chunks(config, random_tokens(window + 1, 150, heads=2, kv_heads=1, head_dim=16), [80, 1, 68, 1])


@pytest.mark.parametrize("n_recent", [0, 4, 100])
@pytest.mark.parametrize("softcap", [0.0, 2.5])
def test_masks(softcap: float, n_recent: int) -> None:
    rng = np.random.default_rng(n_recent)
    config = OpConfig(softcap=softcap, n_recent=n_recent, n_sink=3, causal=0)
    tokens = random_tokens(2, 90, heads=4, head_dim=16)
    padding = (rng.random(90) > 0.3).astype(np.uint8)
    padding[:9] = 0
    bias = rng.standard_normal((4, 90, 90)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    bias[2, 88] = -np.inf  # a query that sees nothing
    sink = np.array([0.5, -np.inf, 3, -1], np.float32)
    cache = make(config, tokens)
    for begin, end in ((0, 70), (70, 71), (71, 90)):
        masks = {"padding": padding[:end], "bias": bias[:, begin:end, :end].copy(), "head_sink": sink}
        found = step(cache, config, tokens.part(begin, end), **masks)
        expected = model(
            config, tokens.part(0, end), end - begin, key_padding=padding,
            attention_bias=bias[:, begin:end, :end].astype(np.float64), head_sink=sink,
        )  # fmt: skip
        assert_close(found, expected)
    assert not found[2, 17].any()


def test_all_padded_gives_zeros() -> None:
    tokens = random_tokens(4, 70)
    for config in (OpConfig(), OpConfig(n_recent=100)):
        found = step(make(config, tokens), config, tokens, padding=np.zeros(70, np.uint8))
        np.testing.assert_array_equal(found, np.zeros_like(found))


@pytest.mark.parametrize(
    "config", [OpConfig(), OpConfig(n_recent=8, n_sink=2), OpConfig(value_bits=16, key_bits=16)], ids=str
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_that_is_not_finite_poisons_only_who_sees_it(config: OpConfig, bad: float) -> None:
    tokens = random_tokens(5, 90, heads=2, kv_heads=2, head_dim=16)
    tokens.key[0, 40, 3] = tokens.value[1, 50, 5] = bad
    tokens.query[1, 3] = bad
    cache = make(config, tokens)
    found = step(cache, config, tokens)
    with np.errstate(all="ignore"):
        expected = model(config, tokens, 90)
    np.testing.assert_array_equal(
        np.isnan(found), np.isnan(expected) | ~np.isfinite(expected) & np.isnan(found)
    )
    fine = np.isfinite(expected)
    assert_close(np.where(fine, found, 0), np.where(fine, expected, 0))
    assert fine[0, :40].all()
    # Padding hides the bad tokens from later queries.
    padding = np.ones(91, np.uint8)
    padding[[40, 50]] = 0
    more = random_tokens(6, 1, heads=2, kv_heads=2, head_dim=16)
    assert np.isfinite(step(cache, config, more, padding=padding)).all()


def test_chunks_agree_with_the_whole() -> None:
    config = replace(PRESET, n_recent=32, window_left=150)
    tokens = random_tokens(7, 260, heads=2, kv_heads=1, head_dim=32)
    whole = feed(make(config, tokens), config, tokens, [260])
    for chunks in ([128, 132], [1, 3, 100, 1, 155], [64, 64, 64, 64, 4]):
        np.testing.assert_allclose(
            feed(make(config, tokens), config, tokens, chunks), whole, rtol=0, atol=1e-5
        )


def test_variants_agree_to_the_bit() -> None:
    """They differ in nothing but how the integer dot is made."""
    for config in (OpConfig(), OpConfig(key_bits=8), PRESET):
        tokens = random_tokens(8, 140, head_dim=64)
        scalar, simd = (
            feed(make(config, tokens, simd=simd), config, tokens, [138, 1, 1]) for simd in (False, True)
        )
        np.testing.assert_array_equal(scalar, simd)


def test_large_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="head sizes up to 1024; found 1025"):
        make(OpConfig(), random_tokens(0, 1, head_dim=1025))
