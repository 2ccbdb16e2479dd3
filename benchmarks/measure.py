"""Interleaved timing: in every round each contender runs one burst, in an order drawn anew."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.contender import Contender, Entry, SkippedError
from benchmarks.workload import Workload, relative_error

LEAST_ROUNDS = 3
BURST_SECONDS = 5e-3  # of a burst whose length the driver chooses
LONGEST_BURST = 64
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
    """

    rounds: int
    seconds: float
    memory: int


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
    found, used = [], sum(entry.memory(work) for entry in base)
    for group in _groups(work, others, limits.memory - used):
        results = {
            entry.name: Result(skipped=f"needs about {entry.memory(work) / 2**30:.0f} GiB")
            for entry in group
            if entry.memory(work) > limits.memory - used
        }
        fitting = [entry for entry in group if entry.name not in results]
        found.append(_measure_group(work, [*base, *fitting], answer, limits) | results)
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


def _measure_group(
    work: Workload, entries: Sequence[Entry], answer: NDArray[np.float64], limits: Limits
) -> dict[str, Result]:
    results: dict[str, Result] = {}
    running: dict[str, Contender] = {}
    try:
        for entry in entries:
            result = results[entry.name] = Result()
            try:
                running[entry.name] = contender = entry.make(work)
            except SkippedError as reason:
                result.skipped = str(reason)
                continue
            contender.step()
            contender.finish()
            output = contender.output()
            result.error = None if output is None else relative_error(output, answer)
            result.cache_bytes = contender.cache_bytes
        for contender in running.values():
            if not contender.burst:
                contender.burst = _burst_length(contender) * work.layers
        _rounds(running, results, work, limits)
    finally:
        for contender in running.values():
            contender.close()
    return results


def _burst_length(contender: Contender) -> int:
    """Steps that take about BURST_SECONDS, from the faster of two."""
    return max(1, min(LONGEST_BURST, round(BURST_SECONDS / min(_burst(contender, 1) for _ in range(2)))))


def _burst(contender: Contender, steps: int) -> float:
    """Seconds of one step in a burst."""
    contender.prepare()
    start = time.perf_counter()
    for _ in range(steps):
        contender.step()
    contender.finish()
    return (time.perf_counter() - start) / steps


def _rounds(
    running: dict[str, Contender], results: dict[str, Result], work: Workload, limits: Limits
) -> None:
    random = np.random.default_rng(2)
    end = time.perf_counter() + limits.seconds
    names = list(running)
    for number in range(limits.rounds):
        if number >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        for index in random.permutation(len(names)):
            name = names[index]
            if work.threads > 1:
                time.sleep(SETTLE_SECONDS)
            seconds = _burst(running[name], running[name].burst)
            results[name].microseconds.append(seconds * 1e6)
