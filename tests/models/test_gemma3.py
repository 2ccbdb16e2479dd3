"""The Gemma 3 builder: a tiny stand-in against NumPy, checkpoint, tokenizer, and the real weights (slow)."""

import hashlib

import numpy as np
import numpy_gemma3
import onnx
import onnx_ir as ir
import pytest
from decoder_session import DecoderSession

import kvfuse

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")

from models import gemma3, sources  # noqa: E402
from models.config import BuildError  # noqa: E402
from models.gemma3_checkpoint import LAYER_NAMES, Gemma3Checkpoint  # noqa: E402
from models.gemma3_decoder import Gemma3Config, build_gemma3  # noqa: E402
from models.spm_tokenizer import spm_bpe  # noqa: E402

# Six layers, so that one of them is global.
TINY = Gemma3Config(
    num_layers=6, num_heads=4, kv_num_heads=1, head_dim=8, hidden_size=16, intermediate_size=24,
    vocab_size=40, rope_theta=1000.0, rms_norm_eps=1e-6, sliding_window=5, sliding_rope_theta=100.0,
)  # fmt: skip
TOKENS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "▁",
    "a",
    "b",
    "ab",
    "▁ab",
    "  ",
    "<0xE2>",
    "<0x82>",
    "<0xAC>",
]
SCORES = [-1000.0] * 5 + [-5.0, -6.0, -7.0, -1.0, -2.0, -1000.0, 0.0, 0.0, 0.0]
TYPES = [3] * 5 + [1] * 5 + [4] + [6] * 3


def weights(config=TINY, seed=0):
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, shape in config.weight_shapes().items():
        noise = rng.standard_normal(shape)
        drawn[name] = (noise / np.sqrt(shape[-1]) if len(shape) == 2 else 1 + 0.1 * noise).astype(np.float32)
    return drawn


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma3") / "tiny.onnx"
    onnx.save(ir.to_proto(build_gemma3(TINY, weights().__getitem__)), path)
    onnx.checker.check_model(str(path))
    return path


@pytest.mark.parametrize("chunks", [[14], [1] * 14, [6, 1, 7]])
def test_the_graph_equals_the_formulas(tiny, chunks):
    tokens = [int(i) for i in np.random.default_rng(1).integers(0, 40, 14)]
    got = DecoderSession(tiny).run([tokens], chunks)[0]
    want = numpy_gemma3.logits(TINY, weights().__getitem__, tokens)
    # Reductions over up to 24 terms of size 1 in f32, six layers deep: far below 1e-5 of numbers around 1.
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_windows_and_norms_matter(tiny):
    """What the formulas say is in the graph: without one of them the logits are others."""
    from dataclasses import replace

    tokens = [int(i) for i in np.random.default_rng(1).integers(0, 40, 14)]
    want = numpy_gemma3.logits(TINY, weights().__getitem__, tokens)
    for changed in (
        replace(TINY, sliding_window=6), replace(TINY, global_every=7),
        replace(TINY, sliding_rope_theta=1000.0), replace(TINY, rope_theta=100.0),
    ):  # fmt: skip
        other = numpy_gemma3.logits(changed, weights().__getitem__, tokens)
        assert np.abs(other - want).max() > 1e-3


def test_all_layers_are_fused_with_their_windows(tiny, tmp_path):
    report = kvfuse.rewrite(tiny, tmp_path / "fused.onnx", n_recent=4096, require_all=True)
    assert [site.mask["window"] for site in report.fused] == [4] * 5 + [-1]
    tokens = np.random.default_rng(2).integers(0, 40, (1, 14))
    session = kvfuse.InferenceSession(tmp_path / "fused.onnx")
    feeds = {
        "input_ids": tokens,
        "attention_mask": np.ones((1, 14), np.int64),
        "position_ids": np.arange(14)[None],
    }
    (got,) = session.run(["logits"], feeds)
    want = DecoderSession(tiny).run(tokens.tolist(), [14])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)  # exact mode


def test_config_is_checked():
    with pytest.raises(BuildError, match=r"\[sliding_window\] expected at least 1; found 0"):
        Gemma3Config(2, 4, 1, 8, 16, 24, 40, sliding_window=0)


def write_checkpoint(path, architecture="gemma3"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(TINY.num_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(TINY.hidden_size)
    writer.add_feed_forward_length(TINY.intermediate_size)
    writer.add_head_count(TINY.num_heads)
    writer.add_head_count_kv(TINY.kv_num_heads)
    writer.add_key_length(TINY.head_dim)
    writer.add_value_length(TINY.head_dim)
    writer.add_rope_freq_base(TINY.rope_theta)
    writer.add_layer_norm_rms_eps(TINY.rms_norm_eps)
    writer.add_sliding_window(TINY.sliding_window)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores(SCORES)
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(2)
    drawn = weights(Gemma3Config(**{**vars(TINY), "vocab_size": len(TOKENS)}))
    for name, array in drawn.items():
        writer.add_tensor(stored_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return drawn


def stored_name(name):
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part.removesuffix('.weight')]}.weight"


def test_the_checkpoint_is_read_back(tmp_path):
    drawn = write_checkpoint(tmp_path / "tiny.gguf")
    checkpoint = Gemma3Checkpoint(tmp_path / "tiny.gguf")
    assert checkpoint.config.weight_shapes().keys() == drawn.keys()
    assert (checkpoint.config.sliding_window, checkpoint.config.head_dim, checkpoint.config.vocab_size) == (
        5,
        8,
        14,
    )
    for name, array in drawn.items():
        np.testing.assert_array_equal(checkpoint.weight(name), array)
    write_checkpoint(tmp_path / "other.gguf", "gemma2")
    with pytest.raises(BuildError, match="expected architecture gemma3; found 'gemma2'"):
        Gemma3Checkpoint(tmp_path / "other.gguf")


def test_files_are_written_once(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "tiny.gguf")
    asked = []
    monkeypatch.setattr(sources, "fetch_split", lambda *_: asked.append(1) or tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    assert gemma3.main(["--out", str(out)]) == gemma3.main(["--out", str(out)]) == 0
    assert len(asked) == 1
    assert capsys.readouterr().out.split() == [str(out / "model.onnx")] * 2
    assert {path.name for path in out.iterdir()} == {
        "build.json",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
    }
    assert gemma3.main(["--out", str(out), "--layers", "7"]) == 1
    assert capsys.readouterr().err == "[layers] expected 1 to 6; found 7\n"


def test_the_tokenizer_merges_by_score():
    tokenizer = spm_bpe(TOKENS, SCORES, TYPES, bos=2)
    # "ab" is merged first (-1), then "▁" + "ab"; two spaces are a token; bytes stand for the rest.
    assert tokenizer.encode("ab ab").ids == [2, 8, 9]
    assert tokenizer.encode("b  a").ids == [2, 7, 10, 6]
    assert tokenizer.encode("€").ids == [2, 11, 12, 13]
    assert tokenizer.encode("").ids == [2]
    assert tokenizer.decode([8, 9, 10, 11, 12, 13]) == "ab ab  €"


def test_split_files_are_joined_and_verified(tmp_path, monkeypatch):
    parts = [b"first part, ", b"second part"]
    files = []
    for index, data in enumerate(parts):
        (tmp_path / str(index)).write_bytes(data)
        files.append(sources.Source("p", str(index), "L", "0", "f", "0"))
    monkeypatch.setattr(sources, "fetch", lambda source, cache: tmp_path / source.version)
    whole = hashlib.sha256(b"".join(parts)).hexdigest()
    joined = sources.fetch_split(sources.SplitSource("whole.bin", whole, tuple(files)), tmp_path / "cache")
    assert joined.read_bytes() == b"first part, second part"
    damaged = sources.SplitSource("other.bin", "0" * 64, tuple(files))
    with pytest.raises(BuildError, match=rf"\[other.bin\] expected SHA-256 0+; found {whole}"):
        sources.fetch_split(damaged, tmp_path / "cache")
    assert not (tmp_path / "cache" / "other" / "other.bin").exists()


@pytest.mark.slow
def test_two_real_layers_equal_the_numpy_decoder(tmp_path):
    path = gemma3.build(tmp_path, layers=2)
    checkpoint = Gemma3Checkpoint(sources.fetch_split(sources.read_split_source(gemma3.SOURCE)))
    config = Gemma3Config(**{**vars(checkpoint.config), "num_layers": 2})
    tokens = checkpoint.tokenizer().encode("The capital of France is Paris, since 987.").ids
    got = DecoderSession(path).run([tokens], [len(tokens) - 3, 1, 2])[0]
    want = numpy_gemma3.logits(config, checkpoint.weight, tokens)
    # Reductions over up to 2048 terms, some ten in a row, on logits up to about 60: 60·10·sqrt(2048)·2^-24.
    np.testing.assert_allclose(got, want, rtol=0, atol=1.7e-3)
