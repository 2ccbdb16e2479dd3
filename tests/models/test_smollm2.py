"""The SmolLM2 builder: up-to-date checks on a small stand-in checkpoint, and the real weights (slow)."""

import numpy as np
import numpy_decoder
import onnx
import pytest
from decoder_session import DecoderSession

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
gguf_checkpoint = pytest.importorskip("models.gguf_checkpoint", reason="gguf is not installed")

import fake_checkpoint  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from models import smollm2, sources  # noqa: E402
from models.config import AttentionForm, BuildError  # noqa: E402

SPELLINGS = ("decomposed", "attention", "group_query_attention")
PROMPT = "The capital of France is"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes the builder find a small random checkpoint; returns the list of times it was asked for."""
    path, asked = tmp_path / "fake.gguf", []
    fake_checkpoint.write(path)
    monkeypatch.setattr(sources, "fetch", lambda *_: asked.append(1) or path)
    return asked


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_files_hold_the_checkpoint(stand_in, tmp_path, spelling):
    model = smollm2.build(tmp_path / "out", AttentionForm(spelling))
    assert sorted(p.name for p in model.parent.iterdir()) == [
        "build.json", "model.onnx", "model.onnx.data", "tokenizer.json",
    ]  # fmt: skip
    onnx.checker.check_model(str(model))
    tokens = Tokenizer.from_file(str(model.parent / "tokenizer.json")).encode("in the 2024s").ids
    got = DecoderSession(model).run([tokens], [len(tokens) - 1, 1])[0]
    checkpoint = gguf_checkpoint.GgufCheckpoint(tmp_path / "fake.gguf")
    want = numpy_decoder.logits(checkpoint.config, checkpoint.weight, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_large_weights_are_outside_the_model_file(stand_in, tmp_path):
    model = onnx.load(smollm2.build(tmp_path / "out"), load_external_data=False)
    outside = {i.name for i in model.graph.initializer if i.data_location == onnx.TensorProto.EXTERNAL}
    assert {i.name for i in model.graph.initializer if len(i.dims) == 2} == outside
    files = {e.value for i in model.graph.initializer for e in i.external_data if e.key == "location"}
    assert files == {"model.onnx.data"}


def test_finished_build_is_kept(stand_in, tmp_path):
    first = smollm2.build(tmp_path / "out").stat()
    again = smollm2.build(tmp_path / "out").stat()
    assert (first.st_ino, first.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    assert len(stand_in) == 1


def test_other_options_or_damage_build_again(stand_in, tmp_path):
    out = tmp_path / "out"
    smollm2.build(out)
    smollm2.build(out, layers=1)
    assert len(stand_in) == 2
    smollm2.build(out, AttentionForm("attention"), layers=1)
    assert len(stand_in) == 3
    data = out / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    smollm2.build(out, AttentionForm("attention"), layers=1)
    assert len(stand_in) == 4
    (out / "build.json").unlink()
    smollm2.build(out, AttentionForm("attention"), layers=1)
    assert len(stand_in) == 5


def test_failed_build_leaves_the_old_files(stand_in, tmp_path, monkeypatch):
    out = tmp_path / "out"
    smollm2.build(out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def fail(*_):
        raise BuildError("[weight] expected data; found none")

    monkeypatch.setattr(gguf_checkpoint.GgufCheckpoint, "weight", fail)
    with pytest.raises(BuildError, match="expected data"):
        smollm2.build(out, layers=1)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_command_line(stand_in, tmp_path, capsys):
    out = tmp_path / "out"
    assert smollm2.main(["--out", str(out), "--spelling", "attention", "--layers", "1"]) == 0
    assert capsys.readouterr().out.strip() == str(out / "model.onnx")
    assert smollm2.main(["--out", str(out), "--layers", "3"]) == 1
    assert capsys.readouterr().err == "[layers] expected 1 to 2; found 3\n"


def greedy(session, tokens, steps):
    """Returns the ids that follow `tokens`, each the likeliest one."""
    session.reset(1)
    new, position, chunk = [], 0, tokens
    for _ in range(steps):
        end = position + len(chunk)
        positions = np.arange(position, end)[None]
        logits = session.step(np.array([chunk]), np.ones((1, end), np.int64), positions)
        position, chunk = end, [int(logits[0, -1].argmax())]
        new += chunk
    return new


@pytest.fixture(scope="module")
def real_checkpoint():
    return gguf_checkpoint.GgufCheckpoint(sources.fetch(sources.read_source(smollm2.SOURCE)))


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_two_real_layers_equal_the_numpy_decoder(tmp_path, real_checkpoint, spelling):
    """The reference takes the stored rows and interleaved RoPE, so a wrong reordering cannot hide."""
    model = smollm2.build(tmp_path, AttentionForm(spelling), layers=2)
    tokens = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(f"{PROMPT} Paris, since 987.").ids
    got = DecoderSession(model).run([tokens], [len(tokens) - 3, 1, 2])[0]
    config = smollm2.replace(real_checkpoint.config, num_layers=2)

    def stored(name):
        return real_checkpoint.stored_weight(gguf_checkpoint.gguf_name(name))

    want = numpy_decoder.logits(config, stored, tokens, interleaved=True)
    # Reductions over up to 1536 terms, some ten in a row, on logits up to about 30: 30·10·sqrt(1536)·2^-24.
    np.testing.assert_allclose(got, want, rtol=0, atol=7e-4)


@pytest.mark.slow
def test_real_model_continues_the_prompt_as_other_exporters_do():
    model = smollm2.build(sources.DEFAULT_CACHE / "smollm2")
    tokenizer = Tokenizer.from_file(str(model.with_name("tokenizer.json")))
    session = DecoderSession(model)
    prompt = tokenizer.encode(PROMPT).ids
    new = greedy(session, prompt, 20)
    assert tokenizer.decode(new).startswith(" Paris.\n\nThe answer is: 2018-01-22")
    cached = len(prompt) + len(new) - 1
    assert sum(cache.nbytes for cache in session.past.values()) == cached * 46080
