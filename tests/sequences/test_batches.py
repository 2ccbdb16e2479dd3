"""Rows of a batch are sequences of their own: each equals the same tokens run alone."""

from dataclasses import replace

import numpy as np
import pytest
from op_graph import Graph
from op_harness import OpSession, assert_close, random_history, sequences
from token_model import FORMATS, VOCABULARY, check_outputs, check_state, rows, run, two_layers

import kvfuse
from kvfuse import _native

LENGTHS = (5, 3, 1)


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


@pytest.mark.parametrize("name", FORMATS)
def test_ragged_prefill_padded_on_the_right(name: str) -> None:
    """Rows are padded to one length, masked, and rolled back to their own lengths by the next run."""
    graph = two_layers(FORMATS[name], optional=("key_padding",))
    session, alone = OpSession(graph), OpSession(graph)
    held = prompts(1, LENGTHS)
    longest = max(LENGTHS)
    with sequences(len(held)) as handles, sequences(len(held)) as single:
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in held]
        mask = [[1] * length + [0] * (longest - length) for length in LENGTHS]
        results = run(session, handles, padded, key_padding=mask)
        for row, tokens in enumerate(held):
            expected = run(alone, [single[row]], [tokens], key_padding=[[1] * len(tokens)])
            for output in ("output_0", "output_1"):
                assert_close(results[output][row, :, : len(tokens)], expected[output][0])
        lengths: list[int] | None = list(LENGTHS)
        for step in range(6):
            new = [[(7 * step + row) % VOCABULARY] for row in range(len(held))]
            feeds = {} if lengths is None else {"kv_past_length": lengths}
            masks = np.ones((len(held), longest + step + 1), np.int64)
            results = run(session, handles, new, key_padding=masks, **feeds)
            lengths = None
            for row, tokens in enumerate(held):
                tokens += new[row]
                check_outputs(session, results, row, tokens, 1)
                check_state(session, handles[row], tokens)


@pytest.mark.parametrize("name", ["exact", "int4"])
def test_ragged_prefill_padded_on_the_left(name: str) -> None:
    """Masked tokens in front take room and nothing else: the formats here look at no absolute position."""
    graph = Graph((FORMATS[name],), optional=("key_padding",))
    session, alone = OpSession(graph), OpSession(graph)
    held = prompts(2, LENGTHS)
    longest = max(LENGTHS)
    with sequences(len(held)) as handles, sequences(len(held)) as single:
        padded = [[0] * (longest - len(tokens)) + tokens for tokens in held]
        mask = np.array([[0] * (longest - length) + [1] * length for length in LENGTHS])
        for step in range(6):
            fed = padded if step == 0 else [[(11 * step + row) % VOCABULARY] for row in range(len(held))]
            results = run(session, handles, fed, key_padding=mask)["output_0"]
            for row, tokens in enumerate(held):
                own = tokens if step == 0 else fed[row]
                seen = np.ones((1, len(tokens) + step), np.int64)
                expected = run(alone, [single[row]], [own], key_padding=seen)["output_0"]
                assert_close(results[row, :, -len(own) :], expected[0])
            mask = np.concatenate([mask, np.ones((len(held), 1), np.int64)], axis=1)


def test_masks_with_holes_and_a_masked_new_token() -> None:
    """Row b owns the first past_b + S columns, holes included; a row that sees nothing gives zeros."""
    graph = Graph((replace(FORMATS["int4"], causal=1),), optional=("key_padding",))
    session, alone = OpSession(graph), OpSession(graph)
    held = prompts(3, (6, 4, 1))
    holes = ([0, 1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0])
    with sequences(3) as handles, sequences(3) as single:
        for row, tokens in enumerate(held):
            run(session, [handles[row]], [tokens], key_padding=[[1] * len(tokens)])
            run(alone, [single[row]], [tokens], key_padding=[[1] * len(tokens)])
        results = run(session, handles, [[1], [2], [3]], key_padding=holes)["output_0"]
        for row, tokens in enumerate(held):
            own = [list(holes[row])[: len(tokens) + 1]]
            expected = run(alone, [single[row]], [[row + 1]], key_padding=own)["output_0"]
            np.testing.assert_array_equal(results[row], expected[0])
        assert not results[2].any()


@pytest.mark.parametrize("name", FORMATS)
def test_continuous_batching(name: str) -> None:
    """Rows come and go between runs, in any order, prompts beside single tokens."""
    session = OpSession(two_layers(FORMATS[name]))
    rng = np.random.default_rng(4)
    live: list[tuple[kvfuse.KvSequence, list[int]]] = []
    served = 0
    while served < 12:
        while len(live) < 4:
            live.append((kvfuse.KvSequence(), []))
        rng.shuffle(live)  # type: ignore[arg-type]
        batch = live[: rng.integers(1, 5)]
        count = int(rng.choice([1, 1, 1, 7]))
        fed = rng.integers(0, VOCABULARY, (len(batch), count)).tolist()
        results = run(session, [sequence.id for sequence, _ in batch], fed)
        for row, (sequence, tokens) in enumerate(batch):
            tokens += fed[row]
            check_outputs(session, results, row, tokens, count)
            if len(tokens) > 20:
                check_state(session, sequence.id, tokens)
                sequence.close()
                served += 1
        live = [(sequence, tokens) for sequence, tokens in live if len(tokens) <= 20]
    for sequence, _ in live:
        sequence.close()


@pytest.mark.parametrize("name", FORMATS)
def test_a_batch_is_bitwise_its_rows(name: str) -> None:
    """Beside whom a row runs changes no bit of its output or state."""
    session = OpSession(two_layers(FORMATS[name]))
    held = prompts(5, (9, 9, 9, 9))
    with sequences(4) as together, sequences(4) as single:
        results = run(session, together, held)["output_1"]
        for row, tokens in enumerate(held):
            np.testing.assert_array_equal(results[row], run(session, [single[row]], [tokens])["output_1"][0])
            assert _native.freeze_sequence(together[row]) == _native.freeze_sequence(single[row])


def test_empty_chunks_change_nothing() -> None:
    session = OpSession(two_layers(FORMATS["centred"]))
    query, key, value = rows([])
    with kvfuse.KvSequence() as sequence:
        run(session, [sequence.id], [[1, 2, 3]])
        before = sequence.freeze()
        output = session.run(query, key, value, kv_sequence=[sequence.id])
        assert output.shape == (1, 2, 0, 8)
        assert sequence.freeze() == before


def test_the_same_sequence_in_two_rows_is_refused() -> None:
    session = OpSession(two_layers(FORMATS["int4"]))
    with kvfuse.KvSequence() as sequence:
        run(session, [sequence.id], [[1, 2, 3]])
        with pytest.raises(Exception, match=rf"expected each sequence .* {sequence.id}"):
            run(session, [sequence.id] * 2, [[4], [5]])
        check_state(session, sequence.id, [1, 2, 3])


def test_random_histories_beside_each_other() -> None:
    """The same with dense random tokens, larger heads, and prompts longer than a page."""
    config = FORMATS["centred"]
    session, alone = OpSession(config), OpSession(config)
    histories = [random_history(seed, 150, head_dim=32) for seed in (1, 2)]
    with sequences(2) as handles, sequences(2) as single:
        session.run(*histories[0].part(0, 100), kv_sequence=handles[:1])
        session.run(*histories[1].part(0, 40), kv_sequence=handles[1:])
        pieces = zip(histories[0].part(100, 130), histories[1].part(40, 70), strict=True)
        found = session.run(*(np.concatenate(pair) for pair in pieces), kv_sequence=handles)
        for row, (history, past) in enumerate(zip(histories, (100, 40), strict=True)):
            alone.run(*history.part(0, past), kv_sequence=single[row : row + 1])
            expected = alone.run(*history.part(past, past + 30), kv_sequence=single[row : row + 1])
            np.testing.assert_array_equal(found[row], expected[0])
