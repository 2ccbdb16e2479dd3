"""The operator's own tests, a part of them, on a device; `KVFUSE_TEST_DEVICE=… pytest tests/ops` runs all."""

from typing import Any

import numpy as np
import op_harness
import pytest
from op_graph import Graph
from op_harness import check_against_model, check_state, random_history
from reference import OpConfig

from kvfuse.provider import VARIANTS

PRESET = OpConfig(
    codes="full", group_size=32, n_recent=64, block=64, n_sink=4, key_center="block", layer="preset"
)
CONFIGS = {
    "low": OpConfig(),
    "not_causal": OpConfig(causal=0),
    "groups": OpConfig(group_size=32, codes="full"),
    "recent": OpConfig(n_recent=5, n_sink=2),
    "blocks": OpConfig(block=4, n_sink=1, key_bits=8),
    "centred": OpConfig(n_recent=6, block=4, key_center="block", codes="full", group_size=32),
    "bytes": OpConfig(key_bits=8, value_bits=8, group_size=64),
    "half": OpConfig(n_recent=2, key_bits=16, value_bits=16),
    "plain": OpConfig(rotation="none", axis=1),
    "window": OpConfig(n_recent=4, block=2, window_left=9),
    "softcap": OpConfig(softcap=2.0, scale=0.5),
}
SIZES = {"even": (64, 64), "odd": (7, 12), "parts": (80, 72), "large": (128, 128)}


@pytest.fixture(autouse=True, params=VARIANTS)
def variant(request, device, monkeypatch) -> str:
    """Every session of these tests is made on the device, in one variant of its kernels."""
    monkeypatch.setattr(op_harness, "DEVICE", device)
    monkeypatch.setattr(op_harness, "VARIANT", request.param)
    return request.param


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_prompts_and_steps(config: OpConfig) -> None:
    """70 tokens cross a page of 64; the last chunks are decode steps."""
    history = random_history(1, 75, batch=2, head_dim=40)
    session = check_against_model(config, history, (70, 1, 0, 3, 1))
    check_state(session, history, 75)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (3, 3)])
def test_head_sizes(sizes: tuple[int, int], heads: tuple[int, int]) -> None:
    history = random_history(
        2, 20, num_heads=heads[0], kv_heads=heads[1], head_dim=sizes[0], value_dim=sizes[1]
    )
    config = OpConfig(group_size=32, codes="full", n_recent=3)
    check_state(check_against_model(config, history, (18, 1, 1)), history, 20)


def test_the_default_preset_over_several_blocks() -> None:
    history = random_history(3, 203, head_dim=64)
    check_state(check_against_model(PRESET, history, (200, 1, 1, 1)), history, 203)


@pytest.mark.parametrize("name", ["key_padding", "attention_bias", "head_sink"])
def test_masks(name: str) -> None:
    random = np.random.default_rng(4)
    total = 40
    bias = random.standard_normal((2, 4, total, total)).astype(np.float32)
    bias[random.random(bias.shape) < 0.1] = -np.inf
    feeds: dict[str, Any] = {
        "key_padding": (random.random((2, total)) < 0.8).astype(np.int64),
        "attention_bias": bias,
        "head_sink": random.standard_normal(4).astype(np.float32),
    }
    history = random_history(4, total, batch=2)
    graph = Graph((OpConfig(n_recent=5),), optional=(name,))
    check_against_model(graph, history, (33, 1, 6), **{name: feeds[name]})


def test_one_bad_token_poisons_only_who_sees_it() -> None:
    history = random_history(5, 30)
    history.key[0, 1, 7, 3] = np.nan
    history.value[0, 0, 12, 2] = np.inf
    check_state(check_against_model(OpConfig(window_left=9), history, (20, 5, 5)), history, 30)


def test_half_precision() -> None:
    history = random_history(6, 40, dtype="float16")
    check_against_model(Graph((OpConfig(n_recent=4),), dtype="float16"), history, (33, 1, 6))
