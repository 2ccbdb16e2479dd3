"""What every contender must offer, and the list of them.

State, and what a step pays for it: each contender keeps its cache the best way it has.

* Shared buffers (GroupQueryAttention): past and present are one buffer, nothing is copied; the step writes
  at the same position again, so T stays.
* Growing caches (Attention, exported subgraph): past and present are bound buffers of their own, so nothing
  is allocated; the copy of the past into the present is the operator's and is paid, as it is in every model
  that keeps its cache in graph inputs and outputs. T stays.
* Stateful (OpenVINO, kvfuse): the runtime keeps the cache and the step appends. T grows, centred around the
  T stated, and is put back between bursts, untimed. kvfuse's bursts are 64 steps, so that each holds exactly
  one closing of a block of 64 tokens where the format has blocks: its cost is in.
* ggml: append by ggml_cpy into a view of the cache, then flash attention, one graph. T stays.

All inputs and outputs are bound to memory once (I/O binding, shared tensors). No contender converts or copies
queries, keys, values or outputs in Python.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import Mode, Workload

BOTH: tuple[Mode, ...] = ("decode", "prefill")


class SkippedError(Exception):
    """A contender cannot run here; the text says why."""


class Contender(ABC):
    """One implementation, set up for one workload.

    Attributes:
        burst: steps of one timed burst; 0 lets the driver choose.
        cache_bytes: bytes that the keys and values of one layer take, None where that says nothing.
    """

    burst = 0
    cache_bytes: int | None = None

    def prepare(self) -> None:  # noqa: B027  # nothing to do for contenders whose T stays
        """Puts the state back to where a burst begins; called before each burst, not timed."""

    @abstractmethod
    def step(self) -> None:
        """Appends the new tokens and attends: what is timed."""

    def finish(self) -> None:  # noqa: B027  # only where steps are collected
        """Ends a burst, inside the timed part."""

    def output(self) -> NDArray[np.float32] | None:
        """The last checked rows of the first step after setup, [H, R, D]; None when there is none."""
        return None

    def close(self) -> None:  # noqa: B027  # nothing to do where memory goes with the object
        """Frees what does not go away with the object."""


@dataclass(frozen=True)
class Entry:
    """One line of the list of contenders.

    Attributes:
        name: as in tables and in `--contenders`.
        make: sets it up; raises SkippedError when it cannot run here.
        copies: memory of caches and steps in units of all keys and values as f32.
        expanded: the same in units of all keys and values repeated for each query head.
        score_copies: the same in units of all scores as f32, for those that write them out.
        modes: what it can do.
        about: what it is, for docs and `--list`.
        threads: overrides the workload's number; 0: does not.
    """

    name: str
    make: Callable[[Workload], Contender]
    copies: float
    about: str
    modes: tuple[Mode, ...] = BOTH
    threads: int = 0
    expanded: float = 0
    score_copies: float = 0

    def memory(self, work: Workload) -> int:
        """Bytes that this contender may take while it is measured, over all layers."""
        scores = self.score_copies * 4 * work.shape.num_heads * work.new_tokens * work.key.shape[1]
        expanded = self.expanded * work.float_bytes * work.shape.num_heads / work.shape.kv_num_heads
        return int(self.copies * work.float_bytes * work.layers + expanded + scores) + (64 << 20)
