"""Interleaved timing: in every round each contender runs one burst, in an order drawn anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.contender import Contender, Entry, SkippedError
from benchmarks.workload import Workload, relative_error

CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
LEAST_ROUNDS = 3
BURST_SECONDS = 5e-3  # of a burst whose length the driver chooses
LONGEST_BURST = 64
SLOW_SECONDS = 0.5  # of a first step after which a burst is one step
SLOWEST_SECONDS = 15.0  # of a first step after which a contender is left out
SETUP_COPIES = 2.5  # of all keys and values, while one contender is set up
SETTLE_SECONDS = 0.03  # worker threads spin on for a while after a run and would take the next one's cores


@dataclass
class Result:
    """What one contender did in one configuration.

    Attributes:
        microseconds: of one step, one number per round.
        error: relative error of its output against float64, None when it has none.
        cache_bytes: bytes of keys and values of one layer.
        skipped: why it did not run.
    """

    microseconds: list[float] = field(default_factory=list)
    error: float | None = None
    cache_bytes: int | None = None
    skipped: str = ""


@dataclass(frozen=True)
class Limits:
    """How long to measure and how much memory to take.

    Attributes:
        rounds: at most.
        seconds: of one group of contenders, after setup; LEAST_ROUNDS rounds run in any case.
        memory: bytes that the contenders of one group may take.
        clock: "wall", or "cpu": the processor time of this process, which other processes do not add to. With
            one thread it is the wall time of an idle machine but for caches that others have emptied.
    """

    rounds: int
    seconds: float
    memory: int
    clock: Literal["wall", "cpu"] = "wall"


def measure(
    work: Workload, base: Sequence[Entry], others: Sequence[Entry], limits: Limits
) -> list[dict[str, Result]]:
    """Measures contenders, in several groups where they do not fit into memory together.

    Args:
        work: the configuration.
        base: contenders that every group holds, so that ratios are always taken within one group.
        others: the rest.
        limits: of time and memory.

    Returns:
        One dict name -> Result per group.
    """
    answer = work.right_answer()
    # Setting up works on copies of keys and values, one contender after the other.
    free = limits.memory - int(SETUP_COPIES * work.float_bytes) - sum(e.memory(work) for e in base)
    results: dict[str, Result] = {}
    running = _set_up(work, base, answer, results)
    found = []
    try:
        for group in _groups(work, others, free):
            group_results = {name: replace(result) for name, result in results.items()}
            too_large = {entry.name: entry for entry in group if entry.memory(work) > free}
            for name, entry in too_large.items():
                needed = entry.memory(work) / 2**30
                group_results[name] = Result(skipped=f"needs about {needed:.0f} GiB")
            fitting = [entry for entry in group if entry.name not in too_large]
            _measure_group(work, running, fitting, answer, limits, group_results)
            found.append(group_results)
    finally:
        for contender in running.values():
            contender.close()
    return found


def _groups(work: Workload, entries: Sequence[Entry], memory: int) -> Iterator[list[Entry]]:
    """Splits the list where the next contender would not fit."""
    group: list[Entry] = []
    free = memory
    for entry in entries:
        needed = entry.memory(work)
        if group and needed > free:
            yield group
            group, free = [], memory
        group.append(entry)
        free -= needed
    yield group


def _set_up(
    work: Workload, entries: Sequence[Entry], answer: NDArray[np.float64], results: dict[str, Result]
) -> dict[str, Contender]:
    """Makes contenders and looks at their first output; adds a result for each."""
    running: dict[str, Contender] = {}
    for entry in entries:
        result = results[entry.name] = Result()
        try:
            contender = entry.make(work)
        except SkippedError as reason:
            result.skipped = str(reason)
            continue
        start = time.perf_counter()
        contender.step()
        contender.finish()
        seconds = time.perf_counter() - start
        output = contender.output()
        result.error = None if output is None else relative_error(output, answer)
        result.cache_bytes = contender.cache_bytes
        if seconds > SLOWEST_SECONDS:
            result.skipped = f"one step took {seconds:.0f} s"
            contender.close()
            continue
        running[entry.name] = contender
        if not contender.burst:
            contender.burst = 1 if seconds > SLOW_SECONDS else _burst_length(contender) * work.layers
    return running


def _measure_group(
    work: Workload,
    base: Mapping[str, Contender],
    group: Sequence[Entry],
    answer: NDArray[np.float64],
    limits: Limits,
    results: dict[str, Result],
) -> None:
    """Measures the contenders of one group and, beside them, those of the base."""
    running = _set_up(work, group, answer, results)
    try:
        series = _rounds({**base, **running}, work, limits)
    finally:
        for contender in running.values():
            contender.close()
    for name, microseconds in series.items():
        results[name].microseconds = microseconds


def _burst_length(contender: Contender) -> int:
    """Steps that take about BURST_SECONDS, from the faster of two."""
    return max(1, min(LONGEST_BURST, round(BURST_SECONDS / min(_burst(contender, 1) for _ in range(2)))))


def _burst(contender: Contender, steps: int, now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one step in a burst."""
    contender.prepare()
    start = now()
    for _ in range(steps):
        contender.step()
    contender.finish()
    return (now() - start) / steps


def _rounds(running: Mapping[str, Contender], work: Workload, limits: Limits) -> dict[str, list[float]]:
    """Microseconds of a step in each round."""
    random = np.random.default_rng(2)
    series: dict[str, list[float]] = {name: [] for name in running}
    end = time.perf_counter() + limits.seconds
    names = list(running)
    for number in range(limits.rounds):
        if number >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        for index in random.permutation(len(names)):
            name = names[index]
            if work.threads > 1:
                time.sleep(SETTLE_SECONDS)
            series[name].append(1e6 * _burst(running[name], running[name].burst, CLOCKS[limits.clock]))
    return series
