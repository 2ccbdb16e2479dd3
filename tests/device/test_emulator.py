"""The testers tested: each mistake in broken.metal is caught, and what is sound is not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulated device is built on Linux")

SCHEDULES = ("forward", "reverse", "skewed", "random:1", "random:2", "random:3")
SOURCE = (HERE / "broken.metal").read_text()


def line_of(text: str) -> int:
    """The line of broken.metal that holds a text, which is there once."""
    assert SOURCE.count(text) == 1, text
    return SOURCE[: SOURCE.index(text)].count("\n") + 1


def execute(program, kernel, groups=1, threads=64, count=0, shift=0, schedule="forward"):
    """(exit code, `out` or None, all that was printed) of one kernel."""
    command = [*program, kernel, *map(str, (groups, threads, count, shift))]
    environment = os.environ | {"KVFUSE_EMULATED_SCHEDULE": schedule}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    out = np.array(result.stdout.split(), np.int64) if result.returncode == 0 else None
    return result.returncode, out, result.stdout + result.stderr


@pytest.mark.parametrize("kind", ["plain", "address", "thread", "ucontext", "aarch64"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sound_kernels(build, kind, schedule):
    program = build(kind)
    _, out, printed = execute(program, "neighbour", groups=3, threads=96, count=4, schedule=schedule)
    numbers = np.arange(1, 3 * 96 + 1).reshape(3, 96)
    assert np.array_equal(out, (np.roll(numbers, -1, axis=1) + 3).ravel()), printed
    _, out, printed = execute(program, "sum_of_the_rest", threads=64, count=35, schedule=schedule)
    assert np.array_equal(out, [0] * 35 + [sum(range(36, 65))] * 29), printed
    _, out, printed = execute(program, "count_atomically", threads=64, count=8, schedule=schedule)
    assert np.array_equal(out, [8] * 8 + [0] * 56), printed


# -- races: seen by other results in another order, and by ThreadSanitizer at the line ---------------------

RACES = {
    "missing_barrier": ("out[i] = line[(i + 1) % threads] + settings.shift;\n}\n\n// The second", True),
    "one_barrier_too_few": ("out[i] += line", True),
    "barrier_that_orders_nothing": ("threadgroup_barrier(mem_flags::mem_none);\n", False),
    "lockstep": ("out[i] = line[i ^ 1] + sum;", False),
    "groups_write_one_word": ("if (i == group) out[0]", True),
}


@pytest.mark.parametrize("kernel", [name for name, (_, by_order) in RACES.items() if by_order])
def test_a_race_shows_in_another_order(build, kernel):
    results = {
        tuple(
            execute(build("plain"), kernel, groups=1 + 2 * ("groups" in kernel), count=3, schedule=schedule)[
                1
            ]
        )
        for schedule in SCHEDULES
    }
    assert len(results) > 1


@pytest.mark.parametrize("kernel", RACES)
def test_a_race_is_seen_by_thread_sanitizer(build, kernel):
    code, _, printed = execute(build("thread"), kernel, groups=3 if "groups" in kernel else 1, count=3)
    assert code == 66, printed  # ThreadSanitizer's own
    assert "data race" in printed
    lines = {int(number) for number in re.findall(rf"{kernel} \S*broken\.metal:(\d+)", printed)}
    line = line_of(RACES[kernel][0]) + (kernel == "barrier_that_orders_nothing")
    assert line in lines, printed


# -- bounds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "said", "text"),
    [
        ("read_beyond", "heap-buffer-overflow", "out[i] = in[i + settings.shift];"),
        ("write_beyond", "heap-buffer-overflow", "out[i + settings.shift] = in[i];"),
        ("shared_beyond", "out of bounds", "out[i] = first[i + settings.shift] + second[i];"),
        ("shared_beyond_by_pointer", "use-after-poison", "out[i] = *(p + settings.shift);"),
    ],
)
def test_one_element_beyond_is_seen_by_address_sanitizer(build, kernel, said, text):
    assert execute(build("address"), kernel, threads=32, shift=0)[0] == 0
    code, _, printed = execute(build("address"), kernel, threads=32, shift=1)
    assert code == 1
    assert said in printed
    assert f"broken.metal:{line_of(text)}" in printed


def test_threadgroup_memory_has_an_end(build):
    code, _, printed = execute(build("plain"), "too_much_shared", threads=32)
    assert code == 3
    assert "at most 32768 bytes of threadgroup memory" in printed
    assert f"found 32784 with second (broken.metal:{line_of('threadgroup int second[4097];')})" in printed


def test_threadgroup_memory_begins_as_nan(build):
    _, out, _ = execute(build("plain"), "shared_before_it_is_written", groups=2, threads=32)
    assert np.array_equal(out, [-1] * 64)


# -- divergence --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "address", "thread", "ucontext", "aarch64"])
@pytest.mark.parametrize(
    ("kernel", "expected", "found"),
    [
        ("barrier_for_some", "threadgroup_barrier", "thread 5 at its end"),
        ("two_barriers", "threadgroup_barrier", r"thread \d+ in threadgroup_barrier"),
        ("simd_for_some", "threadgroup_barrier", r"thread \d+ in simd_sum"),
        ("two_simd_operations", "simd_(sum|max)", r"lane \d+ in simd_(max|sum)"),
        ("lane_that_has_ended", "simd_shuffle", r"lane 2, asked for by thread \d+"),
        ("constant_value", "set function constant kMode", "none of index 3"),
    ],
)
def test_divergence_is_an_error(build, kind, kernel, expected, found):
    for schedule in SCHEDULES[:: 1 if kind == "plain" else 2]:
        code, _, printed = execute(build(kind), kernel, threads=32, count=5, shift=2, schedule=schedule)
        assert code == 3, printed
        assert re.search(rf"^\[emulated\] expected .*{expected}.*; found {found}", printed), printed
        assert "broken.metal:" in printed or kernel == "constant_value"
