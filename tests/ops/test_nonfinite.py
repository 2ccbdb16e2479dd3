"""NaN, infinities and extremes: only queries that see the token suffer, no other token's bytes change."""

from dataclasses import replace

import numpy as np
import pytest
from op_graph import Graph
from op_harness import (
    Array,
    History,
    OpSession,
    assert_close,
    assert_same_bytes,
    check_state,
    feed,
    random_history,
)
from reference import OpConfig, attend, plain_attention

LENGTH, POISONED = 20, 7
CONFIGS = {
    "low": OpConfig(),
    "groups": OpConfig(group_size=32, codes="full", key_bits=8),
    "mixed": OpConfig(n_recent=3, block=4, n_sink=2),
    "centred": OpConfig(n_recent=3, block=4, n_sink=2, key_center="block", codes="full"),
    "half": OpConfig(key_bits=16, value_bits=16),
    "exact": OpConfig(n_recent=100),
}
# 1e38 overflows in the rotation's sums of 16 channels and poisons like infinity wherever it is rotated.
BAD_TOKENS = {"nan": np.nan, "inf": np.inf, "minus_inf": -np.inf, "huge": 1e38}


def poisoned_history(which: str, bad: float, *, every_channel: bool = False) -> History:
    history = random_history(1, LENGTH, head_dim=16)
    tensor = getattr(history, which)
    tensor[:, 1, POISONED, slice(None) if every_channel else 5] = (
        bad  # one kv head only: heads 2 and 3 read it
    )
    return history


@pytest.mark.parametrize("split", [(LENGTH,), (5, 1, 1, 1, 12)], ids=["whole", "ragged"])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_nan_token_poisons_who_sees_it(config: OpConfig, which: str, split: tuple[int, ...]) -> None:
    history = poisoned_history(which, np.nan)
    session = OpSession(config)
    found = feed(session, history, split)
    assert np.isfinite(found[:, :2]).all()
    assert np.isfinite(found[:, :, :POISONED]).all()
    seen = found[:, 2:, POISONED:]
    assert np.isnan(seen).all() if which == "key" else np.isnan(seen).any(axis=-1).all()
    assert_close(found, attend(config, history.query, history.key, history.value))
    check_state(session, history, LENGTH)


@pytest.mark.parametrize("bad", BAD_TOKENS.values(), ids=BAD_TOKENS)
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_other_tokens_and_heads_keep_their_bytes(config: OpConfig, which: str, bad: float) -> None:
    history = poisoned_history(which, bad, every_channel=True)
    session, clean = OpSession(config), OpSession(config)
    found = feed(session, history, (LENGTH,))
    expected = feed(clean, random_history(1, LENGTH), (LENGTH,))
    np.testing.assert_array_equal(found[:, :2], expected[:, :2])
    np.testing.assert_array_equal(found[:, :, :POISONED], expected[:, :, :POISONED])
    check_state(session, history, LENGTH)
    dumps = session.dump(), clean.dump()
    for name in ("key_codes", "key_scales", "value_codes", "value_scales"):
        # A block's mean is over its finite tokens, so the block-mates of a token that falls out do change.
        changed = slice(4, 8) if config.centred and "key" in name else slice(POISONED, POISONED + 1)
        others = [np.delete(dump[name], np.arange(LENGTH)[changed], axis=1) for dump in dumps]
        assert_same_bytes(*others, name)
        assert_same_bytes(*(dump[name][:1] for dump in dumps), name)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_masked_poison_is_harmless(config: OpConfig, which: str, bad: float) -> None:
    graph = Graph((config,), optional=("key_padding",))
    history = poisoned_history(which, bad, every_channel=True)
    padding = np.ones((1, LENGTH), np.int64)
    padding[:, POISONED] = 0
    found = OpSession(graph).run(*history.part(0, LENGTH), key_padding=padding)
    assert np.isfinite(found).all()
    assert_close(found, attend(config, history.query, history.key, history.value, key_padding=padding))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_bad_query_spoils_only_itself(config: OpConfig, bad: float) -> None:
    history = random_history(2, LENGTH)
    expected = OpSession(config).run(*history.part(0, LENGTH))
    history.query[:, 2, 9, 3] = bad
    found = OpSession(config).run(*history.part(0, LENGTH))
    assert np.isnan(found[0, 2, 9]).all()
    found[0, 2, 9] = expected[0, 2, 9]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_exact_tokens_behave_as_in_the_float_graph(which: str, bad: float) -> None:
    history = poisoned_history(which, bad)
    found = OpSession(CONFIGS["exact"]).run(*history.part(0, LENGTH))
    with np.errstate(all="ignore"):
        expected = plain_attention(history.query, history.key, history.value, scale=0.25, causal=True)
    if (
        which == "value"
    ):  # a matrix product meets masked infinities with weight zero; the op never looks at them
        expected[:, :, :POISONED] = attend(CONFIGS["exact"], history.query, history.key, history.value)[
            :, :, :POISONED
        ]
    assert_close(found, expected)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_zero_rows_decode_to_zero(config: OpConfig) -> None:
    history = random_history(3, LENGTH)
    history.value[...] = 0
    history.key[:, :, ::2] = 0
    session = OpSession(config)
    assert not session.run(*history.part(0, LENGTH)).any()
    check_state(session, history, LENGTH)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("magnitude", [6e4, 1e-30, 1e-6])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_extreme_magnitudes(config: OpConfig, magnitude: float, dtype: str) -> None:
    """Near the largest half, and where half scales underflow; neither may give anything non-finite."""
    normal = random_history(4, LENGTH)
    limit = np.finfo(dtype).max / np.float32(1.01)
    scaled = [np.clip(tensor * np.float32(magnitude), -limit, limit) for tensor in (normal.key, normal.value)]
    key, value = (tensor.astype(dtype).astype(np.float32) for tensor in scaled)
    history = History(normal.query.astype(dtype).astype(np.float32), key, value)
    # Scores of the largest keys would be pure winner-takes-all; the scale brings them back to a few units.
    config = replace(config, scale=min(1.0, 0.25 / magnitude))
    session = OpSession(Graph((config,), dtype=dtype))
    found = feed(session, history, (7, 13))
    assert np.isfinite(found).all()
    expected = np.clip(attend(config, history.query, key, value), np.finfo(dtype).min, np.finfo(dtype).max)
    assert_close(found, expected, dtype, scale=max(magnitude, 1e-6))
    check_state(session, history, LENGTH)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_random_poison(dtype: str) -> None:
    rng = np.random.default_rng(5)
    for config in CONFIGS.values():
        history = random_history(6, LENGTH, dtype=dtype)
        for tensor in (history.key, history.value):
            spots: Array = rng.random(tensor.shape) < 0.01
            tensor[spots] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), spots.sum())
        session = OpSession(Graph((config,), dtype=dtype))
        found = feed(session, history, (6, 1, 13))
        expected = attend(config, history.query, history.key, history.value)
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
        check_state(session, history, LENGTH)
