"""Reading GGUF: sizes, names, and the row order of rotated projections."""

import numpy as np
import numpy_decoder
import pytest

gguf_checkpoint = pytest.importorskip("models.gguf_checkpoint", reason="gguf is not installed")

import fake_checkpoint  # noqa: E402

from models.config import BuildError  # noqa: E402


@pytest.fixture
def checkpoint(tmp_path):
    fake_checkpoint.write(tmp_path / "fake.gguf")
    return gguf_checkpoint.GgufCheckpoint(tmp_path / "fake.gguf")


def test_sizes_are_read(checkpoint):
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.kv_num_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.hidden_size, config.intermediate_size, config.max_positions) == (64, 96, 128)
    assert config.vocab_size == len(fake_checkpoint.TOKENS)
    assert config.tie_embeddings


def test_every_weight_is_found_in_its_shape(checkpoint):
    for name, shape in checkpoint.config.weight_shapes().items():
        weight = checkpoint.weight(name)
        assert (weight.shape, weight.dtype) == (shape, np.float32), name


def test_rotated_projections_are_reordered_for_rotate_half(checkpoint):
    """Stored rows with interleaved RoPE and reordered rows with rotate-half RoPE are the same decoder."""
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    config = checkpoint.config

    def stored(name):
        return checkpoint.stored_weight(gguf_checkpoint.gguf_name(name))

    want = numpy_decoder.logits(config, stored, tokens, interleaved=True)
    got = numpy_decoder.logits(config, checkpoint.weight, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
    assert np.abs(numpy_decoder.logits(config, stored, tokens) - want).max() > 1e-3


def test_vocabulary_is_read(checkpoint):
    vocabulary = checkpoint.vocabulary
    assert vocabulary.tokens == fake_checkpoint.TOKENS
    assert vocabulary.merges == fake_checkpoint.MERGES
    assert vocabulary.special == [0, 1]


def test_missing_tensor_and_field_are_named(checkpoint):
    with pytest.raises(BuildError, match=r"\[output.weight\] expected a tensor of that name; found none"):
        checkpoint.weight("lm_head.weight")
    with pytest.raises(BuildError, match=r"\[llama.nothing\] expected a metadata field"):
        checkpoint.field("llama.nothing")


def test_other_architectures_and_tokenizers_are_errors(tmp_path):
    fake_checkpoint.write(tmp_path / "a.gguf", architecture="mamba")
    with pytest.raises(BuildError, match=r"\[a.gguf\] expected architecture llama; found 'mamba'"):
        gguf_checkpoint.GgufCheckpoint(tmp_path / "a.gguf")
    fake_checkpoint.write(tmp_path / "b.gguf", tokenizer="llama")
    with pytest.raises(BuildError, match=r"expected gpt2 \(byte-level BPE\); found 'llama'"):
        _ = gguf_checkpoint.GgufCheckpoint(tmp_path / "b.gguf").vocabulary
