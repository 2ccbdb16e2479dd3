"""The byte-level tokenizer on a small made-up vocabulary."""

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

import fake_checkpoint
from tokenizers import Tokenizer

from models.bpe_tokenizer import byte_level_bpe
from models.gguf_checkpoint import Vocabulary


@pytest.fixture
def tokenizer(tmp_path):
    vocabulary = Vocabulary(fake_checkpoint.TOKENS, fake_checkpoint.MERGES, [0, 1])
    byte_level_bpe(vocabulary).save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("text", ["", "in the 2024s", " the\n\n\tthe  ", "ünï 日本 🙂", "it's 100%"])
def test_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_merges_apply_by_rank(tokenizer):
    assert tokenizer.encode("the the").tokens == ["t", "he", "Ġthe"]


def test_digits_stay_single_although_a_merge_would_join_them(tokenizer):
    assert "20" in fake_checkpoint.TOKENS
    assert tokenizer.encode("a2024").tokens == ["a", "2", "0", "2", "4"]


def test_special_tokens_in_text_are_one_id_and_none_are_added(tokenizer):
    assert tokenizer.encode("a<|im_start|>b").tokens == ["a", "<|im_start|>", "b"]
    assert tokenizer.token_to_id("<|im_start|>") == 1
    assert tokenizer.decode(tokenizer.encode("<|endoftext|>x").ids) == "x"


def test_ids_are_those_of_the_vocabulary(tokenizer):
    assert tokenizer.get_vocab_size() == len(fake_checkpoint.TOKENS)
    assert [tokenizer.id_to_token(i) for i in range(len(fake_checkpoint.TOKENS))] == fake_checkpoint.TOKENS
