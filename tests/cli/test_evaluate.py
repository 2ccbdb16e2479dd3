"""The command `kvfuse evaluate`."""

import numpy as np
import pytest

import kvfuse


@pytest.fixture(scope="session")
def low_bit(original, folder):
    path = folder / "low_bit.onnx"
    kvfuse.rewrite(original, path, format="int4")
    return path


@pytest.fixture(scope="session")
def text(folder):
    path = folder / "text.txt"
    path.write_text(" ".join(f"w{i}" for i in np.random.default_rng(0).integers(1, 64, 400)))
    return path


SMALL = ("--context", 160, "--greedy", 4, "--prompts", 2, "--needles", 2, "--layer-tokens", 64)


def test_evaluate_prints_one_json_object(run, original, exact, low_bit, text, tokenizer):
    found = run("evaluate", original, exact, low_bit, "--text", text, *SMALL, "--json")
    assert (found.code, found.err) == (0, "")
    first, second = found.json["results"]
    # 159 positions of which the last block is not whole; exact mode keeps logits within 1e-5.
    assert first["positions"] == 159
    assert first["kl"] < 2e-6 < second["kl"]
    assert [len(second[name]) for name in ("greedy", "needles", "layers")] == [2, 2, 2]


def test_evaluate_prints_tables(run, original, low_bit, text, tokenizer):
    found = run("evaluate", original, low_bit, "--text", text, *SMALL)
    assert found.code == 0
    assert all(words in found.out for words in ("low_bit", "depth 25%", "prompt 2", "top-1"))


def test_evaluate_draws_a_picture(run, original, low_bit, text, tokenizer, tmp_path):
    pytest.importorskip("matplotlib", reason="the optional package matplotlib is not installed")
    picture = tmp_path / "picture.png"
    assert run("evaluate", original, low_bit, "--text", text, *SMALL, "--plot", picture).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_default_text_is_the_standard_librarys(run, original, low_bit, tokenizer):
    found = run("evaluate", original, low_bit, *SMALL, "--json")
    assert found.code == 0
    assert found.json["results"][0]["positions"] == 159


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--context", 1), "expected a context of 2 or more"),
        (("--windows", 0), "1 window or more; found 160 and 0"),
        (("--context", 4000), "expected at least 4000 tokens for 1 windows of 4000; found 400"),
        (("--greedy", -1), "expected prompts, greedy and layer tokens of 0 or more"),
        (("--needles", 9), "expected up to 8 numbers from 0 to 1"),
        (("--text", "absent.txt"), "expected a UTF-8 text file at absent.txt; found"),
        (("--tokenizer", "absent.json"), "expected a tokenizer.json at absent.json; found none"),
    ],
)
def test_bad_input_is_one_sentence(run, original, low_bit, text, tokenizer, arguments, sentence):
    given = ["evaluate", original, low_bit, "--text", text, *SMALL, *arguments]
    found = run(*given)
    assert found.code == 2
    assert sentence in found.sentence


def test_an_original_twice_is_one_sentence(run, original, text, tokenizer):
    found = run("evaluate", original, original, "--text", text, *SMALL)
    assert found.code == 2
    assert "expected a model that kvfuse rewrote" in found.sentence
