"""Forks share pages until they part; reorder is what beam search needs; rollback leaves no trace."""

import numpy as np
import pytest
from op_harness import OpSession, only_cpu, random_history, sequences
from reference import OpConfig
from tiny_feeds import logits
from token_model import FORMATS, VOCABULARY, check_outputs, check_state, fresh_state, run, two_layers

import kvfuse

# No test here passes by staying in an exact window.
PRESET = OpConfig(n_recent=64, block=64, n_sink=4, key_center="block", group_size=32, codes="full")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 64, 70])
def test_both_sides_of_a_fork_go_their_own_way(name: str, length: int) -> None:
    """At every place in a page, sinks that are still growing included, whichever side writes first."""
    session = OpSession(two_layers(FORMATS[name]))
    rng = np.random.default_rng(length)
    prompt, left, right = (rng.integers(0, VOCABULARY, n).tolist() for n in (length, 20, 20))
    with kvfuse.KvSequence() as parent:
        run(session, [parent.id], [prompt])
        with parent.fork() as child, child.fork() as grandchild:
            for sequence, tokens in ((child, right), (parent, left), (grandchild, left)):
                results = run(session, [sequence.id], [tokens])
                check_outputs(session, results, 0, prompt + tokens, 20)
            for sequence, tokens in ((child, right), (parent, left), (grandchild, left)):
                check_state(session, sequence.id, prompt + tokens)
            parent.truncate(0)
            check_state(session, child.id, prompt + right)


def test_a_fork_outlives_its_source() -> None:
    session = OpSession(two_layers(FORMATS["centred"]))
    source = kvfuse.KvSequence()
    run(session, [source.id], [[1, 2, 3, 4, 5]])
    with source.fork() as fork:
        source.close()
        run(session, [fork.id], [[6]])
        check_state(session, fork.id, [1, 2, 3, 4, 5, 6])


def test_forking_nothing_gives_nothing() -> None:
    with kvfuse.KvSequence() as source, source.fork() as fork:
        assert (len(fork), fork.nbytes) == (0, 0)
        run(OpSession(FORMATS["int4"]), [fork.id], [[1, 2]])
        assert (len(source), len(fork)) == (0, 2)


@only_cpu
def test_a_hundred_conversations_share_one_prompt() -> None:
    """A fork takes no page; going on takes at most the pages that one token touches."""
    history = random_history(1, 1101, num_heads=2, kv_heads=2, head_dim=64)
    session = OpSession(PRESET)
    with kvfuse.KvSequence() as prompt, kvfuse.KvSequence() as alone:
        begin = kvfuse.memory_in_use()
        session.run(*history.part(0, 1000), kv_sequence=[prompt.id])
        cost = kvfuse.memory_in_use() - begin
        assert cost == prompt.nbytes
        forks = [prompt.fork() for _ in range(100)]
        assert kvfuse.memory_in_use() - begin == cost
        session.run(*history.part(0, 1000), kv_sequence=[alone.id])
        one = kvfuse.memory_in_use()
        for index, fork in enumerate(forks):
            found = session.run(*history.part(1000 + index, 1001 + index), kv_sequence=[fork.id])
            if index % 20 == 0:
                alone.truncate(1000)
                expected = session.run(*history.part(1000 + index, 1001 + index), kv_sequence=[alone.id])
                np.testing.assert_array_equal(found, expected)
        # One page of 16 exact tokens, keys and values, 2 heads of 64 channels; nothing low-bit yet.
        assert kvfuse.memory_in_use() - one <= 101 * 16 * 2 * 2 * 64 * 4
        assert kvfuse.memory_in_use() - one < 100 * cost / 4
        for fork in forks:
            fork.close()
    assert kvfuse.memory_in_use() == begin


@pytest.mark.parametrize("name", FORMATS)
def test_beams_expand_and_narrow(name: str) -> None:
    """2 beams become 4, cross over, and one is left; each always is what its tokens say."""
    session = OpSession(two_layers(FORMATS[name]))
    held = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    beams = [kvfuse.KvSequence() for _ in held]
    run(session, [beam.id for beam in beams], held)
    for step, index in enumerate(([0, 0, 1, 1], [3, 0, 0, 2], [1, 1, 1, 1], [2, 2], [1])):
        beams = kvfuse.reorder(beams, index)
        held = [list(held[i]) for i in index]
        assert len({beam.id for beam in beams}) == len(index)
        new = [[(5 * step + row) % VOCABULARY] for row in range(len(index))]
        results = run(session, [beam.id for beam in beams], new)
        for row, beam in enumerate(beams):
            held[row] += new[row]
            check_outputs(session, results, row, held[row], 1)
            check_state(session, beam.id, held[row])
    beams[0].close()


@pytest.mark.parametrize(
    ("index", "sentence"),
    [([0, 2], r"indices from 0 to 1; found 2"), ([-1], r"indices from 0 to 1; found -1")],
)
def test_a_refused_reorder_changes_nothing(index: list[int], sentence: str) -> None:
    session = OpSession(two_layers(FORMATS["int4"]))
    with kvfuse.KvSequence() as first, kvfuse.KvSequence() as second:
        run(session, [first.id, second.id], [[1, 2], [3, 4]])
        with pytest.raises(kvfuse.SequenceError, match=sentence):
            kvfuse.reorder([first, second], index)
        with pytest.raises(kvfuse.SequenceError, match=rf"each sequence once; found {first.id} twice"):
            kvfuse.reorder([first, first], [0])
        check_state(session, first.id, [1, 2])
        check_state(session, second.id, [3, 4])


def test_reorder_to_nothing_closes_all() -> None:
    first, second = kvfuse.KvSequence(), kvfuse.KvSequence()
    assert kvfuse.reorder([first, second], []) == []
    for sequence in (first, second):
        with pytest.raises(kvfuse.SequenceError, match=f"found {sequence.id}"):
            len(sequence)
        sequence.close()  # harmless


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kept", range(5))
@pytest.mark.parametrize(
    "length", [9, 66]
)  # at 70 tokens the store lets go of exact floats that 66 still has
def test_rejected_drafts_leave_no_trace(name: str, length: int, kept: int) -> None:
    """Of 4 drafts 0 to 4 are kept: the state's bytes are those of a sequence that saw the kept ones only."""
    session = OpSession(two_layers(FORMATS[name]))
    held, drafts, after = [i % 30 for i in range(length)], [30, 31, 32, 33], [10, 11, 12, 13, 14]
    with kvfuse.KvSequence() as sequence:
        run(session, [sequence.id], [held])
        run(session, [sequence.id], [drafts])
        sequence.truncate(length + kept)
        held += drafts[:kept]
        assert sequence.freeze() == fresh_state(session, held)
        for token in after:
            held.append(token)
            check_outputs(session, run(session, [sequence.id], [[token]]), 0, held, 1)
        assert sequence.freeze() == fresh_state(session, held)


def test_rollback_beyond_the_slack_is_told_and_stays_low_bit() -> None:
    """Below exact_begin tokens of the exact window stay codes; they are decoded, not lost."""
    session = OpSession(OpConfig(n_recent=8))
    with kvfuse.KvSequence() as sequence:
        run(session, [sequence.id], [list(range(40)) * 3])
        assert 0 < sequence.exact_begin <= 120 - 8
        sequence.truncate(60)
        assert (len(sequence), sequence.exact_begin) == (60, 60)
        results = run(session, [sequence.id], [[1]])
        with sequences(1) as handles:
            low_bit = OpSession(OpConfig(n_recent=1))
            expected = run(low_bit, handles, [[*list(range(40)), *range(20), 1]])
        np.testing.assert_array_equal(results["output_0"][:, :, -1], expected["output_0"][:, :, -1])


def greedy(
    session: kvfuse.InferenceSession, sequence: kvfuse.KvSequence, prompt: list[int], count: int
) -> list[int]:
    text = list(prompt)
    new = prompt
    for _ in range(count):
        scores = logits(session, [new], past=len(text) - len(new), kv_sequence=[sequence.id])
        new = [int(scores[0, -1].argmax())]
        text += new
    return text


@pytest.mark.parametrize("drafts_are_right", [0.0, 0.6, 1.0])
def test_speculative_decoding_writes_what_greedy_decoding_writes(decoder, drafts_are_right: float) -> None:
    """Four drafts at a time are checked in one run; the next run's feed rolls the rejected ones back."""
    rng = np.random.default_rng(7)
    prompt, count = [7, 3, 44, 12, 9], 40
    with kvfuse.KvSequence() as plain, kvfuse.KvSequence() as sequence:
        expected = greedy(decoder, plain, prompt, count)
        scores = logits(decoder, [prompt], kv_sequence=[sequence.id])
        text = [*prompt, int(scores[0, -1].argmax())]
        while len(text) < len(expected):
            right = expected[len(text) : len(text) + 4]
            drafts = [t if rng.random() < drafts_are_right else (t + 1) % 64 for t in right]
            past = len(text) - 1
            fed = [text[-1], *drafts]
            scores = logits(decoder, [fed], past=past, kv_sequence=[sequence.id], kv_past_length=[past])
            likeliest = scores[0].argmax(axis=-1).tolist()
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == likeliest[accepted]:
                accepted += 1
            text += [*drafts[:accepted], likeliest[accepted]]
        assert text[: len(expected)] == expected
        for one in (plain, sequence):
            one.truncate(len(expected) - 6)
        assert sequence.freeze() == plain.freeze()
