"""Resident bytes follow the specification's formula; windows free what nobody can see any more."""

import ctypes
import gc
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from op_graph import Graph
from op_harness import OpSession, feed, only_cpu, random_history, sequences
from reference import OpConfig
from reference.cache import bytes_per_token

from kvfuse import _native
from kvfuse.formats import PRESETS

KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 64, 32
FORMATS = {
    "default": OpConfig(),
    "groups": OpConfig(group_size=32, codes="full"),
    "eight": OpConfig(key_bits=8, value_bits=4),
    "half": OpConfig(key_bits=16, value_bits=16),
    "preset": OpConfig(codes="full", group_size=32, n_recent=64, block=64, n_sink=4, key_center="block"),
}
FIRST, SECOND = 1024, 5120


def fed(config: OpConfig, length: int, chunk: int = 1024) -> OpSession:
    history = random_history(
        1, length, num_heads=KV_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM
    )
    session = OpSession(config)
    feed(session, history, [chunk] * (length // chunk))
    return session


def nbytes(session: OpSession) -> int:
    sizes = _native.sequence_nbytes(session.default_sequences()[0])
    assert set(sizes) == {session.graph.layers[0].layer}
    return int(sizes[session.graph.layers[0].layer])


def test_formula_of_the_default_format() -> None:
    """The specification's own number: 2 * (head_dim * bits / 8 + 4) per token and kv head."""
    assert bytes_per_token(OpConfig(), 1, 128, 128) == 2 * (128 * 4 / 8 + 4)
    assert bytes_per_token(FORMATS["preset"], 1, 64, 64) == 2 * (32 + 4) + 2


@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS)
def test_growth_follows_the_formula(config: OpConfig) -> None:
    """Between two lengths only low-bit tokens are added: within 2 %, which also covers two unfilled pages."""
    grown = nbytes(fed(config, SECOND)) - nbytes(fed(config, FIRST))
    expected = (SECOND - FIRST) * bytes_per_token(config, KV_HEADS, HEAD_DIM, VALUE_DIM)
    assert grown == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_take_the_bytes_that_they_print(preset: str) -> None:
    config = OpConfig(**PRESETS[preset].attributes())  # type: ignore[arg-type]
    grown = nbytes(fed(config, SECOND)) - nbytes(fed(config, FIRST))
    printed = (SECOND - FIRST) * PRESETS[preset].bytes_per_token(KV_HEADS, HEAD_DIM, VALUE_DIM)
    assert grown == pytest.approx(printed, rel=0.02)  # as above


@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS)
def test_total_is_low_bit_tokens_and_exact_floats(config: OpConfig) -> None:
    session = fed(config, FIRST)
    exact_begin = _native.sequence_exact_begin(session.default_sequences()[0])
    low_bit = FIRST * bytes_per_token(config, KV_HEADS, HEAD_DIM, VALUE_DIM)
    exact = (FIRST - exact_begin + config.n_sink) * KV_HEADS * (HEAD_DIM + VALUE_DIM) * 4
    # The store may round each of its arrays up to whole pages; a page is at most 128 tokens here.
    page = 128 * KV_HEADS * (HEAD_DIM + VALUE_DIM) * 4
    assert 0.98 * low_bit <= nbytes(session) <= 1.02 * low_bit + exact + page


def test_chunks_do_not_change_resident_bytes() -> None:
    sizes = [nbytes(fed(FORMATS["preset"], FIRST, chunk)) for chunk in (1024, 128, 1)]
    assert max(sizes) <= 1.02 * min(sizes)


@pytest.mark.parametrize(
    "changes", [{}, {"n_recent": 16}, {"n_recent": 64, "block": 64, "key_center": "block"}]
)
def test_sliding_windows_free_pages(changes: dict[str, int | str]) -> None:
    config = OpConfig(window_left=100, **changes)  # type: ignore[arg-type]
    short, long = nbytes(fed(config, FIRST, 256)), nbytes(fed(config, SECOND, 256))
    assert long <= 1.02 * short
    assert long < nbytes(fed(replace(config, window_left=-1), SECOND)) / 4


def test_truncating_to_nothing_frees_the_pages() -> None:
    session = fed(OpConfig(), SECOND)
    before = nbytes(session)
    _native.truncate_sequence(session.default_sequences()[0], 0)
    assert nbytes(session) <= before / 10


def test_new_sequence_holds_nothing() -> None:
    with sequences(1) as handles:
        assert sum(_native.sequence_nbytes(handles[0]).values()) == 0
        assert _native.sequence_length(handles[0]) == 0


LENGTHS = (1024, 8192, 131072)
CHUNK = 8192


def fill_unattended(session: OpSession, begin: int, end: int, dim: int) -> None:
    """Appends random tokens of one kv head, [begin, end); all keys are padding, so nothing attends."""
    random = np.random.default_rng(begin)
    while begin < end:
        count = min(CHUNK, end - begin)
        rows = random.standard_normal((1, 1, count, dim), dtype=np.float32)
        session.run(rows, rows, rows, key_padding=np.zeros((1, begin + count), np.int64))
        begin += count


@only_cpu
@pytest.mark.parametrize("name", ["default", "preset"])
def test_total_is_the_formula_from_1k_to_128k_tokens(name: str) -> None:
    """Low-bit tokens take the formula's bytes to 2 %; what is exact stays the same however long the cache."""
    config, dim = FORMATS[name], 16
    session = OpSession(Graph((config,), optional=("key_padding",)))
    # At most the window, the block that leaves it next, 32 tokens of slack, a page of 16 begun; and sinks.
    window = config.n_recent + config.block + 32 + 16 if config.block > 1 else 0
    exact = (window + config.n_sink) * 2 * dim * 4
    begin = 0
    for length in LENGTHS:
        fill_unattended(session, begin, length, dim)
        begin = length
        low_bit = length * bytes_per_token(config, 1, dim, dim)
        assert 0.98 * low_bit <= nbytes(session) <= 1.02 * low_bit + exact


def private_bytes() -> int:
    """Private resident memory of this process, after freed memory went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Private_Dirty:")).split()[1]) * 1024


@only_cpu
@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists() or "KVFUSE_SANITIZER" in os.environ,
    reason="reads /proc, which a sanitizer fills",
)
@pytest.mark.parametrize("name", ["default", "preset"])
def test_no_float_copy_is_hidden_beside_the_cache(name: str) -> None:
    """The process grows by what the library says it holds, not by the 8 times larger floats."""
    config, dim, length = FORMATS[name], 64, 131072
    session = OpSession(Graph((config,), optional=("key_padding",)))
    fill_unattended(session, 0, 2 * CHUNK, dim)  # so that onnxruntime's buffers for a chunk are there
    before, held_before = private_bytes(), nbytes(session)
    fill_unattended(session, 2 * CHUNK, length, dim)
    grown, held = private_bytes() - before, nbytes(session) - held_before
    # 7 MiB are added, 56 MiB as floats; the mask of 128 K tokens is 1 MiB in its longest copies.
    assert held <= grown + (1 << 20)
    assert grown <= held + (4 << 20)
