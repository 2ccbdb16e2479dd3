"""The run-time guard: a look at the first low-bit keys, a warning where they fail, no change of bytes."""

import dataclasses
import functools
import subprocess
import sys
import warnings

import numpy as np
import onnxruntime
import pytest

import kvfuse
from benchmarks.stress_layers import LAYERS
from kvfuse import _native
from kvfuse.auto import attention as one
from kvfuse.auto.rewritten import EXACT
from kvfuse.formats import PRESETS, KvFormat

DEFAULT = PRESETS["default"]
# One scale for all channels of a token: a large channel makes it too coarse for the rest.
COARSE = dataclasses.replace(DEFAULT, group_size=0, rotation="none", key_center="none", n_sink=0)
TOKENS = 512
LIMIT = 0.25


@functools.cache
def operands(name: str) -> dict[str, np.ndarray]:
    found = LAYERS[name](64).attention.operands
    return {side: np.ascontiguousarray(array[:, :, :TOKENS]) for side, array in found.items()}


def session(chosen: KvFormat, guard: str | None = "warn", layer: str = "layers.5", **more):
    attributes = {"axis": 2, "causal": 1, **chosen.attributes(), "layer": layer, **more}
    if guard is not None:
        attributes["guard"] = guard
    types = dict.fromkeys(("query", "key", "value"), "float32")
    return kvfuse.InferenceSession(one._one_op(attributes, types, layer))


def run(opened, name: str, start: int = 0, end: int = TOKENS, **feeds):
    part = {side: array[:, :, start:end] for side, array in operands(name).items()}
    return opened.run(None, {**part, "kv_past_length": np.array([start]), **feeds})[0]


def key_error(opened) -> dict[str, float]:
    return opened.sequences[0].key_error()


def test_a_layer_that_fails_is_named_with_the_format_to_use():
    opened = session(COARSE)
    with pytest.warns(
        kvfuse.PrecisionWarning, match=r"\[layer 'layers\.5'\] expected .* at most 0\.25 .*"
    ) as caught:
        run(opened, "outliers_20")
    (warning,) = caught
    assert "4-bit keys" in str(warning.message)
    assert "key_bits 8" in str(warning.message)
    assert warning.filename == __file__
    assert key_error(opened)["layers.5"] > LIMIT


def test_it_says_so_once():
    opened = session(COARSE)
    with pytest.warns(kvfuse.PrecisionWarning):
        run(opened, "outliers_20")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(opened, "outliers_20")


@pytest.mark.parametrize("guard", ["warn", None], ids=["written", "absent"])
def test_a_good_format_is_looked_at_and_passes(guard):
    opened = session(DEFAULT, guard)
    run(opened, "outliers_20")
    assert 0.001 < key_error(opened)["layers.5"] < LIMIT


def test_off_does_not_look():
    opened = session(COARSE, "off")
    run(opened, "outliers_20")
    assert key_error(opened) == {}


def test_an_unknown_word_stops_the_session():
    with pytest.raises(Exception, match=r"expected guard to be 'warn' or 'off'; found 'loud'"):
        session(DEFAULT, "loud")


@pytest.mark.parametrize("chosen", [DEFAULT, COARSE], ids=["default", "coarse"])
def test_it_changes_no_byte_and_no_output(chosen):
    outputs, states = [], []
    for guard in ("warn", "off"):
        opened = session(chosen, guard)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", kvfuse.PrecisionWarning)
            outputs.append(run(opened, "constant_offset"))
        states.append(opened.sequences[0].freeze())
    np.testing.assert_array_equal(*outputs)
    assert states[0] == states[1]


@pytest.mark.parametrize("chosen", [DEFAULT, PRESETS["int4"]], ids=["default", "int4"])
@pytest.mark.parametrize("name", ["usual", "constant_offset", "outliers_20", "massive_first_token"])
def test_it_tells_the_error_of_the_whole_layer(name, chosen):
    """A few queries and the first 128 low-bit tokens against all of the second half: within a factor of 3.

    The errors go from 0.003 to 0.6, so a guard that measured something else would be found out.
    """
    data = operands(name)
    whole = one.Attention(
        {"axis": 2, "scale": 64**-0.5, "causal": 1, "window_left": -1, "softcap": 0.0}, data
    )
    error = whole.error(dataclasses.replace(chosen, value_bits=16), whole.output(EXACT))
    opened = session(chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kvfuse.PrecisionWarning)
        run(opened, name)
    assert error / 3 <= key_error(opened)["layers.5"] <= 3 * error


def test_one_token_at_a_time_is_looked_at_as_blocks_close():
    opened = session(DEFAULT)
    run(opened, "outliers_8", 0, 127)
    assert key_error(opened) == {}
    run(opened, "outliers_8", 127, 128)  # the first block leaves the window
    first = key_error(opened)["layers.5"]
    assert 0 < first < LIMIT
    for position in range(128, 192):
        run(opened, "outliers_8", position, position + 1)
    assert key_error(opened)["layers.5"] != first


def test_nothing_is_low_bit_in_exact_mode():
    opened = session(EXACT)
    run(opened, "usual")
    assert key_error(opened) == {}


def test_only_the_beginning_is_looked_at():
    opened = session(DEFAULT)
    run(opened, "usual", 0, 448)
    before = key_error(opened)
    run(opened, "usual", 448, 512)
    assert key_error(opened) == before


def test_a_fork_knows_and_a_new_conversation_looks_again():
    opened = session(DEFAULT)
    run(opened, "outliers_8")
    sequence = opened.sequences[0]
    before = sequence.key_error()
    with sequence.fork() as fork:
        assert fork.key_error() == before
    sequence.reset()
    assert sequence.key_error() == {}
    run(opened, "usual")
    assert sequence.key_error() != before


def test_an_unfrozen_state_has_not_been_looked_at():
    opened = session(DEFAULT)
    run(opened, "usual")
    with kvfuse.KvSequence.unfreeze(opened.sequences[0].freeze()) as sequence:
        assert sequence.key_error() == {}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_that_is_not_finite_gives_no_verdict(bad):
    data = {side: array.copy() for side, array in operands("usual").items()}
    data["key"][:, :, 70] = bad
    opened = session(DEFAULT)
    opened.run(None, data)
    assert key_error(opened) == {}


@pytest.mark.parametrize("more", [{"window_left": 100}, {"softcap": 20.0}], ids=["window", "softcap"])
def test_masks_and_caps_are_those_of_the_attention(more):
    opened = session(DEFAULT, **more)
    run(opened, "outliers_8")
    assert 0 < key_error(opened)["layers.5"] < LIMIT


def test_plain_onnxruntime_logs_the_warning(tmp_path):
    """Without kvfuse's session the sentence goes to onnxruntime's log, here in a process of its own."""
    model = tmp_path / "one.onnx"
    attributes = {"axis": 2, "causal": 1, **COARSE.attributes(), "layer": "layers.5", "guard": "warn"}
    model.write_bytes(
        one._one_op(attributes, dict.fromkeys(("query", "key", "value"), "float32"), "layers.5")
    )
    np.savez(tmp_path / "feeds.npz", **operands("outliers_20"))
    script = (
        "import sys, numpy, onnxruntime, kvfuse\n"
        "options = onnxruntime.SessionOptions()\n"
        "kvfuse.register(options)\n"
        "session = onnxruntime.InferenceSession(sys.argv[1], options, providers=['CPUExecutionProvider'])\n"
        "session.run(None, dict(numpy.load(sys.argv[2])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(model), str(tmp_path / "feeds.npz")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "[layer 'layers.5'] expected low-bit keys" in done.stderr


def test_sentences_go_to_their_own_session():
    """One that runs in plain onnxruntime, or in another session, is nobody else's warning."""
    failing, other = session(COARSE), session(DEFAULT)
    part = operands("outliers_20")
    onnxruntime.InferenceSession.run(failing, None, {**part, "kv_past_length": np.array([0])})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(other, "usual")
    assert len(_native.take_warnings(failing._token)) == 1
    assert _native.take_warnings(failing._token) == []
