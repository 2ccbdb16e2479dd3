import gc

import numpy as np
import pytest
from tiny_feeds import IDS, logits

import kvfuse
from kvfuse import _native

COUNT = len(IDS)


def test_sequences_of_one_session_are_independent(session):
    with kvfuse.KvSequence() as first, kvfuse.KvSequence() as second:
        a = logits(session, [IDS], kv_sequence=[first.id])
        logits(session, [IDS[:3]], kv_sequence=[second.id])
        assert (len(first), len(second), session.past_length) == (COUNT, 3, 0)
        b = logits(session, [IDS[3:]], past=3, kv_sequence=[second.id])
        np.testing.assert_allclose(b, a[:, 3:], atol=1e-5)


def test_a_batch_is_one_handle_per_row(session):
    with kvfuse.KvSequence() as first, kvfuse.KvSequence() as second:
        rows = logits(session, [IDS[:4], IDS[4:]], kv_sequence=[first.id, second.id])
        alone = logits(session, [IDS[4:]])
        np.testing.assert_allclose(rows[1], alone[0], atol=1e-5)
        assert (len(first), len(second)) == (4, 4)


def test_truncate_forgets_the_end(session):
    with kvfuse.KvSequence() as sequence:
        whole = logits(session, [IDS], kv_sequence=[sequence.id])
        sequence.truncate(5)
        assert len(sequence) == 5
        again = logits(session, [IDS[5:]], past=5, kv_sequence=[sequence.id])
        np.testing.assert_allclose(again, whole[:, 5:], atol=1e-5)


@pytest.mark.parametrize("length", [-1, COUNT + 1])
def test_truncating_outside_is_refused_and_changes_nothing(session, length):
    with kvfuse.KvSequence() as sequence:
        logits(session, [IDS], kv_sequence=[sequence.id])
        with pytest.raises(kvfuse.SequenceError, match=rf"\[sequence {sequence.id}\] .* found {length}"):
            sequence.truncate(length)
        assert len(sequence) == COUNT


def test_bytes_are_told_by_layer(session):
    with kvfuse.KvSequence() as sequence:
        assert (len(sequence), sequence.nbytes, sequence.nbytes_by_layer()) == (0, 0, {})
        logits(session, [IDS], kv_sequence=[sequence.id])
        layers = sequence.nbytes_by_layer()
        assert len(layers) == 2
        assert sequence.nbytes == sum(layers.values())
        # Exact mode keeps f32 keys and values: 2 kv heads of 16 channels.
        assert min(layers.values()) >= COUNT * 2 * 2 * 16 * 4


def test_exact_begin_tells_where_exact_floats_start(session):
    with kvfuse.KvSequence() as sequence:
        logits(session, [IDS], kv_sequence=[sequence.id])
        assert sequence.exact_begin == 0


def test_an_empty_sequence_is_still_a_sequence():
    with kvfuse.KvSequence() as sequence:
        assert sequence


def test_closing_frees_once_and_ends_every_use():
    before = _native.live_sequences()
    with kvfuse.KvSequence() as sequence:
        assert _native.live_sequences() == before + 1
    assert _native.live_sequences() == before
    sequence.close()
    for use in (len, lambda s: s.truncate(0), lambda s: s.nbytes, lambda s: s.exact_begin):
        with pytest.raises(kvfuse.SequenceError, match=f"found {sequence.id}"):
            use(sequence)


def test_a_forgotten_sequence_is_freed():
    before = _native.live_sequences()
    sequence = kvfuse.KvSequence()
    assert _native.live_sequences() == before + 1
    del sequence
    gc.collect()
    assert _native.live_sequences() == before
