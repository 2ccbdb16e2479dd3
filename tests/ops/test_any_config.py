"""All attributes, sizes, masks and chunks drawn together: combinations that no table of cases names."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from op_graph import Graph
from op_harness import check_against_model, check_state, random_history
from reference import OpConfig

BIAS_AXES = ("batch", "heads", "rows", "columns")


@st.composite
def configs(draw: st.DrawFn) -> OpConfig:
    block = draw(st.sampled_from([1, 2, 3, 8, 16]))
    return OpConfig(
        axis=draw(st.sampled_from([1, 2])),
        scale=draw(st.sampled_from([None, 0.125, 0.5])),
        causal=draw(st.sampled_from([0, 1])),
        n_recent=draw(st.sampled_from([0, 1, 4, 17, 100])),
        block=block,
        n_sink=draw(st.sampled_from([0, 1, 5])),
        key_bits=draw(st.sampled_from([4, 8, 16])),
        value_bits=draw(st.sampled_from([4, 8, 16])),
        group_size=draw(st.sampled_from([0, 32, 64])),
        codes=draw(st.sampled_from(["symmetric", "full"])),
        rotation=draw(st.sampled_from(["hadamard", "none"])),
        key_center=draw(st.sampled_from(["none", "block"])) if block > 1 else "none",
        window_left=draw(st.sampled_from([-1, -1, 0, 3, 20])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
    )


def masks(
    optional: tuple[str, ...], total: int, heads: int, broadcast: set[str], seed: int
) -> dict[str, Any]:
    """Random optional inputs of a batch of 2; the bias has size 1 along the axes in `broadcast`."""
    rng = np.random.default_rng(seed)
    sizes = (2, heads, total, total)
    shape = tuple(1 if axis in broadcast else size for axis, size in zip(BIAS_AXES, sizes, strict=True))
    bias = rng.standard_normal(shape).astype(np.float32)
    bias[rng.random(shape) < 0.1] = -np.inf
    padding = (rng.random((2, total + 3)) < 0.8).astype(np.int64)
    values = {"key_padding": padding, "attention_bias": bias, "head_sink": rng.standard_normal(heads)}
    return {name: values[name] for name in optional}


@settings(deadline=None, max_examples=150)
@given(
    config=configs(),
    chunks=st.lists(st.sampled_from([0, 1, 1, 2, 9, 30]), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 1)]),
    sizes=st.sampled_from([(16, 16), (7, 12), (40, 8), (80, 72)]),
    optional=st.sets(st.sampled_from(["key_padding", "attention_bias", "head_sink"])),
    broadcast=st.sets(st.sampled_from(BIAS_AXES)),
    seed=st.integers(0, 1000),
)
def test_any_config(
    config: OpConfig,
    chunks: list[int],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    optional: set[str],
    broadcast: set[str],
    seed: int,
) -> None:
    total = sum(chunks)
    history = random_history(
        seed, total, batch=2, num_heads=heads[0], kv_heads=heads[1], head_dim=sizes[0], value_dim=sizes[1]
    )
    names = tuple(sorted(optional))
    feeds = masks(names, total, heads[0], broadcast, seed)
    # scale 0.5 at head_dim 80 makes scores, and so their error, 4.5 times those of unit scale
    session = check_against_model(Graph((config,), optional=names), history, chunks, scale=5, **feeds)
    check_state(session, history, total)
