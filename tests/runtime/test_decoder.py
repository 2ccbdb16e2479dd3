import numpy as np
import onnx
import onnxruntime
import pytest
from tiny_feeds import IDS

import kvfuse
from kvfuse.decoder import PREFILL_CHUNK, Decoder, cache_names, chunks, open_decoder, pair_caches
from models.tiny_decoder import build


@pytest.mark.parametrize(
    ("past", "present"),
    [
        ("past_key_values.0.key", "present.0.key"),
        ("input.past_key_values.layers.0.keys", "output.past_key_values.layers.0.keys"),
        ("past_key_self_0", "present_key_self_0"),
        ("past_0", "present_0"),
    ],
)
def test_caches_are_paired_by_their_names(past, present):
    decoy = present.replace("0", "1")
    pairs = pair_caches(["input_ids", past], ["logits", decoy, present], {})
    assert pairs == {past: present}


def test_what_the_metadata_say_goes_before_names():
    outputs = ["logits", "present.0.key", "present.1.key"]
    pairs = pair_caches(
        ["input_ids", "past_key_values.0.key"], outputs, {"past_key_values.0.key": "present.1.key"}
    )
    assert pairs == {"past_key_values.0.key": "present.1.key"}


def test_nameless_caches_are_paired_by_order():
    pairs = pair_caches(["input_ids", "a", "b"], ["logits", "c", "d"], {})
    assert pairs == {"a": "c", "b": "d"}


def test_an_input_without_a_partner_is_refused(tmp_path):
    model = build()
    extra = onnx.helper.make_tensor_value_info("encoder_hidden_states", onnx.TensorProto.FLOAT, [1, 3])
    model.graph.input.append(extra)
    onnx.save(model, tmp_path / "extra.onnx")
    with pytest.raises(
        kvfuse.ModelError, match=r"\[decoder\] expected .* found input 'encoder_hidden_states'"
    ):
        open_decoder(tmp_path / "extra.onnx")


def test_the_metadata_of_a_rewritten_model_name_the_original_caches(original, exact):
    names = {
        f"past_key_values.{n}.{side}": f"present.{n}.{side}" for n in (0, 1) for side in ("key", "value")
    }
    assert cache_names(exact) == names
    assert cache_names(original) == {}


def test_stepping_equals_one_run(original):
    decoder = open_decoder(original)
    whole = decoder.step(IDS)
    assert whole.shape == (len(IDS), 64)
    decoder.reset()
    steps = np.concatenate([decoder.step(IDS[:3]), *(decoder.step([i]) for i in IDS[3:])])
    np.testing.assert_allclose(steps, whole, atol=1e-5)
    assert decoder.length == len(IDS)


def test_a_rewritten_model_steps_alike(original, exact):
    expected, found = open_decoder(original), open_decoder(exact)
    for ids in (IDS[:5], IDS[5:6], IDS[6:]):
        np.testing.assert_allclose(found.step(ids), expected.step(ids), atol=1e-5)
    expected.reset()
    found.reset()
    np.testing.assert_allclose(found.step(IDS), expected.step(IDS), atol=1e-5)


def test_reset_needs_no_kvfuse_session(exact):
    options = onnxruntime.SessionOptions()
    kvfuse.register(options)
    decoder = Decoder(onnxruntime.InferenceSession(exact, options, providers=["CPUExecutionProvider"]))
    first = decoder.step(IDS)
    decoder.reset()
    np.testing.assert_array_equal(decoder.step(IDS), first)


def test_long_prompts_are_cut():
    ids = list(range(2 * PREFILL_CHUNK + 1))
    pieces = chunks(ids)
    assert [len(piece) for piece in pieces] == [PREFILL_CHUNK, PREFILL_CHUNK, 1]
    assert [i for piece in pieces for i in piece] == ids


def test_an_empty_prompt_is_refused():
    with pytest.raises(kvfuse.ModelError, match=r"\[prompt\] expected at least one token"):
        chunks([])
