import builtins
import json

import numpy as np
import pytest
from tiny_feeds import IDS

import kvfuse
from kvfuse.decoder import open_decoder
from kvfuse.generate import Generation, Tokenizer, choose_token, find_eos_ids, find_tokenizer, stream_text


def test_greedy_tokens_follow_the_largest_logit(original):
    decoder = open_decoder(original)
    made = list(Generation(decoder, IDS, max_new_tokens=6))
    for count, token in enumerate(made):
        decoder.reset()
        assert token == decoder.step([*IDS, *made[:count]])[-1].argmax()


def test_a_rewritten_model_makes_the_same_tokens(original, exact):
    expected = Generation(open_decoder(original), IDS, max_new_tokens=12)
    found = Generation(open_decoder(exact), IDS, max_new_tokens=12)
    assert list(found) == list(expected)
    assert len(found.token_ids) == 12
    assert found.finish_reason == "length"
    assert found.tokens_per_second > 0


def test_running_again_starts_again(exact):
    run = Generation(open_decoder(exact), IDS, max_new_tokens=5)
    assert list(run) == list(run)


def test_an_end_token_ends_and_is_left_out(original):
    decoder = open_decoder(original)
    made = list(Generation(decoder, IDS, max_new_tokens=6))
    end = made[3]
    run = Generation(decoder, IDS, max_new_tokens=6, eos_ids=frozenset([end]))
    assert list(run) == made[: made.index(end)]
    assert run.finish_reason == "eos"


def test_sampling_repeats_with_its_seed(original):
    decoder = open_decoder(original)
    runs = [list(Generation(decoder, IDS, 8, temperature=5.0, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_the_temperature_shapes_the_choice():
    logits, random = np.array([0.0, 1.0, 0.5], np.float32), np.random.default_rng(0)
    assert choose_token(logits, 0, random) == 1
    cold = [choose_token(logits, 0.02, random) for _ in range(200)]
    warm = [choose_token(logits, 1.0, random) for _ in range(2000)]
    assert set(cold) == {1}
    expected = np.exp(logits) / np.exp(logits).sum()
    # three standard deviations of a share over 2000 draws
    assert np.bincount(warm) / 2000 == pytest.approx(expected, abs=3 * 0.5 / 2000**0.5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_new_tokens": 0}, r"\[max_new_tokens\] expected at least 1; found 0"),
        ({"temperature": -1.0}, r"\[temperature\] expected 0 or more; found -1"),
        ({"temperature": float("nan")}, r"\[temperature\] expected 0 or more; found nan"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(kvfuse.OptionError, match=sentence):
        Generation(None, IDS, **options)


def test_end_tokens_come_from_the_files_beside_the_model(tmp_path):
    model = tmp_path / "model.onnx"
    assert find_eos_ids(model) == frozenset()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert find_eos_ids(model) == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert find_eos_ids(model) == {3, 4}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(kvfuse.OptionError, match=r"generation_config\.json\] expected JSON"):
        find_eos_ids(model)


class ByteTokenizer:
    """Each id is one byte of UTF-8."""

    def decode(self, token_ids):
        return bytes(token_ids).decode("utf-8", errors="replace")


def test_streamed_text_never_shows_half_a_character():
    text = "a€😀z"
    pieces = list(stream_text(ByteTokenizer(), iter(text.encode())))
    assert pieces == ["a", "€", "😀", "z"]


def test_streamed_text_ends_with_what_is_left():
    assert "".join(stream_text(ByteTokenizer(), iter("é".encode()[:1]))) == "\ufffd"


def test_a_missing_package_is_a_sentence(monkeypatch):
    plain = builtins.__import__

    def without_tokenizers(name, *rest):
        if name == "tokenizers":
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with pytest.raises(
        kvfuse.KVFuseError, match=r"expected the package 'tokenizers'.*pip install tokenizers"
    ):
        Tokenizer("tokenizer.json")


def test_bad_tokenizer_files_are_sentences(tmp_path):
    pytest.importorskip("tokenizers", reason="the optional package tokenizers is not installed")
    with pytest.raises(kvfuse.OptionError, match=r"expected a tokenizer\.json at .*; found none"):
        find_tokenizer(tmp_path / "model.onnx")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(kvfuse.OptionError, match=r"expected a tokenizer\.json at .*; found: "):
        find_tokenizer(tmp_path / "model.onnx")
