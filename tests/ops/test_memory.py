"""Resident bytes follow the specification's formula; windows free what nobody can see any more."""

from dataclasses import replace

import pytest
from op_harness import OpSession, feed, random_history, sequences
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
