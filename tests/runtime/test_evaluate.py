"""The evaluation of rewritten models on tiny decoders, against sums written out in NumPy."""

import json
import math

import numpy as np
import pytest
from reference import OpConfig, attend
from rich.console import Console

import kvfuse
from kvfuse.decoder import open_decoder
from kvfuse.errors import ModelError, OptionError
from kvfuse.evaluate import compare, evaluate, record
from kvfuse.evaluate_layers import capture, measure_layers, read_layers
from kvfuse.evaluate_plan import Plan
from kvfuse.evaluate_scores import BLOCK, TokenScores, score, standard_error, summarize
from kvfuse.evaluate_text import Needle, hide
from kvfuse.formats import PRESETS
from kvfuse.generate import Generation
from models.tiny_decoder import build

VOCABULARY = 64


def tokens(count, seed=0):
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, VOCABULARY, count))


def log_softmax(logits):
    shifted = np.asarray(logits, np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def plan():
    needles = tuple(Needle(depth, tokens(4, 10 + i), tokens(3, 20 + i), tokens(2, 30 + i))
                    for i, depth in enumerate((0.2, 0.8)))  # fmt: skip
    windows = (tokens(200, 1), tokens(200, 2))
    return Plan(
        windows, (windows[0][:20], windows[1][:20]), 8, tuple(hide(needles, windows[0], 100)), needles, 96
    )


@pytest.fixture(scope="module")
def evaluation(original, exact, low_bit, plan):
    return evaluate(original, [exact, low_bit], plan)


def test_scores_are_those_of_numpy():
    random = np.random.default_rng(0)
    # Larger than one block of rows, so that the seams are passed over.
    expected = (4 * random.standard_normal((300, 40_000))).astype(np.float32)
    found = expected + random.standard_normal(expected.shape).astype(np.float32)
    targets = random.integers(0, 40_000, 300)
    p, q = log_softmax(expected), log_softmax(found)
    scores = score(found, targets, expected)
    # f32 exponentials of numbers below 32 in size are off by up to 32 * 2^-24, sums and KL by a few of those.
    np.testing.assert_allclose(scores.nll, -q[np.arange(300), targets], rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores.kl, (np.exp(p) * (p - q)).sum(1), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(scores.same, expected.argmax(1) == found.argmax(1))


def test_equal_logits_do_not_diverge_at_all():
    logits = np.random.default_rng(1).standard_normal((5, 1000)).astype(np.float32)
    assert score(logits, np.zeros(5, np.int64), logits.copy()).kl.tolist() == [0.0] * 5


def test_tokens_that_neither_model_allows_do_not_count():
    logits = np.array([[0.0, 1.0, -np.inf]], np.float32)
    other = np.array([[1.0, 0.0, -np.inf]], np.float32)
    p, q = log_softmax(logits[:, :2]), log_softmax(other[:, :2])
    assert score(other, np.array([0]), logits).kl == pytest.approx((np.exp(p) * (p - q)).sum(), abs=1e-6)


def test_logits_that_are_not_finite_are_named():
    with pytest.raises(ModelError, match=r"\[bad\] expected finite logits; found NaN or infinity"):
        score(np.array([[0, np.nan]], np.float32), np.array([0]), where="bad")


def test_errors_come_from_whole_blocks():
    random = np.random.default_rng(2)
    windows = [random.standard_normal(3 * BLOCK + 5), random.standard_normal(2 * BLOCK)]
    means = [windows[0][i * BLOCK : (i + 1) * BLOCK].mean() for i in range(3)]
    means += [windows[1][i * BLOCK : (i + 1) * BLOCK].mean() for i in range(2)]
    assert standard_error(windows) == pytest.approx(np.std(means, ddof=1) / math.sqrt(5), rel=1e-12)
    assert math.isnan(standard_error([np.ones(2 * BLOCK - 1)]))


def test_figures_add_up():
    base = TokenScores(np.array([1.0, 3.0]), np.zeros(2), np.ones(2, np.bool_))
    found = TokenScores(np.array([1.5, 2.9]), np.array([0.1, 0.3]), np.array([True, False]))
    scores = summarize([found], [base])
    assert scores.perplexity == pytest.approx(math.exp(2.2))
    assert scores.change == pytest.approx(math.exp(0.2) - 1)
    assert (scores.kl, scores.kl_max, scores.top1) == (pytest.approx(0.2), 0.3, 0.5)
    assert scores.to_dict()["change_se"] is None  # JSON has no NaN


def test_a_model_against_itself_is_perfect(original, plan, tmp_path):
    reference = record(original, plan, tmp_path)
    scores = reference.observation.scores
    logits = np.load(tmp_path / "window_1.npy")
    again = score(logits[:-1], np.asarray(plan.windows[1][1:]), logits[:-1])
    found = summarize([scores[0], again], scores)
    assert (found.kl, found.kl_max, found.change, found.top1) == (0.0, 0.0, 0.0, 1.0)


def test_exact_mode_is_the_original(evaluation):
    exact = evaluation.results[0]
    # Logits agree to 1e-5: KL is half the variance of their differences at most, and f32 sums add about 1e-6.
    assert exact.scores.kl < 2e-6
    assert abs(exact.scores.change) < 2e-5
    assert exact.scores.top1 == 1.0
    assert [run.same for run in exact.greedy] == [8, 8]
    assert all(run.gap is None for run in exact.greedy)


def test_the_cache_is_what_is_scored(evaluation, original, low_bit, plan):
    """Token-by-token decoding of the low-bit model gives the figures that the chunks gave."""
    losses, divergences = [], []
    for window in plan.windows:
        first, second = open_decoder(original), open_decoder(low_bit)
        p = log_softmax(np.concatenate([first.step([token]) for token in window[:-1]]))
        q = log_softmax(np.concatenate([second.step([token]) for token in window[:-1]]))
        losses += (-q[np.arange(len(q)), window[1:]]).tolist()
        divergences += (np.exp(p) * (p - q)).sum(1).tolist()
    scores = evaluation.results[1].scores
    assert scores.positions == 2 * 199
    # Outputs of chunks agree to 1e-5; logits sum 32 channels of them, each times a weight of about 1.
    assert scores.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert scores.kl == pytest.approx(np.mean(divergences), rel=1e-2)
    assert scores.kl > 1e-4  # the format shows


def test_greedy_text_stops_at_the_first_difference(evaluation, original, low_bit, plan):
    for prompt, run in zip(plan.prompts, evaluation.results[1].greedy, strict=True):
        first = list(Generation(open_decoder(original), prompt, max_new_tokens=8))
        second = list(Generation(open_decoder(low_bit), prompt, max_new_tokens=8))
        same = next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), 8)
        assert run.same == same
        assert (run.gap is None) == (same == 8)


def test_needles_are_asked_after_the_whole_haystack(evaluation, original, low_bit, plan):
    for path, found in ((original, evaluation.needles), (low_bit, evaluation.results[1].needles)):
        for needle, result in zip(plan.needles, found, strict=True):
            decoder = open_decoder(path)
            decoder.prefill(plan.haystack)
            rows = log_softmax(decoder.step([*needle.question, *needle.answer]))[-3:-1]
            expected = rows[[0, 1], list(needle.answer)].mean()
            # All tokens are low-bit here, so that taking a question back leaves no trace.
            assert result.log_probability == pytest.approx(expected, abs=1e-4)
            assert result.depth == needle.depth


def test_needles_lie_at_their_depths():
    needles = [Needle(depth, (100 + i,), (1, 2), (3,)) for i, depth in enumerate((0.0, 0.5, 1.0))]
    text = hide(needles, range(50), 36)
    assert len(text) == 36 - 3
    assert [text.index(100 + i) for i in range(3)] == [1, 16, 32]
    assert [token for token in text if token < 100] == list(range(30))
    with pytest.raises(OptionError, match=r"\[needles\] expected room"):
        hide(needles, range(50), 6)


def test_bytes_are_those_of_the_formats(evaluation, low_bit):
    layers = read_layers(low_bit)
    assert [layer.layer for layer in layers] == ["0", "1"]
    result = evaluation.results[1]
    per_token = sum(layer.format.bytes_per_token(2, 16, 16) for layer in layers)
    assert result.bytes_per_token == per_token
    assert result.bits_per_element == 8 * per_token / (2 * 2 * 32)
    assert (evaluation.bytes_per_token, evaluation.bits_per_element) == (2 * 2 * 32 * 4, 32)
    # Without an exact window all tokens are low-bit; pages of 64 tokens round up.
    assert per_token * 200 <= result.resident_bytes <= per_token * 256


def test_layers_are_measured_alone(original, low_bit, plan):
    """The error of layer 0 is that of the reference op on the layer's own operands."""
    ids = plan.windows[0][:96]
    (first, _), errors = capture(low_bit, ids, 32), list(measure_layers(low_bit, ids, 32))
    query, key, value = (np.concatenate([chunk[i] for chunk in first.chunks], axis=2) for i in range(3))
    exact = np.concatenate(first.outputs, axis=2)
    for bits, found in (((4, 16), errors[0].keys), ((16, 4), errors[0].values), ((4, 4), errors[0].both)):
        config = OpConfig(**(first.layer.format.attributes() | {"key_bits": bits[0], "value_bits": bits[1]}))
        output = attend(config, query, key, value)
        gap = np.linalg.norm((output - exact)[:, :, 48:]) / np.linalg.norm(exact[:, :, 48:])
        assert found == pytest.approx(gap, rel=1e-3)  # outputs agree to 1e-5, errors are above 1e-2
        assert found > 1e-2


def test_chunks_do_not_change_the_layers(low_bit, plan):
    whole, ragged = (list(measure_layers(low_bit, plan.windows[0][:96], chunk)) for chunk in (96, 7))
    for one, other in zip(whole, ragged, strict=True):
        assert one.both == pytest.approx(other.both, rel=1e-3)  # as above


def test_every_preset_is_measured(original, plan, tmp_path):
    paths = []
    for name in PRESETS:
        paths.append(tmp_path / f"{name}.onnx")
        kvfuse.rewrite(original, paths[-1], format=name)
    short = Plan(plan.windows[:1], layer_tokens=128)
    found = {result.name: result for result in evaluate(original, paths, short).results}
    assert found["exact"].scores.kl < 2e-6  # as above
    assert found["int8"].scores.kl < found["default"].scores.kl < found["int4"].scores.kl
    assert all(layer.both == 0 for layer in found["exact"].layers)
    sizes = {name: 4 * chosen.bytes_per_token(1, 16, 16) for name, chosen in PRESETS.items()}
    assert {name: result.bytes_per_token for name, result in found.items()} == sizes


def test_another_vocabulary_is_refused(original, plan, tmp_path):
    import onnx

    onnx.save(build(vocab_size=65), tmp_path / "other.onnx")
    kvfuse.rewrite(tmp_path / "other.onnx", tmp_path / "rewritten.onnx")
    reference = record(original, plan, tmp_path)
    with pytest.raises(ModelError, match=r"expected the original's vocabulary of 64; found 65"):
        compare(reference, tmp_path / "rewritten.onnx")


def test_a_model_that_is_not_rewritten_is_refused(original, plan):
    with pytest.raises(ModelError, match=r"expected a model that kvfuse rewrote; found none of its ops"):
        evaluate(original, [original], plan)


def test_the_report_is_plain_data_and_a_table(evaluation):
    data = json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))
    assert data["results"][1]["kl"] == evaluation.results[1].scores.kl
    assert len(data["results"][1]["layers"]) == 2
    console = Console(record=True, width=160, force_terminal=False)
    evaluation.render(console)
    text = console.export_text()
    for words in ("bits/element", "greedy text", "needles", "attention output by layer", "low_bit"):
        assert words in text


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures(evaluation, tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="the optional package matplotlib is not installed")
    from kvfuse.evaluate_plot import plot

    plot(evaluation, tmp_path / f"picture.{suffix}")
    assert (tmp_path / f"picture.{suffix}").stat().st_size > 10_000
    with pytest.raises(OptionError, match=r"\[plot\] expected a kind of picture"):
        plot(evaluation, tmp_path / "picture.odd")
