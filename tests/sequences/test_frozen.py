"""Frozen states: what they hold, that they go on where they stood, and that damage never gets in."""

import json
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from op_graph import Graph
from op_harness import OpSession, random_history, sequences
from reference import OpConfig, canonical_state
from token_model import FORMATS, check_outputs, check_state, fresh_state, rows, run, two_layers

import kvfuse
from kvfuse import _native

TOKENS = [(7 * index) % 40 for index in range(150)]
ITEMS = {"U8": np.uint8, "F16": np.float16, "F32": np.float32}


def parse(state: bytes) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and tensors of a safetensors container, read from its description alone."""
    (size,) = struct.unpack("<Q", state[:8])
    header = json.loads(state[8 : 8 + size])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        array = np.frombuffer(state[begin:end], ITEMS[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return metadata, tensors


@pytest.mark.parametrize("name", FORMATS)
def test_a_state_is_a_safetensors_file_of_the_canonical_state(name: str) -> None:
    """Anyone who reads safetensors can read it: names, shapes and the very bytes of the model in NumPy."""
    graph = two_layers(FORMATS[name], fingerprint="f" * 64)
    session = OpSession(graph)
    metadata, tensors = parse(fresh_state(session, TOKENS[:50]))
    assert metadata["format"] == "kvfuse-state"
    assert metadata["fingerprint"] == "f" * 64
    assert (metadata["length"], metadata["layers"]) == ("50", "2")
    _, key, value = rows(TOKENS[:50])
    for index, layer in enumerate(graph.layers):
        prefix = f"{index}."
        assert metadata[prefix + "layer"] == layer.layer
        assert metadata[prefix + "key_bits"] == str(layer.key_bits)
        assert metadata[prefix + "n_recent"] == str(layer.n_recent)
        expected = canonical_state(layer, key[0], value[0], 50)
        assert metadata[prefix + "encoded_end"] == str(expected.pop("encoded_end"))
        assert metadata[prefix + "begin"] == "0"
        assert expected.pop("length") == 50
        for field, array in expected.items():
            np.testing.assert_array_equal(tensors[prefix + field], array, err_msg=field)
        exact_begin = int(metadata[prefix + "exact_begin"])
        np.testing.assert_array_equal(tensors[prefix + "exact_key"], key[0][:, exact_begin:])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 130])
def test_an_unfrozen_sequence_goes_on_bit_by_bit(name: str, length: int) -> None:
    """In another session of the same model, beside the one that was never frozen."""
    session, other = OpSession(two_layers(FORMATS[name])), OpSession(two_layers(FORMATS[name]))
    held = TOKENS[:length]
    with kvfuse.KvSequence() as sequence:
        run(session, [sequence.id], [held])
        state = sequence.freeze()
        with kvfuse.KvSequence.unfreeze(state) as thawed:
            assert len(thawed) == length
            assert thawed.freeze() == state
            for count in (1, 3, 20):
                new = TOKENS[length : length + count]
                held = held + new
                expected = run(session, [sequence.id], [new])
                found = run(other, [thawed.id], [new])
                check_outputs(other, found, 0, held, count)
                for output in ("output_0", "output_1"):
                    np.testing.assert_array_equal(found[output], expected[output])
                check_state(other, thawed.id, held)


def test_a_window_that_has_freed_pages_is_frozen_without_them() -> None:
    config = OpConfig(window_left=16, n_recent=4)
    session = OpSession(two_layers(config))
    with kvfuse.KvSequence() as sequence:
        for begin in range(0, 150, 30):
            run(session, [sequence.id], [TOKENS[begin : begin + 30]])
        state = sequence.freeze()
        metadata, _ = parse(state)
        assert int(metadata["0.begin"]) == 64
        with kvfuse.KvSequence.unfreeze(state) as thawed:
            assert thawed.freeze() == state
            check_outputs(session, run(session, [thawed.id], [[5, 6]]), 0, [*TOKENS[:150], 5, 6], 2)
            with pytest.raises(kvfuse.SequenceError, match="freed older tokens"):
                thawed.truncate(20)


def test_an_empty_sequence_can_be_frozen() -> None:
    with kvfuse.KvSequence() as empty, kvfuse.KvSequence.unfreeze(empty.freeze()) as thawed:
        assert len(thawed) == 0
        run(OpSession(FORMATS["int4"]), [thawed.id], [[1, 2]])
        assert len(thawed) == 2


def test_uncommitted_tokens_of_a_failed_run_are_not_frozen() -> None:
    session = OpSession(two_layers(FORMATS["centred"], gates={0: "check"}))
    with kvfuse.KvSequence() as sequence:
        run(session, [sequence.id], [TOKENS[:20]], index=0)
        before = sequence.freeze()
        with pytest.raises(InvalidArgument):
            run(session, [sequence.id], [TOKENS[20:90]], index=4)
        assert sequence.freeze() == before
        with sequence.fork() as fork:
            assert fork.freeze() == before
            for layer in session.graph.layers:  # a fork has no memory of what failed
                assert _native.dump_layer(fork.id, layer.layer)["length"] == 20


def test_non_finite_tokens_survive() -> None:
    history = random_history(3, 20, head_dim=16)
    history.key[0, 0, 4, 3], history.value[0, 1, 6, 1] = np.nan, np.inf
    config = OpConfig(n_recent=4, group_size=32, codes="full")
    session = OpSession(config)
    with sequences(1) as handles, np.errstate(invalid="ignore"):
        session.run(*history.part(0, 19), kv_sequence=handles)
        state = _native.freeze_sequence(handles[0])
        thawed = _native.unfreeze_sequence(state)
        try:
            assert _native.freeze_sequence(thawed) == state
            expected = session.run(*history.part(19, 20), kv_sequence=handles)
            np.testing.assert_array_equal(session.run(*history.part(19, 20), kv_sequence=[thawed]), expected)
        finally:
            _native.destroy_sequence(thawed)


def test_another_model_is_named() -> None:
    """By its fingerprint, or by the layer and what its format was; the state can still be started again."""
    state = fresh_state(OpSession(two_layers(FORMATS["int4"], fingerprint="a" * 64)), TOKENS[:9])
    other = OpSession(two_layers(FORMATS["int4"], fingerprint="b" * 64))
    wider = OpSession(two_layers(replace(FORMATS["int4"], key_bits=8), fingerprint="a" * 64))
    fewer = OpSession(Graph((replace(FORMATS["int4"], layer="first"),), fingerprint="a" * 64))
    with kvfuse.KvSequence.unfreeze(state) as thawed:
        for session, sentence in (
            (other, f"fingerprint {'a' * 64}, 2 layers.*; found another .fingerprint {'b' * 64}"),
            (fewer, "2 layers.*; found another .*, 1 layers"),
            (wider, r"\[layer '(first|second)'\].*key/value bits 4/4.*; found .*key/value bits 8/4"),
        ):
            with pytest.raises(InvalidArgument, match=sentence):
                run(session, [thawed.id], [[1]])
            assert thawed.freeze() == state
        run(other, [thawed.id], [[1, 2]], kv_past_length=[0])
        check_state(other, thawed.id, [1, 2])


@pytest.fixture(scope="module")
def small() -> bytes:
    """A state of every kind of tensor, in one layer."""
    config = OpConfig(block=2, n_recent=1, n_sink=1, key_center="block", group_size=32)
    state = fresh_state(OpSession(config), [1, 2, 3])
    assert len(state) < 1500
    return state


def refuse(data: bytes) -> str:
    """The sentence of a refusal, which leaves neither a sequence nor a byte behind."""
    live, used = _native.live_sequences(), kvfuse.memory_in_use()
    with pytest.raises(kvfuse.SequenceError) as caught:
        kvfuse.KvSequence.unfreeze(data)
    assert (_native.live_sequences(), kvfuse.memory_in_use()) == (live, used)
    sentence = str(caught.value)
    assert re.match(r"\[state\] expected .*; found ", sentence, re.DOTALL), sentence
    return sentence


def test_every_truncation_is_refused(small: bytes) -> None:
    for length in range(len(small)):
        refuse(small[:length])
    refuse(small + b"\0")


def test_every_flipped_bit_is_refused(small: bytes) -> None:
    for position in range(len(small)):
        for bit in range(8):
            damaged = bytearray(small)
            damaged[position] ^= 1 << bit
            refuse(bytes(damaged))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda s: b"", "at least 8 bytes; found 0"),
        (lambda s: b"\xff" * 8 + s[8:], "a header of at most"),
        (lambda s: s.replace(b'"format":"kvfuse-state"', b'"format":"kvfuse-stats"'), "checksum"),
        (lambda s: s.replace(b'"checksum"', b'"chucksum"'), "the field 'checksum'; found none"),
        (
            lambda s: s.replace(b'"0.key_codes"', b'"0.value_codes"'),
            "each tensor once; found '0.value_codes' twice",
        ),
    ],
)
def test_damage_is_named(small: bytes, damage, sentence: str) -> None:
    assert sentence in refuse(damage(small))
