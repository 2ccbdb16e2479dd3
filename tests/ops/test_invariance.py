"""What must not depend on how tokens arrive: chunks, later tokens, other rows, and threads."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
from reference import OpConfig, plain_attention

CONFIGS = {
    "low": OpConfig(),
    "groups": OpConfig(group_size=32, codes="full"),
    "recent": OpConfig(n_recent=5, n_sink=2),
    "blocks": OpConfig(n_recent=3, block=8),
    "blocks_only": OpConfig(block=4, n_sink=1, key_bits=8),
    "centred": OpConfig(n_recent=6, block=4, key_center="block", codes="full", group_size=32),
    "half": OpConfig(n_recent=2, key_bits=16, value_bits=16),
    "window": OpConfig(n_recent=4, block=2, window_left=9),
}
LENGTH = 37
SPLITS = {
    "single": (1,) * LENGTH,
    "even": (9, 9, 9, 10),
    "ragged": (2, 1, 17, 1, 1, 8, 7),
    "zero_among": (5, 0, 20, 0, 12),
}
CANONICAL = ("key_codes", "key_scales", "key_means", "value_codes", "value_scales", "sink_key", "sink_value")


def assert_same_state(found: OpSession, expected: OpSession) -> None:
    """Same canonical bytes; the exact floats agree where both sessions hold them."""
    for row in range(len(expected.default_sequences())):
        one, other = found.dump(row), expected.dump(row)
        assert one.keys() == other.keys()
        assert (one["length"], one["encoded_end"]) == (other["length"], other["encoded_end"])
        for name in CANONICAL:
            if name in one:
                kept = min(
                    one[name].shape[1], other[name].shape[1]
                )  # windows may have freed more pages in one
                pair = [dump[name][:, dump[name].shape[1] - kept :] for dump in (one, other)]
                assert_same_bytes(*pair, name)
        begin = max(one["exact_begin"], other["exact_begin"])
        for name in ("exact_key", "exact_value"):
            pair = [dump[name][:, begin - dump["exact_begin"] :] for dump in (one, other)]
            assert_same_bytes(*pair, name)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_chunks_change_nothing(config: OpConfig, split: tuple[int, ...], dtype: str) -> None:
    graph = Graph((config,), dtype=dtype)
    history = random_history(1, LENGTH, batch=2, head_dim=40, dtype=dtype)
    whole, chunked = OpSession(graph), OpSession(graph)
    expected = feed(whole, history, (LENGTH,))
    found = feed(chunked, history, split)
    assert_close(found, expected, dtype)
    assert_same_state(chunked, whole)


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 11), min_size=1, max_size=8),
    config=st.sampled_from(list(CONFIGS.values())),
)
def test_any_chunks_give_the_model_state(sizes: list[int], config: OpConfig) -> None:
    total = sum(sizes)
    history = random_history(2, total, num_heads=2, kv_heads=1)
    session = OpSession(config)
    found = feed(session, history, sizes)
    check_state(session, history, total)
    if total:
        assert_close(found, feed(OpSession(config), history, (total,)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("split", [(LENGTH,), *SPLITS.values()], ids=["whole", *SPLITS])
@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("causal", [0, 1])
def test_exact_mode_is_plain_attention(causal: int, block: int, split: tuple[int, ...], dtype: str) -> None:
    config = OpConfig(n_recent=LENGTH + 1, block=block, causal=causal, scale=0.3)
    history = random_history(
        3, LENGTH, batch=2, num_heads=6, kv_heads=2, head_dim=96, value_dim=24, dtype=dtype
    )
    session = OpSession(Graph((config,), dtype=dtype))
    begin = 0
    for size in split:
        end = begin + size
        query, key, value = history.part(begin, end)
        found = session.run(query, key, value)
        if size:
            past = history.part(0, end)
            expected = plain_attention(
                query, past[1], past[2], scale=float(np.float32(0.3)), causal=bool(causal)
            )
            # scores are 3 times those of scale 1 / sqrt(96)
            assert_close(found, expected, dtype, scale=3)
        begin = end


def test_exact_mode_meets_the_bar_at_the_default_scale() -> None:
    history = random_history(4, 50, num_heads=8, head_dim=64)
    config = OpConfig(n_recent=51, block=64, n_sink=4, group_size=32, key_center="block", codes="full")
    found = feed(OpSession(config), history, (20, 1, 1, 28))
    expected = plain_attention(history.query, history.key, history.value, scale=0.125, causal=True)
    assert np.abs(found - expected).max() <= 1e-5


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_later_tokens_change_nothing_earlier(config: OpConfig) -> None:
    changed_from = 21
    first = random_history(5, LENGTH)
    second = History(*(tensor.copy() for tensor in (first.query, first.key, first.value)))
    other = random_history(6, LENGTH)
    for tensor, changed in (
        (second.query, other.query),
        (second.key, other.key),
        (second.value, other.value),
    ):
        tensor[:, :, changed_from:] = 1e3 * changed[:, :, changed_from:]
    outputs = [feed(OpSession(config), history, (LENGTH,)) for history in (first, second)]
    earlier: list[Array] = [output[:, :, :changed_from] for output in outputs]
    np.testing.assert_array_equal(*earlier)
    assert (outputs[0][:, :, changed_from:] != outputs[1][:, :, changed_from:]).all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rows_do_not_see_each_other(config: OpConfig) -> None:
    history = random_history(7, LENGTH, batch=3)
    together = OpSession(config)
    outputs = feed(together, history, SPLITS["ragged"])
    for row in range(3):
        alone = OpSession(config)
        np.testing.assert_array_equal(outputs[row], feed(alone, history.row(row), SPLITS["ragged"])[0])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_threads_change_nothing(config: OpConfig) -> None:
    history = random_history(8, 150, batch=2, num_heads=8, kv_heads=4, head_dim=32)
    sessions = [OpSession(config, threads=threads) for threads in (1, 3)]
    outputs = [feed(session, history, (100, 1, 49)) for session in sessions]
    assert_close(*outputs)
    assert_same_state(*sessions)


@pytest.mark.parametrize("n_recent", [0, 16, 128])
@pytest.mark.parametrize("window_left", [-1, 40])
def test_long_prompt_in_pieces(n_recent: int, window_left: int) -> None:
    config = replace(CONFIGS["groups"], n_recent=n_recent, window_left=window_left)
    history = random_history(9, 700, num_heads=2, kv_heads=1, head_dim=8)
    expected = feed(OpSession(config), history, (700,))
    for split in ((175,) * 4, (1, 99, 300, 7, 64, 200, 29)):
        assert_close(feed(OpSession(config), history, split), expected)
