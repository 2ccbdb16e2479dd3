"""Every attribute of QuantizedKvSdpa against the NumPy model: outputs of a prefill and of later chunks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from op_graph import Graph
from op_harness import OpSession, assert_close, check_against_model, check_state, feed, random_history
from reference import OpConfig, attend, plain_attention

CHUNKS = (9, 1, 1, 7, 1)
LENGTH = sum(CHUNKS)
BLOCKED = OpConfig(n_recent=3, block=4, n_sink=2)


@pytest.mark.parametrize("rotation", ["hadamard", "none"])
@pytest.mark.parametrize("codes", ["symmetric", "full"])
@pytest.mark.parametrize("group_size", [0, 32, 64])
@pytest.mark.parametrize(
    ("key_bits", "value_bits"), [(4, 4), (8, 4), (4, 8), (8, 8), (16, 4), (4, 16), (16, 16)]
)
def test_formats(key_bits: int, value_bits: int, group_size: int, codes: str, rotation: str) -> None:
    config = OpConfig(
        key_bits=key_bits, value_bits=value_bits, group_size=group_size, codes=codes, rotation=rotation
    )
    history = random_history(1, LENGTH, head_dim=80, num_heads=2, kv_heads=1)
    session = check_against_model(config, history, CHUNKS)
    check_state(session, history, LENGTH)


@pytest.mark.parametrize("group_size", [0, 32])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [
        *((size, size) for size in (7, 8, 12, 16, 40, 64, 80, 96, 128, 192)),
        *((576, 512), (16, 24), (24, 7), (192, 128), (1, 2)),
    ],
)
def test_head_sizes(head_dim: int, value_dim: int, group_size: int) -> None:
    history = random_history(2, LENGTH, head_dim=head_dim, value_dim=value_dim)
    # The score error grows with D; 576 products are 3 times the 192 of the common bound.
    scale = max(1.0, head_dim / 192)
    for config in (OpConfig(), replace(BLOCKED, key_center="block", codes="full")):
        config = replace(config, group_size=group_size)
        session = check_against_model(config, history, CHUNKS, scale)
        check_state(session, history, LENGTH)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize(("num_heads", "kv_heads"), [(1, 1), (8, 2), (6, 2), (5, 1), (16, 8), (4, 4)])
def test_head_groups_axes_and_types(num_heads: int, kv_heads: int, axis: int, dtype: str) -> None:
    history = random_history(
        3, LENGTH, batch=2, num_heads=num_heads, kv_heads=kv_heads, head_dim=16, value_dim=8, dtype=dtype
    )
    graph = Graph((replace(BLOCKED, axis=axis),), dtype=dtype)
    session = check_against_model(graph, history, CHUNKS)
    check_state(session, history, LENGTH)


@pytest.mark.parametrize("axis", [1, 2])
def test_equal_sizes_of_all_axes_tell_axis_apart(axis: int) -> None:
    history = random_history(4, 8, batch=4, num_heads=4, kv_heads=4, head_dim=4)
    check_against_model(OpConfig(axis=axis, n_recent=100), history, (4, 4))


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("n_recent", [0, 1, 5])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("n_sink", [0, 3, 18])
def test_exact_window(n_recent: int, block: int, n_sink: int, bits: int) -> None:
    history = random_history(5, 45)
    config = OpConfig(n_recent=n_recent, block=block, n_sink=n_sink, key_bits=bits, value_bits=bits)
    session = check_against_model(config, history, (17, 1, 1, 13, 8, 5))
    check_state(session, history, 45)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("group_size", [0, 32])
@pytest.mark.parametrize("n_sink", [0, 2])
@pytest.mark.parametrize(("n_recent", "block"), [(0, 2), (4, 4), (6, 4), (3, 8)])
@pytest.mark.parametrize("key_bits", [4, 8, 16])
def test_centred_keys(
    key_bits: int, n_recent: int, block: int, n_sink: int, group_size: int, causal: int
) -> None:
    history = random_history(6, 31, head_dim=48)
    history.key[...] += 4 * random_history(7, 1, head_dim=48).key  # the offsets that centring is for
    config = OpConfig(
        key_bits=key_bits,
        n_recent=n_recent,
        block=block,
        n_sink=n_sink,
        group_size=group_size,
        key_center="block",
        causal=causal,
    )
    # Keys of size up to 4 + 4: scores, and so their error, are five times those of unit keys.
    session = check_against_model(config, history, (10, 1, 2, 9, 1, 8), scale=5)
    check_state(session, history, 31)


def test_block_means_add_in_token_order() -> None:
    """Sums that lose small terms in float32 tell the order of additions, and the one division after them."""
    history = random_history(16, 12, head_dim=16)
    history.key[:, :, ::3] *= 2.0**13
    history.key[:, :, 1::3] -= history.key[:, :, ::3]
    history.key[..., 8:] = 1 + (2 * np.arange(8) + 1) * 2.0**-11  # means that are ties between two halves
    config = OpConfig(block=6, key_center="block", n_recent=2)
    session = OpSession(config)
    feed(session, history, (5, 7))
    check_state(session, history, 12)


def test_query_ties_round_to_even() -> None:
    """Steps of 3: a product with the reciprocal instead of a division would break the ties."""
    history = random_history(17, 40, head_dim=64)
    ties = np.resize(np.arange(-126.5, 127, dtype=np.float32) * np.float32(3), (1, 4, 40, 64))
    ties[..., 0] = 381
    # One code is 3 units: times a key code of up to 7 and this scale that moves a score by up to 0.1.
    check_against_model(OpConfig(rotation="none", scale=0.01), replace(history, query=ties), (40,), scale=4)


def test_centring_rescues_offset_keys() -> None:
    history = random_history(8, 64, head_dim=64)
    history.key[...] += 10 * random_history(9, 1, head_dim=64).key
    base = OpConfig(block=16, group_size=32, causal=1)
    plain = plain_attention(history.query, history.key, history.value, scale=64**-0.5, causal=True)
    errors = []
    for key_center in ("none", "block"):
        config = replace(base, key_center=key_center)
        found = attend(config, history.query, history.key, history.value)
        session_found = check_against_model(config, history, (64,), scale=11)
        assert session_found is not None
        errors.append(abs(found - plain).mean())
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("scale", [None, 0.25, 0.3, -0.5, 0.0])
@pytest.mark.parametrize("softcap", [0.0, 0.7, 5.0])
@pytest.mark.parametrize(
    "config", [OpConfig(), OpConfig(n_recent=100), BLOCKED], ids=["low", "exact", "mixed"]
)
def test_scale_and_softcap(config: OpConfig, softcap: float, scale: float | None) -> None:
    history = random_history(10, LENGTH)
    check_against_model(replace(config, scale=scale, softcap=softcap), history, CHUNKS)


@pytest.mark.parametrize("changes", [{}, {"n_recent": 4}, {"n_recent": 2, "block": 4}, {"key_bits": 16}])
@pytest.mark.parametrize("group_size", [0, 64])
def test_not_causal_queries_see_later_keys_of_their_chunk(changes: dict[str, Any], group_size: int) -> None:
    history = random_history(11, LENGTH, head_dim=80)
    config = OpConfig(causal=0, group_size=group_size, **changes)
    check_against_model(config, history, CHUNKS)


@pytest.mark.parametrize("window_left", [0, 1, 4, 11, 50])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(
    "config", [OpConfig(), OpConfig(n_recent=6), BLOCKED], ids=["low", "recent", "blocked"]
)
@pytest.mark.parametrize("chunks", [(40,), (3, 1, 1, 1, 34), (1,) * 40], ids=["whole", "ragged", "single"])
def test_sliding_window(chunks: tuple[int, ...], config: OpConfig, causal: int, window_left: int) -> None:
    config = replace(config, window_left=window_left, causal=causal)
    check_against_model(config, random_history(12, 40), chunks)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_default_preset_of_the_rewriter(dtype: str) -> None:
    config = OpConfig(
        codes="full", group_size=32, n_recent=64, block=64, n_sink=4, key_center="block", causal=1
    )
    history = random_history(13, 260, head_dim=64, dtype=dtype)
    session = check_against_model(Graph((config,), dtype=dtype), history, (130, 1, 1, 120, 8))
    check_state(session, history, 260)


def test_attributes_left_out_have_their_defaults() -> None:
    history = random_history(14, 12)
    model = OpConfig(causal=0)
    session = check_against_model(Graph((model,), bare=True), history, (12,))
    check_state(session, history, 12)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(("num_heads", "kv_heads"), [(1, 1), (16, 2), (5, 1)])
@pytest.mark.parametrize("config", [OpConfig(), BLOCKED], ids=["low", "mixed"])
def test_every_length_of_a_vector_tail(
    config: OpConfig, num_heads: int, kv_heads: int, head_dim: int
) -> None:
    """Single-token steps through all lengths 1 to 70 give what one causal prefill of the model gives."""
    history = random_history(15, 70, num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim)
    found = feed(OpSession(config), history, (1,) * 70)
    assert_close(found, attend(config, history.query, history.key, history.value))
