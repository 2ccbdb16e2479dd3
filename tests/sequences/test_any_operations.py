"""Random operations on several sequences at once: after each, all of them are what their tokens say."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from op_harness import OpSession
from token_model import (
    FORMATS,
    VOCABULARY,
    Tracked,
    check_outputs,
    check_state,
    exact_rollback,
    run,
    two_layers,
)

import kvfuse
from kvfuse import _native

MOST = 5  # sequences at once
PICK = st.integers(0, MOST - 1)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)


class AnyOperations(RuleBasedStateMachine):
    """Sequences of one session of two layers, beside the plain lists of tokens that they have to hold."""

    @initialize(name=st.sampled_from(sorted(FORMATS)))
    def start(self, name: str) -> None:
        self.windowed = FORMATS[name].window_left >= 0
        self.session = OpSession(two_layers(FORMATS[name], gates={0: "check"}))
        self.before = _native.live_sequences()
        self.all: list[Tracked] = []

    def teardown(self) -> None:
        if hasattr(self, "all"):
            for tracked in self.all:
                tracked.sequence.close()
            assert _native.live_sequences() == self.before

    def pick(self, number: int) -> Tracked:
        return self.all[number % len(self.all)]

    def keep(self, sequence: kvfuse.KvSequence, tokens: list[int]) -> None:
        """One more sequence; the oldest goes when there are too many."""
        self.all.append(Tracked(sequence, list(tokens)))
        if len(self.all) > MOST:
            self.all.pop(0).sequence.close()

    @rule()
    def create(self) -> None:
        self.keep(kvfuse.KvSequence(), [])

    @precondition(lambda self: self.all)
    @rule(picks=st.sets(PICK, min_size=1), tokens=TOKENS)
    def append_to_a_ragged_batch(self, picks: set[int], tokens: list[int]) -> None:
        batch = [self.all[number] for number in sorted({number % len(self.all) for number in picks})]
        fed = [np.roll(tokens, row).tolist() for row in range(len(batch))]
        results = run(self.session, [t.sequence.id for t in batch], fed, index=0)
        assert results["past_lengths"].tolist() == [len(t.tokens) for t in batch]
        for row, tracked in enumerate(batch):
            tracked.tokens += fed[row]
            check_outputs(self.session, results, row, tracked.tokens, len(tokens))

    @precondition(lambda self: self.all)
    @rule(number=PICK, dropped=st.integers(0, 40), tokens=TOKENS)
    def roll_back_and_run(self, number: int, dropped: int, tokens: list[int]) -> None:
        tracked = self.pick(number)
        length = exact_rollback(self.session, tracked, dropped)
        results = run(self.session, [tracked.sequence.id], [tokens], kv_past_length=[length], index=0)
        tracked.tokens = tracked.tokens[:length] + tokens
        check_outputs(self.session, results, 0, tracked.tokens, len(tokens))

    @precondition(lambda self: self.all)
    @rule(number=PICK, dropped=st.integers(0, 40))
    def truncate(self, number: int, dropped: int) -> None:
        tracked = self.pick(number)
        length = exact_rollback(self.session, tracked, dropped)
        tracked.sequence.truncate(length)
        del tracked.tokens[length:]

    @precondition(lambda self: self.all)
    @rule(number=PICK)
    def reset(self, number: int) -> None:
        tracked = self.pick(number)
        tracked.sequence.reset()
        tracked.tokens.clear()

    @precondition(lambda self: self.all)
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        tracked = self.pick(number)
        self.keep(tracked.sequence.fork(), tracked.tokens)

    @precondition(lambda self: self.all)
    @rule(index=st.lists(PICK, max_size=MOST))
    def reorder(self, index: list[int]) -> None:
        index = [number % len(self.all) for number in index]
        old = self.all
        chosen = kvfuse.reorder([tracked.sequence for tracked in old], index)
        self.all = [Tracked(s, list(old[i].tokens)) for s, i in zip(chosen, index, strict=True)]
        for position, number in enumerate(index):
            assert (chosen[position] is old[number].sequence) == (index.index(number) == position)
        for number, tracked in enumerate(old):
            if number not in index:
                with pytest.raises(kvfuse.SequenceError, match=f"found {tracked.sequence.id}$"):
                    len(tracked.sequence)

    @precondition(lambda self: self.all)
    @rule(number=PICK, through_a_file=st.booleans(), instead=st.booleans())
    def freeze_and_unfreeze(self, number: int, through_a_file: bool, instead: bool) -> None:
        tracked = self.pick(number)
        if through_a_file:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "state"
                tracked.sequence.save(path)
                thawed = kvfuse.KvSequence.load(path)
        else:
            thawed = kvfuse.KvSequence.unfreeze(tracked.sequence.freeze())
        if instead:
            tracked.sequence.close()
            tracked.sequence = thawed
        else:
            self.keep(thawed, tracked.tokens)

    @precondition(lambda self: self.all)
    @rule(number=PICK)
    def destroy(self, number: int) -> None:
        self.all.pop(number % len(self.all)).sequence.close()

    @precondition(lambda self: self.all)
    @rule(number=PICK, tokens=TOKENS)
    def fail_between_layers(self, number: int, tokens: list[int]) -> None:
        with pytest.raises(InvalidArgument, match=r"[Gg]ather"):
            run(self.session, [self.pick(number).sequence.id], [tokens], index=4)

    @invariant()
    def all_sequences_hold_their_tokens(self) -> None:
        if not hasattr(self, "all"):
            return
        assert _native.live_sequences() == self.before + len(self.all)
        for tracked in self.all:
            check_state(self.session, tracked.sequence.id, tracked.tokens)

    @precondition(lambda self: self.all and not self.windowed)
    @rule(number=PICK)
    def frozen_bytes_tell_nothing_of_the_way_here(self, number: int) -> None:
        """How much a sliding window has freed does depend on the way; all else is canonical."""
        tracked = self.pick(number)
        with kvfuse.KvSequence() as sequence:
            if tracked.tokens:
                run(self.session, [sequence.id], [tracked.tokens], index=0)
                assert tracked.sequence.freeze() == sequence.freeze()


AnyOperations.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
TestAnyOperations = AnyOperations.TestCase
