"""What one kernel computes for every head count and size: run with KVFUSE_KERNEL set, writes an .npz file.

For each case the tokens go through the op one by one, so that every length up to LENGTH ends once in each
remainder of a vector register.

* `weights`: values are unit vectors stored as exact halves, so that the output is the softmax weights
  themselves: one unit of an integer score shows as a relative difference that no rounding reaches.
* `exact`, `integer`: values are random and low-bit; softmax weights multiply them as floats, or as integers.
* `chunk`: as `exact`, but as one chunk behind the first FIRST tokens.
* `state.…`: the bytes of the cache in its canonical form.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import numpy as np
from op_harness import OpSession, feed, random_history
from reference import OpConfig

from kvfuse import _native

LENGTH = 70
FIRST = 3  # the chunk behind it begins and ends inside a register
HEADS = ((1, 1), (8, 2), (16, 2), (16, 8), (6, 2), (5, 1))
SIZES = (16, 64, 80, 128)
FORMATS = {
    "int4": OpConfig(),
    "int8": OpConfig(key_bits=8, value_bits=8),
    # As the default preset, but without its exact window, which would cover all of so short a history.
    "groups": OpConfig(codes="full", group_size=32, block=64, n_sink=4, key_center="block"),
}


def case_name(heads: tuple[int, int], size: int, name: str) -> str:
    """How a case is called in the file."""
    return f"{heads[0]}/{heads[1]}, {size}, {name}"


def run_case(heads: tuple[int, int], size: int, config: OpConfig) -> dict[str, np.ndarray]:
    """The arrays of one case; outputs are [H, LENGTH, V]."""
    history = random_history(size, LENGTH, num_heads=heads[0], kv_heads=heads[1], head_dim=size)
    units = np.broadcast_to(np.eye(LENGTH, dtype=np.float32), (1, heads[1], LENGTH, LENGTH)).copy()
    one_by_one, again = [1] * LENGTH, {"kv_past_length": np.array([0])}
    probe = OpSession(replace(config, value_bits=16))
    found = {"weights": feed(probe, replace(history, value=units), one_by_one)}
    session = OpSession(config)
    for name, exact in (("integer", False), ("exact", True)):
        _native.set_exact_weights(exact)
        found[name] = feed(session, history, one_by_one, **again)
    state = session.dump()
    found["chunk"] = feed(session, history, [FIRST, LENGTH - FIRST], **again)
    found = {name: output[0] for name, output in found.items()}
    for part in ("key_codes", "key_scales", "value_codes", "value_scales"):
        found[f"state.{part}"] = np.ascontiguousarray(state[part])
    return found


def main(path: str) -> None:
    """Runs all cases and writes their arrays as `case:array`."""
    arrays = {"kernel": np.array(_native.kernel_name())}
    for heads, size, name in itertools.product(HEADS, SIZES, FORMATS):
        for part, array in run_case(heads, size, FORMATS[name]).items():
            arrays[f"{case_name(heads, size, name)}:{part}"] = array
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
