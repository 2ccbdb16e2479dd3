"""The plain three-input form keeps its own state, without KvCacheBegin, handles or a session token."""

import gc
from dataclasses import replace

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from op_graph import Graph
from op_harness import OpSession, assert_close, check_against_model, feed, random_history
from reference import OpConfig, attend

from kvfuse import _native

CONFIGS = {
    "low": OpConfig(),
    "mixed": OpConfig(n_recent=3, block=4, n_sink=1, key_center="block", group_size=32),
    "exact": OpConfig(n_recent=100, causal=0),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layer", ["", "layers.0"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_three_inputs(config: OpConfig, layer: str, dtype: str) -> None:
    graph = Graph((replace(config, layer=layer),), slots=False, dtype=dtype)
    check_against_model(graph, random_history(1, 17, batch=2, dtype=dtype), (7, 0, 1, 9))


def test_optional_inputs_without_slots() -> None:
    graph = Graph((CONFIGS["mixed"],), slots=False, optional=("key_padding", "head_sink"))
    padding = np.ones((2, 20), np.int64)
    padding[0, :2] = 0
    history = random_history(2, 17, batch=2)
    check_against_model(graph, history, (7, 1, 9), key_padding=padding, head_sink=np.array([0.0, 1, -1, 2]))


@pytest.mark.parametrize("layer", ["", "same"])
def test_nodes_with_identical_inputs_and_keys_keep_separate_state(layer: str) -> None:
    layers = (replace(CONFIGS["mixed"], layer=layer), replace(CONFIGS["low"], layer=layer, key_bits=8))
    session = OpSession(Graph(layers, slots=False))
    history = random_history(3, 14)
    begin = 0
    for size in (6, 1, 7):
        results = session.run_all(*history.part(begin, begin + size))
        for index, config in enumerate(layers):
            query = history.query[:, :, begin : begin + size]
            expected = attend(config, query, history.key, history.value, past=begin)
            assert_close(results[f"output_{index}"], expected)
        begin += size


def test_sessions_share_nothing() -> None:
    graph = Graph((CONFIGS["low"],), slots=False)
    history = random_history(4, 10)
    first, second = OpSession(graph), OpSession(graph)
    feed(first, random_history(5, 6), (6,))
    found = feed(second, history, (4, 6))
    np.testing.assert_array_equal(found, feed(OpSession(graph), history, (4, 6)))


@pytest.mark.parametrize(
    "sizes", [{"batch": 1}, {"batch": 3}, {"head_dim": 8}, {"value_dim": 8}, {"num_heads": 2, "kv_heads": 1}]
)
def test_changed_sizes_change_nothing(sizes: dict[str, int]) -> None:
    config = CONFIGS["mixed"]
    graph = Graph((config,), slots=False)
    session = OpSession(graph)
    history = random_history(6, 10, batch=2)
    first = feed(session, history, (6,))
    with pytest.raises(InvalidArgument, match=r"layers\.0.*expected .*; found .*"):
        session.run(*random_history(7, 2, **{"batch": 2, **sizes}).part(0, 2))
    second = feed(session, history, (4,), begin=6)
    np.testing.assert_array_equal(
        np.concatenate([first, second], axis=2), feed(OpSession(graph), history, (6, 4))
    )


def test_private_state_dies_with_its_session() -> None:
    gc.collect()
    before = _native.live_sequences()
    session = OpSession(Graph((CONFIGS["low"],), slots=False))
    feed(session, random_history(8, 5, batch=2), (5,))
    del session
    gc.collect()
    assert _native.live_sequences() == before


def test_initializers_only_node_does_not_run_at_session_creation() -> None:
    """onnxruntime folds constant nodes; this one has a state, so its first run must see an empty one."""
    history = random_history(9, 4)
    config = CONFIGS["low"]
    session = OpSession(Graph((config,), slots=False, constants=history.part(0, 4)))
    past = 0
    for _ in range(3):
        (found,) = session.session.run(["output_0"], {})
        repeats = past // 4 + 1
        key, value = (np.tile(tensor, (1, 1, repeats, 1)) for tensor in (history.key, history.value))
        assert_close(found, attend(config, history.query, key, value, past=past))
        past += 4
