"""Limits refuse a run with a sentence and change nothing; windows and destroyed handles give memory back."""

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException
from op_harness import OpSession, assert_close, only_cpu, random_history, sequences
from reference import OpConfig, attend
from tiny_feeds import logits
from token_model import FORMATS, check_state, run, two_layers

import kvfuse
from kvfuse import _native

TOKENS = [index % 40 for index in range(200)]


def refused_run(session: OpSession, sequence: kvfuse.KvSequence, tokens: list[int]) -> str:
    """Runs tokens; gives the sentence of a refusal, else nothing."""
    try:
        run(session, [sequence.id], [tokens])
    except RuntimeException as error:
        return str(error)
    return ""


@pytest.fixture
def no_memory_limit() -> Iterator[None]:
    """Lifts the limit of the process again, whatever happens."""
    yield
    kvfuse.set_memory_limit(None)


@pytest.mark.parametrize("name", FORMATS)
def test_max_tokens(name: str) -> None:
    session = OpSession(two_layers(FORMATS[name]))
    with kvfuse.KvSequence() as sequence:
        sequence.set_limits(max_tokens=10)
        run(session, [sequence.id], [TOKENS[:8]])
        before = sequence.freeze()
        with pytest.raises(RuntimeException, match=rf"at most 10 tokens in sequence {sequence.id}; found 11"):
            run(session, [sequence.id], [TOKENS[8:11]])
        assert sequence.freeze() == before
        run(session, [sequence.id], [TOKENS[8:10]])
        with pytest.raises(RuntimeException, match="found 11"):
            run(session, [sequence.id], [TOKENS[10:11]])
        run(session, [sequence.id], [TOKENS[4:10]], kv_past_length=[4])  # room again after a rollback
        check_state(session, sequence.id, TOKENS[:10])
        sequence.set_limits()
        run(session, [sequence.id], [TOKENS[10:100]])
        check_state(session, sequence.id, TOKENS[:100])


@pytest.mark.parametrize("name", FORMATS)
def test_max_bytes(name: str) -> None:
    """Every limit from nothing up refuses or holds: a sequence never takes more than it may."""
    session = OpSession(two_layers(FORMATS[name]))
    with kvfuse.KvSequence() as free:
        run(session, [free.id], [TOKENS])
        whole = free.nbytes
    outcomes = set()
    for limit in np.linspace(0, 3 * whole, 60).astype(int).tolist():
        with kvfuse.KvSequence() as sequence:
            sequence.set_limits(max_bytes=limit)
            length = 0
            while length < len(TOKENS):
                sentence = refused_run(session, sequence, TOKENS[length : length + 20])
                if sentence:
                    assert f"at most {limit} bytes in sequence {sequence.id}; found a need for" in sentence
                    break
                length += 20
                assert sequence.nbytes <= limit
            check_state(session, sequence.id, TOKENS[:length])
            outcomes.add(length)
            sequence.set_limits()
            if length:
                run(session, [sequence.id], [TOKENS[length : length + 5]])
                check_state(session, sequence.id, TOKENS[: length + 5])
    assert min(outcomes) == 0
    assert max(outcomes) == len(TOKENS)
    assert len(outcomes) > 2


def test_a_limited_row_refuses_the_batch_and_changes_no_row() -> None:
    session = OpSession(two_layers(FORMATS["centred"]))
    with kvfuse.KvSequence() as free, kvfuse.KvSequence() as limited:
        run(session, [free.id, limited.id], [TOKENS[:9], TOKENS[1:10]])
        limited.set_limits(max_tokens=9)
        before = (free.freeze(), limited.freeze())
        with pytest.raises(RuntimeException, match=rf"sequence {limited.id}"):
            run(session, [free.id, limited.id], [[1], [2]])
        assert (free.freeze(), limited.freeze()) == before


def test_a_fork_has_the_limits_of_its_source() -> None:
    session = OpSession(FORMATS["int4"])
    with kvfuse.KvSequence() as source:
        source.set_limits(max_tokens=3)
        run(session, [source.id], [[1, 2, 3]])
        with source.fork() as fork, pytest.raises(RuntimeException, match=rf"tokens in sequence {fork.id}"):
            run(session, [fork.id], [[4]])


@pytest.mark.parametrize("limits", [{"max_tokens": -1}, {"max_bytes": -2}])
def test_negative_limits_are_refused(limits: dict[str, int]) -> None:
    with kvfuse.KvSequence() as sequence, pytest.raises(kvfuse.SequenceError, match=r"expected .* found"):
        sequence.set_limits(**limits)


def test_negative_memory_limit_is_refused() -> None:
    with pytest.raises(kvfuse.SequenceError, match="expected a limit of 0 or more, or None; found -1"):
        kvfuse.set_memory_limit(-1)


def test_limits_of_a_session_are_sequence_errors(decoder) -> None:
    with kvfuse.KvSequence() as sequence:
        sequence.set_limits(max_tokens=4)
        with pytest.raises(kvfuse.SequenceError, match=r"^\[layer '.*'\] expected at most 4 tokens"):
            logits(decoder, [[1, 2, 3, 4, 5]], kv_sequence=[sequence.id])
        assert len(sequence) == 0


@only_cpu
@pytest.mark.parametrize("name", FORMATS)
def test_limit_of_the_process(name: str, no_memory_limit: None) -> None:
    """Every limit refuses in some layer or holds; what is refused is retried when others have gone."""
    session = OpSession(two_layers(FORMATS[name]))
    begin = kvfuse.memory_in_use()
    refused = 0
    with kvfuse.KvSequence() as sequence:
        run(session, [sequence.id], [TOKENS[:20]])
        held = kvfuse.memory_in_use()
        assert held - begin == sequence.nbytes
        other = sequence.fork()
        run(session, [other.id], [TOKENS[20:70]])
        full = kvfuse.memory_in_use()
        before = (sequence.freeze(), other.freeze())
        for limit in np.linspace(full - 1, full + (full - begin), 30).astype(int).tolist():
            kvfuse.set_memory_limit(limit)
            with sequence.fork() as attempt:
                sentence = refused_run(session, attempt, TOKENS[20:120])
                if sentence:
                    refused += 1
                    assert f"at most {limit} bytes of cache in this process; found a need for" in sentence
                    assert attempt.freeze() == before[0]
                else:
                    check_state(session, attempt.id, TOKENS[:120])
            assert (sequence.freeze(), other.freeze()) == before
        kvfuse.set_memory_limit(None)
        assert refused
        other.close()
        sequence.reset()
        run(session, [sequence.id], [TOKENS[:120]])
        check_state(session, sequence.id, TOKENS[:120])
    assert kvfuse.memory_in_use() == begin


def test_unfreezing_keeps_to_the_limit_of_the_process(no_memory_limit: None) -> None:
    session = OpSession(two_layers(FORMATS["int4"]))
    with kvfuse.KvSequence() as sequence:
        run(session, [sequence.id], [TOKENS])
        frozen = sequence.freeze()
    begin, live = kvfuse.memory_in_use(), _native.live_sequences()
    kvfuse.set_memory_limit(begin + 1000)
    with pytest.raises(kvfuse.SequenceError, match="bytes of cache in this process"):
        kvfuse.KvSequence.unfreeze(frozen)
    assert (kvfuse.memory_in_use(), _native.live_sequences()) == (begin, live)


@pytest.mark.parametrize(
    "changes", [{}, {"n_recent": 16}, {"n_recent": 8, "block": 16, "key_center": "block"}], ids=str
)
def test_windows_bound_memory_and_nothing_else(changes: dict[str, int | str]) -> None:
    """Thirty windows long, forked on the way: bytes stay, and outputs are those of the whole history."""
    config = OpConfig(window_left=64, **changes)  # type: ignore[arg-type]
    session = OpSession(config)
    history = random_history(3, 2000, num_heads=2, kv_heads=1, head_dim=16)
    sizes = []
    with sequences(1) as handles:
        for begin in range(0, 2000, 50):
            query, key, value = history.part(begin, begin + 50)
            found = session.run(query, key, value, kv_sequence=handles)
            sizes.append(sum(_native.sequence_nbytes(handles[0]).values()))
            if begin % 400 == 350:
                expected = attend(config, query, history.key, history.value, past=begin)
                assert_close(found, expected)
                fork = _native.fork_sequence(handles[0])
                _native.destroy_sequence(handles[0])
                handles[0] = fork
    assert max(sizes) <= 1.5 * max(sizes[:8])
    unbounded = OpSession(replace(config, window_left=-1))
    with sequences(1) as handles:
        for begin in range(0, 2000, 500):
            unbounded.run(*history.part(begin, begin + 500), kv_sequence=handles)
        assert max(sizes) < sum(_native.sequence_nbytes(handles[0]).values()) / 4


resident_is_ours = pytest.mark.skipif(
    sys.platform != "linux" or "KVFUSE_SANITIZER" in os.environ, reason="reads /proc, which a sanitizer fills"
)


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@resident_is_ours
def test_ten_thousand_rounds_leave_nothing() -> None:
    """Create, run, fork, freeze, unfreeze, destroy: neither handles nor bytes of cache nor memory grow."""
    session = OpSession(two_layers(FORMATS["centred"]))
    live, used = _native.live_sequences(), kvfuse.memory_in_use()
    early = 0
    for index in range(10_000):
        handle = _native.create_sequence()
        run(session, [handle], [TOKENS[:12]])
        if index % 4 == 0:
            fork = _native.fork_sequence(handle)
            thawed = _native.unfreeze_sequence(_native.freeze_sequence(fork))
            _native.destroy_sequence(fork)
            _native.destroy_sequence(thawed)
        _native.destroy_sequence(handle)
        if index == 2000:
            gc.collect()
            early = resident()
    gc.collect()
    # 8,000 rounds that each lost one page of 64 tokens would hold 20 MiB more.
    assert resident() - early < 4 << 20
    assert (_native.live_sequences(), kvfuse.memory_in_use()) == (live, used)


@resident_is_ours
@only_cpu
def test_destroyed_handles_return_their_memory() -> None:
    """malloc_trim hands to the system what the library has freed; what it still held would stay."""
    session = OpSession(OpConfig(n_recent=10_000))
    history = random_history(5, 128, num_heads=1, kv_heads=1, head_dim=4096)
    handles = [_native.create_sequence() for _ in range(16)]
    begin = kvfuse.memory_in_use()
    for handle in handles:
        session.run(*history.part(0, 128), kv_sequence=[handle])
    full, used = resident(), kvfuse.memory_in_use() - begin
    assert used >= 16 * 128 * 2 * 4096 * 4
    for handle in handles:
        _native.destroy_sequence(handle)
    assert kvfuse.memory_in_use() == begin
    ctypes.CDLL(None).malloc_trim(0)
    assert full - resident() > used * 0.9
