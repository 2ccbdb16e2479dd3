"""Float caches in and out of a session's own sequences, under the original graph's names."""

import numpy as np
import onnx
import pytest

import kvfuse
from models import tiny_decoder

IDS = np.random.default_rng(3).integers(0, 64, (2, 40))
LAYOUTS = {"float32": 1e-5, "float16": 2e-2}  # an f16 graph rounds every tensor on its way


@pytest.fixture(scope="module", params=LAYOUTS)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def original(dtype):
    return tiny_decoder.build("decomposed", dtype=dtype)


def open_session(model, **options):
    return kvfuse.InferenceSession(kvfuse.rewrite(model, **options).model.SerializeToString())


def feeds(ids, past):
    batch, count = ids.shape
    return {
        "input_ids": ids,
        "attention_mask": np.ones((batch, past + count), np.int64),
        "position_ids": np.tile(np.arange(past, past + count), (batch, 1)),
    }


def float_caches(model, ids):
    """What the original gives back after `ids`: original past input name -> array, and the session itself."""
    session = kvfuse.InferenceSession(model.SerializeToString())
    pasts = {i.name: i for i in session.get_inputs() if i.name.startswith("past")}
    kind = np.float16 if "16" in next(iter(pasts.values())).type else np.float32
    empty = {name: np.zeros((ids.shape[0], i.shape[1], 0, i.shape[3]), kind) for name, i in pasts.items()}
    names = [name.replace("past_key_values", "present") for name in pasts]
    return dict(zip(pasts, session.run(names, feeds(ids, 0) | empty), strict=True)), session


@pytest.mark.parametrize("batch", [1, 2])
def test_a_decoder_goes_on_from_float_caches(original, dtype, batch):
    ids = IDS[:batch]
    caches, reference = float_caches(original, ids[:, :30])
    (expected,) = reference.run(["logits"], feeds(ids[:, 30:], 30) | caches)
    session = open_session(original, n_recent=4096)
    session.import_past(caches)
    assert session.past_length == 30
    (found,) = session.run(["logits"], feeds(ids[:, 30:], 30))
    assert np.abs(found.astype(np.float32) - expected).max() <= LAYOUTS[dtype] * max(
        1, np.abs(expected).max()
    )


def test_what_goes_in_exactly_comes_out_exactly(original):
    caches, _ = float_caches(original, IDS[:, :33])
    session = open_session(original, n_recent=4096)
    session.import_past(caches)
    exported = session.export_past()
    assert exported.keys() == caches.keys()
    for name, array in caches.items():
        assert exported[name].dtype == array.dtype
        np.testing.assert_array_equal(exported[name], array)


@pytest.mark.parametrize(
    "options", [{"format": "int4"}, {"n_recent": 4, "block": 8, "n_sink": 2}, {"format": "int8"}]
)
def test_low_bit_tokens_come_out_within_half_a_step(original, options):
    caches, _ = float_caches(original, IDS[:, :33])
    session = open_session(original, **options)
    session.import_past(caches)
    for name, array in session.export_past().items():
        wide = caches[name].astype(np.float32)
        step = np.abs(wide).max() * np.sqrt(wide.shape[-1]) / (127 if "int8" in options.values() else 7)
        # Rotating moves a row's norm about, so a channel may err by the whole row's rounding error.
        assert np.abs(array.astype(np.float32) - wide).max() <= 0.5 * step * np.sqrt(wide.shape[-1])
        if "n_sink" in options:
            np.testing.assert_array_equal(array[:, :, :2], caches[name][:, :, :2])
            np.testing.assert_array_equal(array[:, :, -4:], caches[name][:, :, -4:])


def test_an_import_replaces_what_was_there(original):
    session = open_session(original, n_recent=4096)
    session.run(None, feeds(IDS[:, :5], 0))
    caches, _ = float_caches(original, IDS[:1, :7])
    session.import_past(caches)
    assert session.past_length == 7
    assert [len(sequence) for sequence in session.sequences] == [7, 0]
    session.run(None, feeds(IDS[:1, 7:9], 7))
    assert session.past_length == 9


@pytest.mark.parametrize("fault", ["missing", "unknown", "heads", "channels", "length", "rows", "rank"])
def test_a_bad_import_changes_nothing(original, fault):
    session = open_session(original)
    session.run(None, feeds(IDS[:, :5], 0))
    caches, _ = float_caches(original, IDS[:, :7])
    name = sorted(caches)[1]
    if fault == "missing":
        del caches[name]
    elif fault == "unknown":
        caches["past_key_values.9.key"] = caches[name]
    else:
        cuts = {
            "heads": np.s_[:, :1],
            "channels": np.s_[..., :4],
            "length": np.s_[:, :, :3],
            "rows": np.s_[:1],
            "rank": np.s_[0],
        }
        caches[name] = caches[name][cuts[fault]]
    with pytest.raises(kvfuse.SequenceError, match=r"\[import_past\] expected .*; found"):
        session.import_past(caches)
    assert session.past_length == 5


def test_a_model_that_was_not_rewritten_has_no_past_to_move(original):
    session = kvfuse.InferenceSession(original.SerializeToString())
    with pytest.raises(kvfuse.ModelError, match="expected a model that kvfuse has rewritten"):
        session.export_past()


def test_a_session_that_has_not_run_has_nothing_to_export(original, tmp_path):
    onnx.save(kvfuse.rewrite(original).model, tmp_path / "model.onnx")
    session = kvfuse.InferenceSession(tmp_path / "model.onnx")
    with pytest.raises(
        kvfuse.SequenceError, match=r"\[export_past\] expected sequences that have run; found none"
    ):
        session.export_past()
