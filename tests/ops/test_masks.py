"""Padding, bias, head sinks and their order, against the NumPy model; masked tokens must never leak."""

from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto
from op_graph import Graph
from op_harness import Array, OpSession, assert_close, check_against_model, feed, random_history
from reference import OpConfig, attend

CHUNKS = (6, 1, 4, 1)
LENGTH = sum(CHUNKS)
CONFIGS = {
    "low": OpConfig(),
    "exact": OpConfig(n_recent=100),
    "mixed": OpConfig(n_recent=2, block=4, n_sink=1, group_size=32, key_center="block"),
}
PADDINGS = {
    "left": [[0, 0, 0] + [1] * 9, [1] * 12, [0] + [1] * 11],
    "right": [[1] * 5 + [0] * 7, [1] * 12, [1] * 9 + [0] * 3],
    "holes": [[0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0], [1, 0] * 6, [0, 1] * 6],
    "nothing_seen": [[0] * 12, [1] * 12, [0] * 11 + [1]],
}
PADDING_TYPES = {TensorProto.BOOL: bool, TensorProto.INT32: np.int32, TensorProto.INT64: np.int64}


def padding_of(name: str, element: int, extra_columns: int = 0) -> Array:
    rows = np.array(PADDINGS[name])
    columns = np.ones((3, extra_columns), rows.dtype)
    padded = np.concatenate([rows, columns], axis=1)
    # Any nonzero integer attends, also a negative one.
    return (padded * np.array([[1], [-3], [7]])).astype(PADDING_TYPES[element])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("element", PADDING_TYPES, ids=["bool", "int32", "int64"])
@pytest.mark.parametrize("name", PADDINGS)
@pytest.mark.parametrize("extra_columns", [0, 5])
def test_key_padding(config: OpConfig, element: int, name: str, extra_columns: int) -> None:
    graph = Graph((config,), optional=("key_padding",), padding_type=element)
    history = random_history(1, LENGTH, batch=3)
    check_against_model(graph, history, CHUNKS, key_padding=padding_of(name, element, extra_columns))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_fully_masked_queries_give_zeros(config: OpConfig) -> None:
    graph = Graph((config,), optional=("key_padding", "head_sink"))
    history = random_history(2, LENGTH, batch=3)
    padding = padding_of("left", TensorProto.INT64)
    session = OpSession(graph)
    found = feed(session, history, CHUNKS, key_padding=padding, head_sink=np.zeros(4))
    assert not found[0, :, :3].any()
    assert not found[2, :, 0].any()
    assert found[:, :, 3:].all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", PADDINGS)
def test_padded_row_equals_the_row_alone(config: OpConfig, name: str) -> None:
    graph = Graph((config,), optional=("key_padding",))
    history = random_history(3, LENGTH, batch=3)
    padding = padding_of(name, TensorProto.INT64)
    together = feed(OpSession(graph), history, CHUNKS, key_padding=padding)
    for row in range(3):
        alone = feed(OpSession(graph), history.row(row), CHUNKS, key_padding=padding[row : row + 1])
        np.testing.assert_array_equal(together[row], alone[0])


def test_left_padding_is_no_token_at_all_in_exact_mode() -> None:
    graph = Graph((CONFIGS["exact"],), optional=("key_padding",))
    history = random_history(3, LENGTH)
    padding = padding_of("left", TensorProto.INT64)[:1]
    padded = feed(OpSession(graph), history, CHUNKS, key_padding=padding)
    alone = OpSession(CONFIGS["exact"]).run(*history.part(3, LENGTH))
    assert_close(padded[:, :, 3:], alone)


BIAS_SHAPES = [
    (12, 12),
    (12,),
    (1,),
    (1, 1, 12, 12),
    (1, 4, 12, 12),
    (3, 1, 1, 12),
    (3, 4, 12, 12),
    (3, 1, 12, 1),
    (4, 1, 1),
    (4, 1, 12),
]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_attention_bias_broadcasts(shape: tuple[int, ...], config: OpConfig, dtype: str) -> None:
    rng = np.random.default_rng(4)
    bias = (2 * rng.standard_normal(shape)).astype(dtype).astype(np.float32)
    if bias.size > 1:
        bias[rng.random(shape) < 0.3] = -np.inf
    history = random_history(5, LENGTH, batch=3, dtype=dtype)
    graph = Graph((config,), dtype=dtype, optional=("attention_bias",))
    check_against_model(graph, history, CHUNKS, attention_bias=bias)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("low", ["infinity", "lowest"])
def test_masked_values_never_leak(config: OpConfig, low: str, dtype: str) -> None:
    """Tokens masked by bias carry poison; capping scores after the mask would bring them back."""
    history = random_history(6, LENGTH, dtype=dtype)
    hidden = [1, 4, 5]
    history.value[:, :, hidden] = 1e4
    bias = np.zeros((1, 1, 1, LENGTH), np.float32)
    bias[..., hidden] = -np.inf if low == "infinity" else np.finfo(dtype).min
    graph = Graph((replace(config, softcap=5.0),), dtype=dtype, optional=("attention_bias",))
    found = OpSession(graph).run(*history.part(0, LENGTH), attention_bias=bias)
    expected = attend(graph.layers[0], history.query, history.key, history.value, attention_bias=bias)
    assert_close(found, expected, dtype)
    assert np.abs(found).max() < 10


def test_alibi_follows_absolute_columns_and_misplacing_it_shows() -> None:
    slopes = 2.0 ** -np.arange(1, 5)[:, None, None]
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    bias = (-slopes * distance).astype(np.float32)[None]
    graph = Graph((CONFIGS["mixed"],), optional=("attention_bias",))
    history = random_history(7, LENGTH)
    check_against_model(graph, history, CHUNKS, attention_bias=bias)
    with pytest.raises(AssertionError, match="differ"):
        assert_close(
            OpSession(graph).run(*history.part(0, LENGTH), attention_bias=np.roll(bias, 1, axis=-1)),
            attend(graph.layers[0], history.query, history.key, history.value, attention_bias=bias),
        )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_head_sink(config: OpConfig, softcap: float, dtype: str) -> None:
    history = random_history(8, LENGTH, batch=2, dtype=dtype)
    config = replace(config, softcap=softcap)
    graph = Graph((config,), dtype=dtype, optional=("head_sink",))
    for sink in ([0.5, -2, 3, 0], [-np.inf] * 4, [20, 0, -20, -np.inf]):
        check_against_model(graph, history, CHUNKS, head_sink=np.array(sink))


def test_head_sink_only_enlarges_the_denominator() -> None:
    history = random_history(9, LENGTH)
    with_sink = Graph((OpConfig(),), optional=("head_sink",))
    plain = OpSession(OpConfig()).run(*history.part(0, LENGTH))
    none = OpSession(with_sink).run(*history.part(0, LENGTH), head_sink=[-np.inf] * 4)
    large = OpSession(with_sink).run(*history.part(0, LENGTH), head_sink=[20.0] * 4)
    np.testing.assert_array_equal(none, plain)
    assert np.abs(large).max() < 1e-4 * np.abs(plain).max()


def test_padding_bias_window_and_sink_together() -> None:
    config = OpConfig(n_recent=3, block=2, n_sink=1, window_left=6, softcap=4.0, key_bits=8, codes="full")
    optional = ("key_padding", "attention_bias", "head_sink")
    graph = Graph((config,), optional=optional, padding_type=TensorProto.BOOL)
    rng = np.random.default_rng(10)
    check_against_model(
        graph,
        random_history(11, LENGTH, batch=3),
        CHUNKS,
        key_padding=padding_of("holes", TensorProto.BOOL),
        attention_bias=rng.standard_normal((3, 4, LENGTH, LENGTH)).astype(np.float32),
        head_sink=rng.standard_normal(4),
    )
