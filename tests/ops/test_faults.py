"""Runs that fail, are terminated or overlap: lengths stay committed ones, a retry equals a clean run."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument
from op_graph import Graph
from op_harness import Array, OpSession, check_dump, feed, random_history, sequences
from reference import OpConfig

from kvfuse import _native

CONFIG = OpConfig(n_recent=3, block=2, n_sink=1)
LAYERS = tuple(replace(CONFIG, layer=f"layers.{index}") for index in range(3))
CENTRED = tuple(replace(layer, key_center="block", codes="full", group_size=32) for layer in LAYERS)
SLOW = 1_000_000  # rounds of a delay gate that only ends by being terminated


def outputs(results: dict[str, Array]) -> list[Array]:
    return [results[name] for name in sorted(results) if name.startswith("output_")]


def check_layers(
    session: OpSession, key: Array, value: Array, length: int, handle: int | None = None
) -> None:
    """Every layer of one sequence holds the model's canonical state."""
    handle = session.default_sequences()[0] if handle is None else handle
    assert _native.sequence_length(handle) == length
    for layer in session.graph.layers:
        check_dump(dict(_native.dump_layer(handle, layer.layer)), layer, key[0], value[0], length)


@pytest.mark.parametrize("layers", [LAYERS, CENTRED], ids=["plain", "centred"])
@pytest.mark.parametrize("failing_after", [-1, 0, 1])
@pytest.mark.parametrize("past", [0, 9])
def test_failing_node_between_layers(past: int, failing_after: int, layers: tuple[OpConfig, ...]) -> None:
    """Other tokens of another count fail between layers; then the right ones give what a clean run gives."""
    graph = Graph(layers, gates={failing_after: "check"})
    history, wrong = random_history(1, 16), random_history(2, 11)
    session, clean = OpSession(graph), OpSession(graph)
    for one in (session, clean):
        if past:
            one.run(*history.part(0, past), index=0)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"[Gg]ather"):
            session.run(*wrong.part(0, 11), index=7)
        assert [_native.sequence_length(handle) for handle in session.default_sequences()] == [past]
    results = session.run_all(*history.part(past, 16), index=0)
    assert results["past_lengths"].tolist() == [past]
    expected = clean.run_all(*history.part(past, 16), index=0)
    np.testing.assert_array_equal(outputs(results), outputs(expected))
    check_layers(session, history.key, history.value, 16)


@pytest.mark.parametrize("wrong_length", [33, 200, 1000])
@pytest.mark.parametrize(
    "changes",
    [
        {"n_recent": 5},
        {"n_recent": 500},
        {"block": 16, "n_recent": 8, "key_center": "block"},
        {"window_left": 12},
        {"window_left": 12, "n_recent": 4, "block": 4},
    ],
    ids=str,
)
def test_long_failed_run_drops_nothing_that_is_committed(changes: dict[str, Any], wrong_length: int) -> None:
    """More new tokens than the slack, or than a window and its pages, may not push out what came before."""
    layers = tuple(OpConfig(layer=name, **changes) for name in ("a", "b"))
    graph = Graph(layers, gates={0: "check"})
    history, wrong = random_history(12, 110), random_history(13, wrong_length)
    session, clean = OpSession(graph), OpSession(graph)
    for one in (session, clean):
        one.run(*history.part(0, 100), index=0)
    with pytest.raises(InvalidArgument, match=r"[Gg]ather"):
        session.run(*wrong.part(0, wrong_length), index=7)
    found, expected = (one.run_all(*history.part(100, 110), index=0) for one in (session, clean))
    np.testing.assert_array_equal(outputs(found), outputs(expected))
    check_layers(session, history.key, history.value, 110)


def test_failed_first_run_may_be_retried_with_other_sizes() -> None:
    session = OpSession(Graph(LAYERS, gates={0: "check"}))
    with pytest.raises(InvalidArgument):
        session.run(*random_history(3, 5, batch=2).part(0, 5), index=3)
    history = random_history(4, 6, kv_heads=1, head_dim=24)
    session.run(*history.part(0, 6), index=0)
    check_layers(session, history.key, history.value, 6)


def test_failed_rollback_leaves_the_shorter_prefix_usable() -> None:
    """After a failed run that rolled back, the sequence is as long as before or as rolled back, and right."""
    graph = Graph(LAYERS, gates={0: "check"})
    history, wrong = random_history(5, 20), random_history(6, 4)
    session = OpSession(graph)
    session.run(*history.part(0, 12), index=0)
    with pytest.raises(InvalidArgument):
        session.run(*wrong.part(0, 4), kv_past_length=[10], index=9)
    length = _native.sequence_length(session.default_sequences()[0])
    assert length in (10, 12)
    session.run(*history.part(10, 20), kv_past_length=[10], index=0)
    check_layers(session, history.key, history.value, 20)


def run_in_thread(action: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException | Any]]:
    """Starts `action`; the list receives its result or its exception."""
    outcome: list[BaseException | Any] = []

    def target() -> None:
        try:
            outcome.append(action())
        except Exception as error:  # handed to the test
            outcome.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("gate", [-1, 0, 1])
def test_terminated_run(gate: int) -> None:
    graph = Graph(LAYERS, gates={gate: "delay"})
    history, wrong = random_history(7, 15), random_history(8, 6)
    session = OpSession(graph)
    session.run(*history.part(0, 9), rounds=0)
    options = onnxruntime.RunOptions()
    thread, outcome = run_in_thread(lambda: session.run(*wrong.part(0, 6), options, rounds=SLOW))
    time.sleep(0.05)
    options.terminate = True
    thread.join(60)
    assert isinstance(outcome[0], Fail)
    assert "terminate" in str(outcome[0])
    assert _native.sequence_length(session.default_sequences()[0]) == 9
    results = session.run_all(*history.part(9, 15), rounds=0)
    clean = OpSession(graph)
    clean.run(*history.part(0, 9), rounds=0)
    np.testing.assert_array_equal(outputs(results), outputs(clean.run_all(*history.part(9, 15), rounds=0)))
    check_layers(session, history.key, history.value, 15)


def overlap(
    prepare: Callable[[], Any], slow: Callable[[int], Any], quick: Callable[[], Any]
) -> tuple[Any, Any]:
    """Tries until `quick` falls into the delay of `slow`, which takes its rounds; gives what both gave."""
    for attempt in range(7):
        prepare()
        thread, outcome = run_in_thread(partial(slow, 1000 << attempt))
        time.sleep(0.05)
        result = quick()
        ended_before = bool(outcome)
        thread.join(60)
        if not ended_before and isinstance(outcome[0], Exception):
            return outcome[0], result
    return outcome[0], result


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("gate", [-1, 0, 1])
def test_older_of_two_runs_on_one_sequence_gets_the_error(gate: int, explicit: bool) -> None:
    graph = Graph(LAYERS, gates={gate: "delay"})
    history, wrong = random_history(9, 15), random_history(10, 6)
    session, clean = OpSession(graph), OpSession(graph)
    clean.run(*history.part(0, 9), rounds=0)
    expected = outputs(clean.run_all(*history.part(9, 15), rounds=0))
    with sequences(1) as handles:
        where: dict[str, Any] = {"kv_sequence": handles} if explicit else {}
        error, results = overlap(
            lambda: session.run(*history.part(0, 9), rounds=0, kv_past_length=[0], **where),
            lambda rounds: session.run(*wrong.part(0, 6), rounds=rounds, **where),
            lambda: session.run_all(*history.part(9, 15), rounds=0, kv_past_length=[9], **where),
        )
        assert isinstance(error, InvalidArgument), error
        assert "in use" in str(error)
        assert not explicit or str(handles[0]) in str(error)
        np.testing.assert_array_equal(outputs(results), expected)
        check_layers(session, history.key, history.value, 15, handles[0] if explicit else None)


def test_truncating_a_sequence_that_runs() -> None:
    """The run gives way, and what is left is a prefix that can go on."""
    session = OpSession(Graph(LAYERS, gates={0: "delay"}))
    history, wrong = random_history(14, 15), random_history(15, 6)
    with sequences(1) as handles:
        error, _ = overlap(
            lambda: session.run(*history.part(0, 9), rounds=0, kv_past_length=[0], kv_sequence=handles),
            lambda rounds: session.run(*wrong.part(0, 6), rounds=rounds, kv_sequence=handles),
            lambda: _native.truncate_sequence(handles[0], 4),
        )
        assert isinstance(error, InvalidArgument), error
        assert "in use" in str(error)
        check_layers(session, history.key, history.value, 4, handles[0])
        session.run(*history.part(4, 15), rounds=0, kv_sequence=handles)
        check_layers(session, history.key, history.value, 15, handles[0])


def test_threads_with_their_own_sequences() -> None:
    session = OpSession(Graph(CENTRED))
    histories = [random_history(20 + index, 60) for index in range(4)]
    expected = [feed(OpSession(Graph(CENTRED)), history, (20, *(1,) * 40)) for history in histories]
    for _ in range(3):
        with sequences(4) as handles, ThreadPoolExecutor(4) as pool:
            jobs = [
                pool.submit(feed, session, history, (20, *(1,) * 40), kv_sequence=[handle])
                for history, handle in zip(histories, handles, strict=True)
            ]
            for job, output, history, handle in zip(jobs, expected, histories, handles, strict=True):
                np.testing.assert_array_equal(job.result(), output)
                check_layers(session, history.key, history.value, 60, handle)


def test_threads_fighting_for_one_sequence_never_mix() -> None:
    """Each run is one whole prompt from the start: it succeeds as if alone, or says that it lost."""
    session = OpSession(Graph(LAYERS))
    histories = [random_history(30 + index, 40) for index in range(4)]
    expected = [OpSession(Graph(LAYERS)).run(*history.part(0, 40)) for history in histories]
    successes: list[int] = []

    def fight(index: int) -> None:
        for _ in range(25):
            try:
                found = session.run(*histories[index].part(0, 40), kv_past_length=[0])
            except InvalidArgument as error:
                assert "in use" in str(error)  # noqa: PT017 - another thread's turn, not the test's expectation
            else:
                successes.append(index)
                np.testing.assert_array_equal(found, expected[index])

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(fight, index) for index in range(4)]:
            job.result()
    assert successes
    history = histories[0]
    session.run(*history.part(0, 40), kv_past_length=[0])
    check_layers(session, history.key, history.value, 40)


def test_destroying_a_sequence_that_runs() -> None:
    """The run finishes or names the handle in its error; nothing crashes, other sequences live on."""
    session = OpSession(Graph(LAYERS, gates={0: "delay"}))
    history = random_history(11, 8)
    handle = _native.create_sequence()
    thread, outcome = run_in_thread(
        lambda: session.run(*history.part(0, 8), rounds=1000, kv_sequence=[handle])
    )
    time.sleep(0.04)
    _native.destroy_sequence(handle)
    thread.join(60)
    if isinstance(outcome[0], BaseException):
        assert isinstance(outcome[0], InvalidArgument)
        assert str(handle) in str(outcome[0])
    with pytest.raises(ValueError, match=str(handle)):
        _native.sequence_length(handle)
    session.run(*history.part(0, 8), rounds=0)
    check_layers(session, history.key, history.value, 8)
