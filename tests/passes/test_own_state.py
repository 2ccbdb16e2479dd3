"""What a rewritten graph keeps to itself: layers that look the same, positions when the caches are gone."""

import numpy as np
import onnx
import onnxruntime
import pytest
from decoder_graphs import HEAD_DIM, VOCABULARY, decoder, sdpa
from equivalence import assert_same, run

import kvfuse

THETA = 10.0 ** -np.linspace(0, 1, HEAD_DIM)


def twins():
    """Two layers that read the very same query, key and value, each with caches of its own."""
    first = {}

    def layer(b, names, options):
        first.update({side: names[side] for side in ("query", "key", "value")} if not first else {})
        names.update(first)
        return sdpa(b, names, options)

    return decoder(layers=2, layer=layer)


def test_layers_with_the_same_operands_keep_states_of_their_own(tmp_path):
    report = assert_same(twins(), tmp_path, sites=2)
    assert [site.layer for site in report.sites] == ["0", "1"]
    session = kvfuse.InferenceSession(tmp_path / "fused.onnx")
    run(session, (4, 1, 1), 2)
    for sequence in session.sequences:
        assert len(sequence) == 6
        assert sorted(sequence.nbytes_by_layer()) == ["0", "1"]
        assert len(set(sequence.nbytes_by_layer().values())) == 1


def rotated(b, names, options):
    """Attention whose queries and keys are turned by positions counted from the shape of the cache."""
    past = b.dim(names["past_key"], 2)
    positions = b.op("Range", past, b.op("Add", past, b.dim("input_ids", 1)), b.number(1))
    angles = b.op("Mul", b.op("Unsqueeze", b.op("Cast", positions, to=b.element), b.ints(1)), b.const(THETA))
    for side in ("query", "key"):
        low, high = b.op("Split", names[side], b.ints(HEAD_DIM // 2, HEAD_DIM // 2), outputs=2, axis=-1)
        turned = b.op("Concat", b.op("Neg", high), low, axis=-1)
        straight = b.op("Mul", names[side], b.op("Cos", angles))
        names[side] = b.op("Add", straight, b.op("Mul", turned, b.op("Sin", angles)))
    return sdpa(b, names, options)


@pytest.fixture
def rotary(tmp_path):
    """The files of an original and its rewritten form in exact mode."""
    assert_same(decoder(layers=2, layer=rotated), tmp_path, sites=2)
    return tmp_path / "source.onnx", tmp_path / "fused.onnx"


IDS = np.random.default_rng(5).integers(0, VOCABULARY, (1, 12))


def expected(path):
    """The original's logits of all tokens in one run."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    pasts = {value.name: np.zeros((1, 2, 0, HEAD_DIM), np.float32) for value in session.get_inputs()}
    return session.run(["logits"], pasts | {"input_ids": IDS})[0]


def steps(session, start, stop, **feeds):
    rows = [session.run(["logits"], {"input_ids": IDS[:, i : i + 1], **feeds})[0] for i in range(start, stop)]
    return np.concatenate(rows, axis=1)


def test_positions_go_on_from_the_length_of_the_state(rotary):
    source, target = rotary
    assert [value.name for value in onnx.load(target).graph.input if "past." in value.name] == []
    session = kvfuse.InferenceSession(target)
    np.testing.assert_allclose(steps(session, 0, 12), expected(source), rtol=0, atol=2e-5)


def test_positions_go_on_after_truncate(rotary):
    source, target = rotary
    session = kvfuse.InferenceSession(target)
    steps(session, 0, 5)
    session.run(["logits"], {"input_ids": IDS[:, ::-1]})
    session.sequences[0].truncate(5)
    np.testing.assert_allclose(steps(session, 5, 12), expected(source)[:, 5:], rtol=0, atol=2e-5)


def test_positions_go_on_after_unfreeze(rotary):
    source, target = rotary
    session = kvfuse.InferenceSession(target)
    steps(session, 0, 5)
    frozen = session.sequences[0].freeze()
    other = kvfuse.InferenceSession(target)
    with kvfuse.KvSequence.unfreeze(frozen) as sequence:
        found = steps(other, 5, 12, kv_sequence=np.array([sequence.id]))
    np.testing.assert_allclose(found, expected(source)[:, 5:], rtol=0, atol=2e-5)
