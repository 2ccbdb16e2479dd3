"""Memory that runs out in an append is an error of that run alone."""

import subprocess
import sys
from pathlib import Path

import pytest

TOKENS, HEAD_DIM = 16384, 512  # 32 MiB of exact keys; the output, of head size 1, needs next to nothing

SCRIPT = f"""
import resource
import numpy as np
from op_graph import Graph, OpConfig
from op_harness import OpSession

config = OpConfig(n_recent={4 * TOKENS})
session = OpSession(Graph((config,), optional=("key_padding",)))
def run(count, past):
    shape = (1, 1, count, {HEAD_DIM})
    key = np.ones(shape, np.float32)
    value = np.ones((1, 1, count, 1), np.float32)
    # Padding everywhere: the append is what counts, attending over it would only take time.
    return session.run(key, key, value, key_padding=np.zeros((1, past + count), np.int64))

run(3, 0)
before = session.dump()["exact_key"]
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
key = np.ones((1, 1, {TOKENS}, {HEAD_DIM}), np.float32)
value, padding = np.ones((1, 1, {TOKENS}, 1), np.float32), np.zeros((1, {TOKENS} + 3), np.int64)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), hard))
try:
    session.session.run(None, dict(query=key, key=key, value=value, key_padding=padding))
    raise SystemExit("expected an error; found none")
except Exception as error:
    message = str(error)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
assert "expected enough memory" in message, message
assert session.dump()["length"] == 3
assert np.array_equal(session.dump()["exact_key"], before)
run(2, 3)
assert session.dump()["length"] == 5
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_out_of_memory_in_append():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1]}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
