"""Threads with their own sequences, and operations on a sequence that is running."""

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from op_harness import Array, OpSession
from token_model import FORMATS, VOCABULARY, check_state, fresh_state, run, two_layers

import kvfuse

THREADS, ROUNDS = 4, 200


def conversation(session: OpSession, seed: int) -> tuple[list[Array], bytes]:
    """200 rounds with forks, rollbacks and freezes between: all outputs, and the last state."""
    rng = np.random.default_rng(seed)
    outputs = []
    sequence = kvfuse.KvSequence()
    for index in range(ROUNDS):
        tokens = rng.integers(0, VOCABULARY, 1 + index % 3).tolist()
        outputs.append(run(session, [sequence.id], [tokens])["output_1"])
        if index % 10 == 3:
            sequence.truncate(len(sequence) - 2)
        if index % 10 == 6:
            fork = sequence.fork()
            run(session, [sequence.id], [[0, 1, 2]])  # what the fork does not see
            sequence.close()
            sequence = fork
        if index % 50 == 9:
            state = sequence.freeze()
            sequence.close()
            sequence = kvfuse.KvSequence.unfreeze(state)
        assert sequence.nbytes == sum(sequence.nbytes_by_layer().values())
    state = sequence.freeze()
    sequence.close()
    return outputs, state


# TSan knows nothing of onnxruntime's own pool, and would take what it runs for races.
POOLS = [1] if os.environ.get("KVFUSE_SANITIZER") == "thread" else [1, 2]


@pytest.mark.parametrize("pool_threads", POOLS)
@pytest.mark.parametrize("name", ["exact", "centred", "window"])
def test_four_threads_of_two_hundred_rounds(name: str, pool_threads: int) -> None:
    """Each thread's outputs and state are, bit for bit, those of the same rounds without the others."""
    session = OpSession(two_layers(FORMATS[name]), threads=pool_threads)
    expected = [conversation(session, seed) for seed in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda seed: conversation(session, seed), range(THREADS)))
    for (outputs, state), (alone, alone_state) in zip(found, expected, strict=True):
        for output, other in zip(outputs, alone, strict=True):
            np.testing.assert_array_equal(output, other)
        assert state == alone_state


def test_threads_fork_one_prompt_while_it_goes_on() -> None:
    """Forks of a running sequence are of what it held before or after a run, never of half of one."""
    session = OpSession(two_layers(FORMATS["centred"]))
    tokens = [(3 * index) % VOCABULARY for index in range(200)]
    states = {fresh_state(session, tokens[:length]) for length in range(20, 201, 20)}
    errors: list[BaseException] = []
    seen: list[bytes] = []
    done = threading.Event()
    with kvfuse.KvSequence() as prompt:

        def fork_on() -> None:
            try:
                while not done.is_set():
                    with prompt.fork() as fork:
                        if len(fork):  # 0: the prompt has just started again
                            seen.append(fork.freeze())
                        run(session, [fork.id], [[1, 2, 3]])
            except BaseException as error:  # handed to the test
                errors.append(error)

        threads = [threading.Thread(target=fork_on) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            for begin in range(0, 200, 20):
                run(session, [prompt.id], [tokens[begin : begin + 20]], kv_past_length=[begin])
        done.set()
        for thread in threads:
            thread.join()
        assert not errors
        assert seen
        assert set(seen) <= states
        check_state(session, prompt.id, tokens)


def overlap(slow: Callable[[int], Any], quick: Callable[[], Any]) -> tuple[Any, Any]:
    """Runs `quick` while `slow` waits in its delay gate for the given rounds; gives what both gave.

    Tries longer delays until `quick` has ended first.
    """
    for attempt in range(8):
        outcome: list[Any] = []
        started = threading.Event()

        def target(rounds: int, outcome: list[Any] = outcome, started: threading.Event = started) -> None:
            started.set()
            try:
                outcome.append(slow(rounds))
            except Exception as error:  # handed to the test
                outcome.append(error)

        thread = threading.Thread(target=target, args=(200 << attempt,))
        thread.start()
        started.wait()
        threading.Event().wait(0.02)
        result = quick()
        first = not outcome
        thread.join(60)
        if first:
            return outcome[0], result
    raise AssertionError("expected the quick call to end during the run; it never did")


@pytest.mark.parametrize("name", ["centred", "window"])
@pytest.mark.parametrize("look", ["freeze", "fork", "length"])
def test_looking_at_a_running_sequence(name: str, look: str) -> None:
    """Freeze, fork and length see what was there before the run, which is not disturbed."""
    session = OpSession(two_layers(FORMATS[name], gates={0: "delay"}))
    tokens = [index % VOCABULARY for index in range(70)]
    with kvfuse.KvSequence() as sequence:
        run(session, [sequence.id], [tokens[:30]], rounds=0)
        before = sequence.freeze()

        def glance() -> Any:
            if look == "length":
                return len(sequence)
            if look == "freeze":
                return sequence.freeze()
            with sequence.fork() as fork:
                return fork.freeze()

        def slow(rounds: int) -> Any:
            past = {"kv_past_length": [30]}
            return run(session, [sequence.id], [tokens[30:70]], rounds=rounds, **past)

        outcome, seen = overlap(slow, glance)
        assert not isinstance(outcome, Exception)
        assert seen == (30 if look == "length" else before)
        check_state(session, sequence.id, tokens)


def test_limits_and_bytes_of_a_running_sequence() -> None:
    session = OpSession(two_layers(FORMATS["int4"], gates={0: "delay"}))
    with kvfuse.KvSequence() as sequence:

        def quick() -> int:
            sequence.set_limits(max_tokens=50)
            return sequence.nbytes + kvfuse.memory_in_use()

        def slow(rounds: int) -> Any:
            return run(session, [sequence.id], [[1, 2, 3]], rounds=rounds, kv_past_length=[0])

        outcome, _ = overlap(slow, quick)
        assert not isinstance(outcome, Exception)
        check_state(session, sequence.id, [1, 2, 3])


def test_closing_a_running_sequence_frees_it_when_the_run_ends() -> None:
    session = OpSession(two_layers(FORMATS["exact"], gates={0: "delay"}))
    begin = kvfuse.memory_in_use()
    made: list[kvfuse.KvSequence] = []

    def slow(rounds: int) -> Any:
        return run(session, [made[-1].id], [[1, 2, 3, 4]], rounds=rounds)

    def quick() -> None:
        made[-1].close()
        made.append(kvfuse.KvSequence())  # of a next try

    made.append(kvfuse.KvSequence())
    outcome, _ = overlap(slow, quick)
    if isinstance(outcome, Exception):
        assert isinstance(outcome, InvalidArgument)
        assert "expected the handle of a live sequence" in str(outcome)
    made[-1].close()
    assert kvfuse.memory_in_use() == begin


def test_dropping_a_session_that_runs() -> None:
    """The run keeps what it needs; its sequences go with the last of it."""
    begin = kvfuse.memory_in_use()
    sessions = [OpSession(two_layers(FORMATS["exact"], gates={0: "delay"}))]

    def slow(rounds: int) -> Any:
        query, key, value = (np.zeros((1, heads, 3, 8), np.float32) for heads in (2, 1, 1))
        if not sessions:
            sessions.append(OpSession(two_layers(FORMATS["exact"], gates={0: "delay"})))
        return sessions[0].session.run(
            None, {"query": query, "key": key, "value": value, "rounds": np.array(rounds)}
        )

    outcome, _ = overlap(slow, sessions.clear)
    assert not isinstance(outcome, Exception)
    sessions.clear()
    gc.collect()
    assert kvfuse.memory_in_use() == begin
