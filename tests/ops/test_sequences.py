"""Explicit handles, ragged batches, default sequences: each row is the sequence it would be alone."""

import gc
from dataclasses import replace

import numpy as np
import pytest
from op_graph import Graph
from op_harness import History, OpSession, assert_close, check_dump, feed, random_history, sequences
from reference import OpConfig, attend

from kvfuse import _native

CONFIG = OpConfig(n_recent=3, block=2, n_sink=1)
CONFIGS = {"low": OpConfig(), "mixed": CONFIG, "centred": replace(CONFIG, key_center="block", group_size=32)}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_ragged_batch_is_each_row_alone(config: OpConfig) -> None:
    session = OpSession(config)
    history = random_history(1, 20, batch=3)
    pasts = [7, 0, 12]
    with sequences(3) as handles:
        for row, past in enumerate(pasts):
            if past:
                session.run(*history.row(row).part(0, past), kv_sequence=[handles[row]])
        steps = [history.row(row).part(past, past + 5) for row, past in enumerate(pasts)]
        new = [np.concatenate(tensors) for tensors in zip(*steps, strict=True)]
        results = session.run_all(*new, kv_sequence=handles)
        assert results["past_lengths"].tolist() == pasts
        expected = attend(config, new[0], history.key, history.value, past=pasts)
        assert_close(results["output_0"], expected)
        with sequences(3) as others:
            for row, past in enumerate(pasts):
                alone = feed(session, history.row(row), (past, 5), kv_sequence=[others[row]])
                np.testing.assert_array_equal(results["output_0"][row], alone[0, :, past:])
        for row, past in enumerate(pasts):
            assert _native.sequence_length(handles[row]) == past + 5
            dump = _native.dump_layer(handles[row], config.layer)
            check_dump(dict(dump), config, history.key[row], history.value[row], past + 5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_ragged_rows_own_their_first_mask_columns(config: OpConfig) -> None:
    graph = Graph((config,), optional=("key_padding", "attention_bias"))
    session = OpSession(graph)
    history = random_history(2, 12, batch=2)
    rng = np.random.default_rng(3)
    with sequences(2) as handles:
        bias = np.zeros((1, 1, 1, 6), np.float32)
        session.run(
            *history.row(0).part(0, 6), kv_sequence=handles[:1], key_padding=[[1] * 6], attention_bias=bias
        )
        new = [
            np.concatenate(pair)
            for pair in zip(history.row(0).part(6, 8), history.row(1).part(0, 2), strict=True)
        ]
        padding = np.array([[0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0, 0]])
        bias = rng.standard_normal((2, 1, 2, 8)).astype(np.float32)
        found = session.run(*new, kv_sequence=handles, key_padding=padding, attention_bias=bias)
        expected = attend(
            config,
            new[0],
            history.key,
            history.value,
            past=[6, 0],
            key_padding=padding,
            attention_bias=bias,
        )
        assert_close(found, expected)


def test_handles_may_change_rows_between_runs() -> None:
    session = OpSession(CONFIG)
    history = random_history(4, 9, batch=3)
    with sequences(3) as handles, sequences(3) as others:
        straight = feed(session, history, (4, 5), kv_sequence=others)
        first = session.run(*history.part(0, 4), kv_sequence=handles)
        order = [2, 0, 1]
        turned = History(*(tensor[order] for tensor in (history.query, history.key, history.value)))
        second = session.run(*turned.part(4, 9), kv_sequence=[handles[row] for row in order])
        np.testing.assert_array_equal(first, straight[:, :, :4])
        np.testing.assert_array_equal(second, straight[order, :, 4:])


def test_sessions_share_nothing() -> None:
    history = random_history(5, 10)
    first, second = OpSession(CONFIG), OpSession(CONFIG)
    expected = feed(OpSession(CONFIG), history, (4, 6))
    feed(first, random_history(6, 7), (7,))
    found = feed(second, history, (4,))
    feed(first, random_history(7, 3), (3,))
    found = np.concatenate([found, feed(second, history, (6,), begin=4)], axis=2)
    np.testing.assert_array_equal(found, expected)
    assert set(first.default_sequences()).isdisjoint(second.default_sequences())
    assert [_native.sequence_length(handle) for handle in first.default_sequences()] == [10]


def test_explicit_handles_leave_the_default_sequences_alone() -> None:
    session = OpSession(CONFIG)
    history, other = random_history(8, 10), random_history(9, 10)
    expected = feed(OpSession(CONFIG), history, (5, 5))
    first = feed(session, history, (5,))
    with sequences(1) as handles:
        feed(session, other, (6,), kv_sequence=handles)
        second = feed(session, history, (5,), begin=5)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=2), expected)


def test_two_layers_with_identical_inputs_keep_separate_state() -> None:
    layers = (
        replace(CONFIG, layer="a"),
        replace(OpConfig(), layer="b", key_bits=8),
        replace(CONFIG, layer="c"),
    )
    session = OpSession(Graph(layers))
    history = random_history(10, 14)
    begin = 0
    for size in (6, 1, 7):
        results = session.run_all(*history.part(begin, begin + size))
        for index, layer in enumerate(layers):
            query = history.query[:, :, begin : begin + size]
            expected = attend(layer, query, history.key, history.value, past=begin)
            assert_close(results[f"output_{index}"], expected)
        begin += size
    for index, layer in enumerate(layers):
        check_dump(session.dump(0, index), layer, history.key[0], history.value[0], 14)
    assert set(_native.sequence_nbytes(session.default_sequences()[0])) == {"a", "b", "c"}


def test_scalar_past_length_of_equal_rows() -> None:
    session = OpSession(Graph((CONFIG,), uniform=True))
    history = random_history(11, 9, batch=2)
    for begin, end in ((0, 4), (4, 5), (5, 9)):
        results = session.run_all(*history.part(begin, end))
        assert results["past_length"].shape == ()
        assert results["past_length"] == begin
        assert results["past_lengths"].tolist() == [begin, begin]


def test_no_new_tokens_change_nothing() -> None:
    session = OpSession(CONFIG)
    history = random_history(12, 6, batch=2)
    for length in (0, 6):
        if length:
            session.run(*history.part(0, length))
        before = [session.dump(row) for row in range(2)] if length else []
        results = session.run_all(*history.part(0, 0))
        assert results["output_0"].shape == (2, 4, 0, 16)
        assert results["past_lengths"].tolist() == [length] * 2
        for row, dump in enumerate(before):
            np.testing.assert_equal(session.dump(row), dump)


def test_sequences_die_with_their_session() -> None:
    gc.collect()
    before = _native.live_sequences()
    session = OpSession(CONFIG)
    session.run(*random_history(13, 3, batch=4).part(0, 3))
    token = session.token
    assert _native.live_sequences() == before + 4
    del session
    gc.collect()
    assert _native.live_sequences() == before
    assert _native.default_sequences(token) is None


def test_explicit_sequences_outlive_a_session_of_the_same_model() -> None:
    history = random_history(14, 9)
    with sequences(1) as handles:
        first = OpSession(CONFIG)
        one = first.run(*history.part(0, 5), kv_sequence=handles)
        del first
        gc.collect()
        two = OpSession(CONFIG).run(*history.part(5, 9), kv_sequence=handles)
    np.testing.assert_array_equal(
        np.concatenate([one, two], axis=2), feed(OpSession(CONFIG), history, (5, 4))
    )


def test_unknown_session_token_has_no_default_sequences() -> None:
    assert _native.default_sequences("no such session") is None
