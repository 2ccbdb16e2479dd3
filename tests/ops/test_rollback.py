"""kv_past_length and truncate: afterwards nothing tells that the dropped tokens were ever there."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from op_graph import Graph
from op_harness import History, OpSession, assert_close, check_dump, feed, random_history, sequences
from reference import OpConfig, attend_row

from kvfuse import _native

CENTRED = OpConfig(n_recent=5, block=4, n_sink=2, key_center="block", group_size=32, codes="full")
CONFIGS = {
    "low": OpConfig(),
    "recent": OpConfig(n_recent=4),
    "sinks": OpConfig(n_recent=2, n_sink=6),
    "blocks": OpConfig(n_recent=3, block=8),
    "blocks_only": OpConfig(block=4, key_bits=8, value_bits=8),
    "centred": CENTRED,
    "half": OpConfig(n_recent=3, key_bits=16, value_bits=16),
    "window": OpConfig(n_recent=3, window_left=6),
    "exact": OpConfig(n_recent=100, block=64),
}


def spliced(history: History, other: History, kept: int) -> History:
    """The first `kept` tokens of one history followed by another's."""
    pairs = zip(history.part(0, kept), other.part(0, 99), strict=True)
    return History(*(np.concatenate(pair, axis=2) for pair in pairs))


def check_same(session: OpSession, clean: OpSession, history: History, length: int) -> None:
    """Both sessions hold the model's canonical state."""
    config = session.graph.layers[0]
    for one in (session, clean):
        assert [_native.sequence_length(handle) for handle in one.default_sequences()] == [length]
        check_dump(one.dump(), config, history.key[0], history.value[0], length)


@pytest.mark.parametrize("kept", range(5))
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rejected_drafts(config: OpConfig, kept: int) -> None:
    """Nine tokens, four drafts of which `kept` stay, five more: as if the other drafts never came."""
    drafted, after = random_history(1, 13), random_history(2, 5)
    history = spliced(drafted, after, 9 + kept)
    session, clean = OpSession(config), OpSession(config)
    feed(session, drafted, (9, 4))
    found = feed(session, history, (1, 4), begin=9 + kept, kv_past_length=[9 + kept])
    feed(clean, history, (9 + kept,))
    expected = feed(clean, history, (1, 4), begin=9 + kept)
    np.testing.assert_array_equal(found, expected)
    check_same(session, clean, history, 14 + kept)


def shortest_exact(session: OpSession, length: int) -> int:
    """The shortest length that a roll-back reaches with all the floats that the rule then asks for."""
    config = session.graph.layers[0]
    if config.n_recent == 0 and config.block == 1:
        return 0
    held = _native.sequence_exact_begin(session.default_sequences()[0])
    ends = (max(0, shorter - config.n_recent) // config.block * config.block for shorter in range(length))
    return next((shorter for shorter, end in enumerate(ends) if end >= held), length)


@pytest.mark.parametrize("total", [61, 150])
@pytest.mark.parametrize("dropped", [0, 1, 4, 7, "all_that_is_exact"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_repeated_rollback_of_a_long_sequence(config: OpConfig, dropped: int | str, total: int) -> None:
    """Rolls back within the slack again and again, also across block borders."""
    drafted = random_history(3, total)
    session, clean = OpSession(config), OpSession(config)
    feed(session, drafted, (total,))
    if isinstance(dropped, str):  # a window's floats outlive its pages: there 7 has to do
        dropped = 7 if config.window_left >= 0 else total - shortest_exact(session, total)
        assert dropped >= 7
    length = total - dropped
    for _ in range(3):
        feed(session, random_history(4, dropped), (dropped,), kv_past_length=[length])
    after = random_history(5, 9)
    history = spliced(drafted, after, length)
    found = feed(session, history, (2, 7), begin=length, kv_past_length=[length])
    feed(clean, history, (length,))
    np.testing.assert_array_equal(found, feed(clean, history, (2, 7), begin=length))
    check_same(session, clean, history, length + 9)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_truncate_without_running(config: OpConfig) -> None:
    history = random_history(6, 40)
    session = OpSession(config)
    feed(session, history, (40,))
    handle = session.default_sequences()[0]
    for length in (40, 38, 35, 0):
        _native.truncate_sequence(handle, length)
        assert _native.sequence_length(handle) == length
        check_dump(session.dump(), config, history.key[0], history.value[0], length)
    fresh = feed(OpSession(config), history, (20, 20))
    np.testing.assert_array_equal(feed(session, history, (20, 20)), fresh)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_starting_again(config: OpConfig) -> None:
    session = OpSession(config)
    feed(session, random_history(7, 33), (20, 13))
    again = random_history(8, 25)
    found = feed(session, again, (10, 1, 14), kv_past_length=[0])
    clean = OpSession(config)
    np.testing.assert_array_equal(found, feed(clean, again, (10, 1, 14)))
    check_same(session, clean, again, 25)


def test_starting_again_may_change_batch_and_sizes() -> None:
    session = OpSession(OpConfig())
    feed(session, random_history(9, 5, batch=2), (5,))
    other = random_history(10, 6, batch=3, num_heads=6, kv_heads=3, head_dim=24, value_dim=8)
    found = feed(session, other, (4, 2), kv_past_length=[0])
    np.testing.assert_array_equal(found, feed(OpSession(OpConfig()), other, (4, 2)))


def test_rows_roll_back_each_to_its_own_length() -> None:
    config = CONFIGS["recent"]
    history, after = random_history(11, 12, batch=3), random_history(12, 4, batch=3)
    session = OpSession(config)
    feed(session, history, (12,))
    kept = [10, 12, 9]
    results = session.run_all(*after.part(0, 4), kv_past_length=[10, -1, 9])
    assert results["past_lengths"].tolist() == kept
    for row, length in enumerate(kept):
        clean = spliced(history.row(row), after.row(row), length)
        expected = feed(OpSession(config), clean, (length, 4))[0, :, length:]
        np.testing.assert_array_equal(results["output_0"][row], expected)


def test_going_on_is_the_same_as_naming_the_length() -> None:
    history = random_history(13, 12)
    plain, named = OpSession(CENTRED), OpSession(CENTRED)
    expected = feed(plain, history, (5, 7))
    first = named.run(*history.part(0, 5), kv_past_length=[-1])
    second = named.run(*history.part(5, 12), kv_past_length=[5])
    np.testing.assert_array_equal(np.concatenate([first, second], axis=2), expected)


def test_scalar_past_length_after_rollback() -> None:
    session = OpSession(Graph((OpConfig(),), uniform=True))
    history = random_history(14, 8, batch=2)
    session.run(*history.part(0, 8))
    assert session.run_all(*history.part(3, 4), kv_past_length=[3])["past_length"] == 3
    assert session.run_all(*history.part(3, 4))["past_length"] == 4


def test_rollback_beyond_the_slack_turns_tokens_low_bit() -> None:
    """Floats that are gone stay gone: those tokens are low-bit, everything else follows the usual rule."""
    config = OpConfig(n_recent=8, n_sink=2)
    history, after = (
        random_history(15, 600, num_heads=2, kv_heads=1),
        random_history(16, 12, num_heads=2, kv_heads=1),
    )
    session = OpSession(config)
    feed(session, history, (600,))
    handle = session.default_sequences()[0]
    length = 100
    lost_before = min(length, _native.sequence_exact_begin(handle))
    assert lost_before == length, "600 tokens fit in the slack: this test needs a longer history"
    whole = spliced(history, after, length)
    begin = length
    for size in (1, 1, 10):
        end = begin + size
        query, key, value = whole.part(begin, end)
        found = session.run(query, key, value, kv_past_length=[begin if begin == length else -1])
        rows: dict[str, Any] = {"exact_from": lost_before}
        expected = attend_row(config, query[0], whole.key[0, :, :end], whole.value[0, :, :end], **rows)
        assert_close(found[0], expected)
        begin = end
    assert _native.sequence_exact_begin(handle) >= length


def test_centred_blocks_beyond_the_slack_still_run() -> None:
    session = OpSession(replace(CENTRED, block=8))
    history = random_history(17, 600, num_heads=2, kv_heads=1)
    feed(session, history, (600,))
    found = feed(session, history, (5, 40), begin=100, kv_past_length=[100])
    plain = OpSession(replace(CENTRED, block=8))
    expected = feed(plain, history, (145,))[:, :, 100:]
    assert np.isfinite(found).all()
    # Only which tokens are low-bit differs: 4-bit error of unit tokens, far from that of a misplaced one.
    assert np.abs(found - expected).mean() < 0.1


def test_rollback_of_an_explicit_sequence() -> None:
    session = OpSession(CENTRED)
    drafted, after = random_history(18, 20), random_history(19, 6)
    with sequences(1) as handles:
        feed(session, drafted, (20,), kv_sequence=handles)
        history = spliced(drafted, after, 17)
        found = feed(session, history, (6,), begin=17, kv_sequence=handles, kv_past_length=[17])
        expected = feed(OpSession(CENTRED), history, (17, 6))[:, :, 17:]
        np.testing.assert_array_equal(found, expected)
        assert _native.sequence_length(handles[0]) == 23
