import json

import numpy as np
import onnx
import pytest

import kvfuse
from kvfuse import decoder
from kvfuse.generate import Generation
from kvfuse.verify import Agreement, Limits, divergence, verify
from models.tiny_decoder import build


def test_divergence_is_that_of_two_distributions():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    expected = float((p * np.log(p / q)).sum())
    # A shift of all logits changes no distribution.
    found = divergence(np.log(p)[np.newaxis] + 3.0, np.log(q)[np.newaxis] - 7.0)
    assert found == pytest.approx([expected], rel=1e-12)
    assert divergence(np.array([[0.0, -np.inf]]), np.array([[0.0, -np.inf]])) == pytest.approx([0.0])


def test_agreement_folds_rows_in_any_pieces():
    random = np.random.default_rng(0)
    expected = random.standard_normal((150, 11)).astype(np.float32)
    found = expected + 0.3 * random.standard_normal((150, 11)).astype(np.float32)
    whole, pieces = Agreement(), Agreement()
    whole.add(expected, found)
    for part in (slice(0, 1), slice(1, 80), slice(80, 150)):
        pieces.add(expected[part], found[part])
    assert whole.positions == pieces.positions == 150
    assert whole.max_abs_error == pytest.approx(float(np.abs(expected - found).max()))
    assert whole.top1_agreement == np.mean(expected.argmax(1) == found.argmax(1))
    assert pieces.mean_kl == pytest.approx(whole.mean_kl, rel=1e-12)
    assert whole.mean_kl == pytest.approx(
        np.mean(
            [
                divergence(e[None], f[None])
                for e, f in zip(expected.astype(np.float64), found.astype(np.float64), strict=True)
            ]
        ),
        rel=1e-12,
    )
    assert whole.max_kl == pieces.max_kl > whole.mean_kl > 0


def test_nan_is_the_worst_error():
    agreement = Agreement()
    agreement.add(np.zeros((1, 3), np.float32), np.array([[0, np.nan, 0]], np.float32))
    assert agreement.max_abs_error == np.inf
    assert agreement.to_dict()["max_abs_error"] is None


def test_exact_mode_equals_the_original(original, exact):
    result = verify(original, exact, prompt_length=9, tokens=7)
    assert result.passed
    assert (result.prefill.positions, result.decode.positions) == (9, 6)
    assert max(result.prefill.max_abs_error, result.decode.max_abs_error) <= 1e-5
    assert result.rewritten_ids == result.original_ids
    assert len(result.original_ids) == 7
    json.dumps(result.to_dict(), allow_nan=False)


def test_low_bits_show_and_stay_small(original, low_bit):
    result = verify(original, low_bit, prompt_length=24, tokens=8, limits=Limits(max_error=1e-5))
    assert not result.passed
    assert 1e-4 < result.decode.max_abs_error < 2.0
    assert 0 < result.decode.mean_kl < 0.1


def test_limits_replace_the_test_for_identical_tokens(original, low_bit):
    arguments = {"prompt_length": 24, "tokens": 8}
    kl = max(
        verify(original, low_bit, **arguments).to_dict()[phase]["mean_kl"] for phase in ("prefill", "decode")
    )
    assert verify(original, low_bit, limits=Limits(max_mean_kl=kl), **arguments).passed
    assert not verify(original, low_bit, limits=Limits(max_mean_kl=kl * 0.01), **arguments).passed
    found = verify(original, low_bit, limits=Limits(max_mean_kl=kl, min_top1=1.01), **arguments)
    assert len(found.failures) == 1
    assert found.failures[0].startswith("expected a top-1 agreement of at least 1.01; found ")


def test_another_model_is_a_mismatch(original, tmp_path):
    onnx.save(build(seed=1), tmp_path / "other.onnx")
    kvfuse.rewrite(tmp_path / "other.onnx", tmp_path / "rewritten.onnx", n_recent=4096)
    result = verify(original, tmp_path / "rewritten.onnx", prompt_length=6, tokens=8)
    assert not result.passed
    number = result.first_difference + 1
    assert result.failures == [f"expected the same greedy tokens; found a difference at token {number}"]
    assert result.prefill.max_abs_error > 0.1


def test_after_the_first_difference_the_rewritten_text_runs_free(original, tmp_path):
    onnx.save(build(seed=1), tmp_path / "other.onnx")
    kvfuse.rewrite(tmp_path / "other.onnx", tmp_path / "rewritten.onnx", n_recent=4096)
    result = verify(original, tmp_path / "rewritten.onnx", prompt_length=6, tokens=8)
    alone = decoder.open_decoder(tmp_path / "rewritten.onnx")
    expected = Generation(alone, result.prompt_ids, max_new_tokens=8)
    assert result.rewritten_ids == list(expected)


def test_long_prompts_are_verified_in_pieces(original, exact, monkeypatch):
    whole = verify(original, exact, prompt_length=9, tokens=3)
    monkeypatch.setattr(decoder, "PREFILL_CHUNK", 4)
    result = verify(original, exact, prompt_length=9, tokens=3)
    assert result.prefill.positions == 9
    assert result.original_ids == whole.original_ids
    assert result.passed


def test_a_model_with_a_refused_layer_keeps_its_caches(tmp_path):
    model = build()
    present = next(value for value in model.graph.output if value.name == "present.1.key")
    model.graph.node.append(onnx.helper.make_node("Neg", ["present.1.key"], ["reads_the_cache"]))
    extra = onnx.ValueInfoProto()
    extra.CopyFrom(present)
    extra.name = "reads_the_cache"
    model.graph.output.append(extra)
    onnx.save(model, tmp_path / "mixed.onnx")
    report = kvfuse.rewrite(tmp_path / "mixed.onnx", tmp_path / "out.onnx", n_recent=4096).to_dict()
    assert sorted(site["outcome"] for site in report["sites"]) == ["fused", "refused"]
    inputs = [value.name for value in kvfuse.InferenceSession(tmp_path / "out.onnx").get_inputs()]
    assert [name for name in inputs if "past" in name] == ["past_key_values.1.key", "past_key_values.1.value"]
    result = verify(tmp_path / "mixed.onnx", tmp_path / "out.onnx", prompt_length=9, tokens=5)
    assert result.passed
    assert max(result.prefill.max_abs_error, result.decode.max_abs_error) <= 1e-5


@pytest.mark.parametrize("spelling", ["decomposed", "attention"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_spelling_and_type_is_verified(tmp_path, spelling, dtype):
    onnx.save(build(spelling, dtype=dtype), tmp_path / "in.onnx")
    kvfuse.rewrite(tmp_path / "in.onnx", tmp_path / "out.onnx", n_recent=4096)
    limit = Limits(max_error=1e-5 if dtype == "float32" else 5e-3)
    result = verify(tmp_path / "in.onnx", tmp_path / "out.onnx", prompt_length=6, tokens=5, limits=limit)
    assert result.passed, result.to_dict()


def test_progress_counts_both_models(original, exact):
    seen = []
    verify(original, exact, prompt_length=4, tokens=3, progress=lambda *step: seen.append(step))
    assert [step for step in seen if step[0] == "original"] == [("original", n, 7) for n in (4, 5, 6)]
    assert [step for step in seen if step[0] == "rewritten"] == [("rewritten", n, 7) for n in (4, 5, 6)]


def test_bad_arguments_are_refused(original, exact):
    with pytest.raises(kvfuse.OptionError, match="found 0, 3"):
        verify(original, exact, prompt_length=0, tokens=3)
    with pytest.raises(kvfuse.OptionError, match="expected a tokenizer"):
        verify(original, exact, text="hello")
