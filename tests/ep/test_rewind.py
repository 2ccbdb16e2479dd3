"""The dynamic option kvcache_rewind, as onnxruntime-genai sends it: the new length, as text."""

import gc

import numpy as np
import pytest
from op_graph import Graph
from op_harness import OpSession, feed, random_history, sequences
from reference import OpConfig
from tiny_feeds import IDS, logits

import kvfuse
from kvfuse import _native

HALF = len(IDS) // 2


def rewind(session, length: str) -> None:
    session.set_ep_dynamic_options({"kvcache_rewind": length})


@pytest.fixture
def session(rewritten, device) -> kvfuse.InferenceSession:
    return kvfuse.InferenceSession(rewritten, device=device)


def test_zero_before_the_first_run_is_harmless(session):
    rewind(session, "0")
    assert session.past_length == 0


def test_the_next_run_goes_on_from_there(session):
    whole = logits(session, [IDS])
    rewind(session, str(HALF))
    assert session.past_length == HALF
    again = logits(session, [IDS[HALF:]], past=HALF)
    np.testing.assert_allclose(again, whole[:, HALF:], atol=1e-5)  # the same tokens in other chunks
    rewind(session, "0")
    np.testing.assert_array_equal(logits(session, [IDS]), whole)


def test_every_row_of_a_batch_is_rewound(session):
    logits(session, [IDS, IDS[::-1]])
    rewind(session, "3")
    assert [len(sequence) for sequence in session.sequences] == [3, 3]


@pytest.mark.parametrize(
    ("value", "found"),
    [("-1", "'-1'"), ("three", "'three'"), ("", "''"), ("3.5", "'3.5'"), ("99999999999999999999", "'9+'")],
)
def test_what_is_no_length_is_refused(session, value, found):
    logits(session, [IDS])
    with pytest.raises(
        Exception, match=rf"\[kvcache_rewind\] expected a number of tokens, .*; found {found}"
    ):
        rewind(session, value)
    assert session.past_length == len(IDS)


def test_a_length_beyond_the_end_is_refused(session):
    logits(session, [IDS])
    with pytest.raises(Exception, match=rf"expected a length from 0 to {len(IDS)}, .*; found {len(IDS) + 1}"):
        rewind(session, str(len(IDS) + 1))
    assert session.past_length == len(IDS)


def test_sequences_of_others_are_left_alone(session, rewritten, device):
    other = kvfuse.InferenceSession(rewritten, device=device)
    with kvfuse.KvSequence() as explicit:
        logits(session, [IDS])
        logits(session, [IDS], kv_sequence=[explicit.id])
        logits(other, [IDS])
        rewind(session, "2")
        assert (session.past_length, other.past_length, len(explicit)) == (2, len(IDS), len(IDS))


def test_a_borrowed_sequence_stays_its_owners(session, rewritten, device):
    """A session that is fed another's own sequence does not rewind it."""
    owner = kvfuse.InferenceSession(rewritten, device=device)
    logits(owner, [IDS])
    logits(session, [IDS[:2]], past=len(IDS), kv_sequence=[owner.sequences[0].id])
    rewind(session, "0")
    assert owner.past_length == len(IDS) + 2


def test_nodes_with_state_of_their_own_are_rewound(device):
    session = OpSession(Graph((OpConfig(),), slots=False), device=device)
    history = random_history(2, 8)
    whole = feed(session, history, (8,))
    rewind(session.session, "5")
    again = feed(session, history, (3,), begin=5)
    np.testing.assert_allclose(again, whole[:, :, 5:], atol=1e-5)


def test_a_window_that_has_freed_the_tokens_is_a_sentence_and_changes_nothing(device):
    session = OpSession(OpConfig(window_left=4), device=device)
    history = random_history(2, 300, batch=2)
    feed(session, history, (299,))
    with pytest.raises(
        Exception, match=r"\[truncate\] expected a length of 0 or at least \d+, since the sli"
    ):
        rewind(session.session, "3")
    assert [_native.sequence_length(handle) for handle in session.default_sequences()] == [299, 299]


def test_options_of_other_providers_pass_by(session):
    logits(session, [IDS])
    session.set_ep_dynamic_options({"ep.dynamic.workload_type": "Efficient"})
    assert session.past_length == len(IDS)


def test_nothing_outlives_the_session(rewritten, device):
    gc.collect()
    before = _native.live_sequences()
    session = kvfuse.InferenceSession(rewritten, device=device)
    logits(session, [IDS])
    assert _native.live_sequences() == before + 1
    del session
    gc.collect()
    assert _native.live_sequences() == before


def test_a_cpu_session_made_later_does_not_inherit_the_provider(session, rewritten):
    later = kvfuse.InferenceSession(rewritten)
    logits(later, [IDS])
    logits(session, [IDS])
    rewind(session, "1")
    assert later.past_length == len(IDS)
    with sequences(1) as (handle,):
        logits(later, [IDS], kv_sequence=[handle])
        assert _native.sequence_length(handle) == len(IDS)
