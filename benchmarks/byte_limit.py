"""The limit of decoding: the time to read a step's bytes once, measured beside the contenders."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from functools import cache, partial
from pathlib import Path

import numpy as np

from benchmarks.contender import Contender, Entry, SkippedError
from benchmarks.kvfuse_contenders import FORMATS, read_bytes
from benchmarks.workload import Workload

SOURCE = Path(__file__).with_name("read_bandwidth.cc")
LIBRARY = Path(__file__).parents[1] / "build" / "bench" / "libread_bandwidth.so"
BURST_BYTES = 64 << 20  # some milliseconds, so that starting threads does not count
LINE = 512


@cache
def reader() -> ctypes.CDLL:
    """The compiled probe.

    Raises:
        SkippedError: there is no compiler.
    """
    if not LIBRARY.is_file() or LIBRARY.stat().st_mtime < SOURCE.stat().st_mtime:
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            raise SkippedError("no C++ compiler")
        LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-O3", "-march=native", "-mprefer-vector-width=512", "-shared", "-fPIC", "-std=c++17"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(LIBRARY)], check=True)
    library = ctypes.CDLL(str(LIBRARY))
    library.ReadAll.restype = ctypes.c_uint64
    library.ReadAll.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    return library


class ByteLimit(Contender):
    """Reads what one decode step of a kvfuse format must read; a step is one pass over it.

    Args:
        work: the workload; its threads share the bytes.
        name: the format, a key of FORMATS.
    """

    def __init__(self, work: Workload, name: str) -> None:
        self.read = reader().ReadAll
        size = read_bytes(FORMATS[name], work.shape, work.key.shape[1]) * work.layers
        share = -(-size // work.threads // LINE) * LINE
        self.parts = [np.ones(share + 64, np.uint8) for _ in range(work.threads)]
        self.share, self.layers = share, work.layers
        self.cache_bytes = share * work.threads // work.layers
        self.pending = 0
        self.burst = work.layers * max(2, BURST_BYTES // size)

    def step(self) -> None:
        """Counts; the passes of a burst are read together in `finish`."""
        self.pending += 1

    def finish(self) -> None:
        """Reads the pending passes, each thread its part; a pass covers all layers."""
        passes, self.pending = -(-self.pending // self.layers), 0
        threads = [threading.Thread(target=self._pass, args=(part, passes)) for part in self.parts[1:]]
        for thread in threads:
            thread.start()
        self._pass(self.parts[0], passes)
        for thread in threads:
            thread.join()

    def _pass(self, part: np.ndarray, passes: int) -> None:
        address = part.ctypes.data
        self.read(address + -address % 64, self.share, passes)


ENTRIES = [
    Entry(
        name.replace("kvfuse", "read"),
        partial(ByteLimit, name=name),
        0.3,
        f"the byte limit of {name}: its bytes read once with as many threads",
        ("decode",),
    )
    for name in FORMATS
]
