"""Wrong attributes, inputs, handles: a sentence that says where, expected and found; nothing changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
from op_graph import Graph
from op_harness import Array, OpSession, feed, random_history, sequences
from reference import OpConfig

from kvfuse import _native

CONFIG = OpConfig(n_recent=3, block=2, n_sink=1, layer="model.layers.7")
SENTENCE = r"\[.*\] .*expected .*; found .*"

BAD_ATTRIBUTES: list[tuple[dict[str, Any], str]] = [
    ({"axis": 0}, "axis"),
    ({"axis": 3}, "axis"),
    ({"axis": -1}, "axis"),
    ({"scale": float("nan")}, "scale"),
    ({"scale": float("inf")}, "scale"),
    ({"causal": 2}, "causal"),
    ({"causal": -1}, "causal"),
    ({"n_recent": -1}, "n_recent"),
    ({"block": 0}, "block"),
    ({"block": -4}, "block"),
    ({"n_sink": -1}, "n_sink"),
    ({"key_bits": 5}, "key_bits"),
    ({"key_bits": 0}, "key_bits"),
    ({"value_bits": 3}, "value_bits"),
    ({"value_bits": 32}, "value_bits"),
    ({"group_size": 7}, "group_size"),
    ({"group_size": -32}, "group_size"),
    ({"group_size": 128}, "group_size"),
    ({"codes": "loud"}, "codes"),
    ({"codes": ""}, "codes"),
    ({"rotation": "fourier"}, "rotation"),
    ({"key_center": "token"}, "key_center"),
    ({"key_center": "block", "block": 1}, "key_center"),
    ({"window_left": -2}, "window_left"),
    ({"softcap": -1.0}, "softcap"),
    ({"softcap": float("nan")}, "softcap"),
    ({"softcap": float("inf")}, "softcap"),
]


@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize(("changes", "name"), BAD_ATTRIBUTES, ids=lambda value: str(value))
def test_bad_attributes_stop_the_session(changes: dict[str, Any], name: str, slots: bool) -> None:
    config = OpConfig(**{**CONFIG.__dict__, **changes})
    with pytest.raises(RuntimeException, match=SENTENCE) as caught:
        OpSession(Graph((config,), slots=slots))
    message = str(caught.value)
    assert CONFIG.layer in message
    assert name in message
    found = str(changes[name])
    assert found.split(".")[0] in message  # 2.0 may be written 2


def test_layer_keys_must_differ() -> None:
    with pytest.raises((RuntimeException, InvalidArgument), match=r"model\.layers\.7"):
        OpSession(Graph((CONFIG, CONFIG))).run(*random_history(1, 3).part(0, 3))


def test_layer_unknown_to_begin_is_an_error() -> None:
    session_graph = Graph((CONFIG,), declared_layers="another")
    with pytest.raises((RuntimeException, InvalidArgument), match=r"model\.layers\.7"):
        OpSession(session_graph).run(*random_history(1, 3).part(0, 3))


@contextmanager
def unchanged(session: OpSession) -> Iterator[None]:
    """A sequence of two rows and six tokens, of which an error in the block must not change a byte."""
    history = random_history(2, 10, batch=2)
    feed(session, history, (4, 2), **neutral(session, 2))
    before = [session.dump(row) for row in range(2)]
    yield
    assert len(session.default_sequences()) == 2
    for row, dump in enumerate(before):
        np.testing.assert_equal(session.dump(row), dump)
    fresh = OpSession(session.graph)
    feed(fresh, history, (4, 2), **neutral(session, 2))
    after = [one.run(*history.part(6, 10), **neutral(session, 2)) for one in (session, fresh)]
    np.testing.assert_array_equal(*after)


def neutral(session: OpSession, batch: int) -> dict[str, Array]:
    """Values of the optional inputs that mask and change nothing."""
    values = {"key_padding": np.ones((batch, 10), np.int64)}
    values |= {"attention_bias": np.zeros(1), "head_sink": np.zeros(4)}
    return {name: values[name] for name in session.graph.optional}


def tokens(count: int = 2, **sizes: int) -> list[Array]:
    return list(random_history(3, count, **{"batch": 2, **sizes}).part(0, count))


def with_part(index: int, **sizes: int) -> list[Array]:
    """Good tokens of which one of query, key, value has other sizes."""
    changed = tokens()
    changed[index] = tokens(**{"count": 2, **sizes})[index]
    return changed


BAD_TENSORS: dict[str, Callable[[], list[Array]]] = {
    "batch": lambda: tokens(batch=1),
    "larger_batch": lambda: tokens(batch=3),
    "head_dim": lambda: tokens(head_dim=8),
    "value_dim": lambda: tokens(value_dim=8),
    "kv_heads": lambda: tokens(kv_heads=4),
    "uneven_groups": lambda: with_part(0, num_heads=5),
    "key_length": lambda: with_part(1, count=3),
    "value_length": lambda: with_part(2, count=1),
    "query_length": lambda: with_part(0, count=3),
    "key_batch": lambda: with_part(1, batch=1),
    "value_batch": lambda: with_part(2, batch=3),
    "key_heads": lambda: with_part(1, kv_heads=1),
    "value_heads": lambda: with_part(2, kv_heads=4),
    "query_head_dim": lambda: with_part(0, head_dim=32),
    "key_head_dim": lambda: with_part(1, head_dim=8),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
@pytest.mark.parametrize("axis", [1, 2])
def test_bad_tensors_change_nothing(name: str, axis: int) -> None:
    session = OpSession(OpConfig(**{**CONFIG.__dict__, "axis": axis}))
    with unchanged(session), pytest.raises(InvalidArgument, match=SENTENCE) as caught:
        session.run(*BAD_TENSORS[name]())
    # Begin sees only the batch size; everything else is told by the layer.
    assert CONFIG.layer in str(caught.value) or "batch" in name


@pytest.mark.parametrize("past_length", [0, 3])
@pytest.mark.parametrize("name", ["value_length", "uneven_groups", "query_length"])
def test_refused_run_does_not_roll_back(name: str, past_length: int) -> None:
    session = OpSession(CONFIG)
    with unchanged(session), pytest.raises(InvalidArgument, match=SENTENCE):
        session.run(*BAD_TENSORS[name](), kv_past_length=[past_length])


BAD_OPTIONAL: dict[str, tuple[str, Any]] = {
    "padding_too_short": ("key_padding", np.ones((2, 7), np.int64)),
    "padding_of_one_row": ("key_padding", np.ones((3, 8), np.int64)),
    "bias_columns": ("attention_bias", np.zeros((1, 1, 2, 7), np.float32)),
    "bias_more_columns": ("attention_bias", np.zeros((1, 1, 2, 9), np.float32)),
    "bias_rows": ("attention_bias", np.zeros((1, 1, 3, 8), np.float32)),
    "bias_heads": ("attention_bias", np.zeros((1, 3, 2, 8), np.float32)),
    "bias_batch": ("attention_bias", np.zeros((3, 1, 2, 8), np.float32)),
    "bias_rank": ("attention_bias", np.zeros((1, 1, 1, 2, 8), np.float32)),
    "sink_heads": ("head_sink", np.zeros(2, np.float32)),
}


@pytest.mark.parametrize("name", BAD_OPTIONAL)
def test_bad_masks_change_nothing(name: str) -> None:
    which, value = BAD_OPTIONAL[name]
    session = OpSession(Graph((CONFIG,), optional=(which,)))
    with unchanged(session), pytest.raises(InvalidArgument, match=SENTENCE) as caught:
        session.run(*tokens(), **{which: value})
    assert CONFIG.layer in str(caught.value)
    assert which in str(caught.value)


def destroyed_handle() -> int:
    handle = _native.create_sequence()
    _native.destroy_sequence(handle)
    return int(handle)


BAD_HANDLES: dict[str, Callable[[], dict[str, Any]]] = {
    "unknown": lambda: {"kv_sequence": [0, 987654321]},
    "negative": lambda: {"kv_sequence": [-3, 0]},
    "destroyed": lambda: {"kv_sequence": [destroyed_handle(), 0]},
    "beyond_length": lambda: {"kv_past_length": [7]},
    "beyond_length_of_one_row": lambda: {"kv_past_length": [6, 7]},
    "negative_length": lambda: {"kv_past_length": [-2]},
    "three_handles_for_two_rows": lambda: {"kv_sequence": [0, 0, 0]},
    "three_lengths_for_two_rows": lambda: {"kv_past_length": [6, 6, 6]},
    "no_handles": lambda: {"kv_sequence": np.zeros(0, np.int64)},
}


@pytest.mark.parametrize("name", BAD_HANDLES)
def test_bad_handles_and_lengths_change_nothing(name: str) -> None:
    session = OpSession(CONFIG)
    feeds = BAD_HANDLES[name]()
    with unchanged(session), pytest.raises(InvalidArgument, match=SENTENCE) as caught:
        session.run(*tokens(), **feeds)
    named = [value for value in np.asarray(next(iter(feeds.values()))).tolist() if value not in (0, 6)]
    assert not named or str(named[0]) in str(caught.value)


def test_one_handle_twice_in_a_batch() -> None:
    session = OpSession(CONFIG)
    with sequences(1) as handles:
        for fed in (handles * 2, handles):  # a single handle stands for every row
            with pytest.raises(InvalidArgument, match=SENTENCE) as caught:
                session.run(*tokens(), kv_sequence=fed)
            assert str(handles[0]) in str(caught.value)
        assert _native.sequence_length(handles[0]) == 0


def test_length_beyond_an_explicit_sequence_names_it() -> None:
    session = OpSession(CONFIG)
    with sequences(1) as handles:
        session.run(*tokens(batch=1), kv_sequence=handles)
        before = _native.dump_layer(handles[0], CONFIG.layer)
        with pytest.raises(InvalidArgument, match=SENTENCE) as caught:
            session.run(*tokens(batch=1), kv_sequence=handles, kv_past_length=[3])
        assert str(handles[0]) in str(caught.value)
        np.testing.assert_equal(_native.dump_layer(handles[0], CONFIG.layer), before)


def test_sequence_of_another_model() -> None:
    first = OpSession(Graph((CONFIG,), fingerprint="a" * 64))
    second = OpSession(Graph((CONFIG,), fingerprint="b" * 64))
    with sequences(1) as handles:
        first.run(*tokens(batch=1), kv_sequence=handles)
        with pytest.raises(InvalidArgument, match=SENTENCE) as caught:
            second.run(*tokens(batch=1), kv_sequence=handles)
        assert str(handles[0]) in str(caught.value)
        assert _native.sequence_length(handles[0]) == 2


def test_unequal_rows_need_vector_past_lengths() -> None:
    uniform, ragged = OpSession(Graph((CONFIG,), uniform=True)), OpSession(CONFIG)
    with sequences(2) as handles:
        ragged.run(*tokens(batch=1), kv_sequence=handles[:1])
        with pytest.raises(InvalidArgument, match=SENTENCE):
            uniform.run(*tokens(), kv_sequence=handles)
        assert [_native.sequence_length(handle) for handle in handles] == [2, 0]
        assert ragged.run_all(*tokens(), kv_sequence=handles)["past_lengths"].tolist() == [2, 0]


def test_mixed_element_types_do_not_load() -> None:
    with pytest.raises((Fail, RuntimeException, InvalidArgument)):
        OpSession(Graph((CONFIG,), dtype="float16", key_dtype="float32"))


@pytest.mark.parametrize(
    "call",
    [
        lambda handle: _native.sequence_length(handle),
        lambda handle: _native.truncate_sequence(handle, 0),
        lambda handle: _native.sequence_nbytes(handle),
        lambda handle: _native.sequence_exact_begin(handle),
        lambda handle: _native.dump_layer(handle, CONFIG.layer),
        lambda handle: _native.destroy_sequence(handle),
    ],
    ids=["length", "truncate", "nbytes", "exact_begin", "dump", "destroy"],
)
def test_native_calls_name_a_handle_they_do_not_know(call: Callable[[int], object]) -> None:
    handle = destroyed_handle()
    with pytest.raises(ValueError, match=rf"{handle}"):
        call(handle)


@pytest.mark.parametrize("length", [3, -1])
def test_truncate_to_a_length_that_is_not_there(length: int) -> None:
    session = OpSession(CONFIG)
    with sequences(1) as handles:
        session.run(*tokens(batch=1), kv_sequence=handles)
        with pytest.raises(ValueError, match=SENTENCE) as caught:
            _native.truncate_sequence(handles[0], length)
        assert str(length) in str(caught.value)
        assert _native.sequence_length(handles[0]) == 2
