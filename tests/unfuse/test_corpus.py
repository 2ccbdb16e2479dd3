"""Real exported graphs (random weights), rewritten and given back: the same interface, the same numbers."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from float_decoder import TOLERANCE, open_session, presents_of, run, signature

import kvfuse

CORPUS = Path(__file__).resolve().parents[1] / "data" / "corpus"
GRAPHS = {entry["file"]: entry for entry in json.loads((CORPUS / "manifest.json").read_text())["graphs"]}
FED = {"input_ids", "attention_mask", "position_ids"}


def feedable(entry):
    """Whether the caches and the three usual inputs are all that the graph is fed."""
    return {spec["name"] for spec in entry["inputs"]} <= FED | entry["past_to_present"].keys()


FUSABLE = sorted(
    name for name, entry in GRAPHS.items() if entry["expected_fusable_sites"] and feedable(entry)
)


@pytest.fixture(params=FUSABLE)
def entry(request):
    opset, newest = GRAPHS[request.param]["opset"]["ai.onnx"], 25
    if onnxruntime.__version__.startswith("1.24"):
        newest = 23
    if opset > newest:
        pytest.skip(f"onnxruntime {onnxruntime.__version__} does not run opset {opset}")
    return GRAPHS[request.param]


def reference(entry, batch):
    with np.load(CORPUS / entry["reference"]) as arrays:
        return {key.split(".", 1)[1]: arrays[key] for key in arrays.files if key.startswith(f"{batch}.")}


def test_what_was_rewritten_comes_back(entry, tmp_path):
    source, rewritten, restored = (
        CORPUS / entry["file"],
        tmp_path / "rewritten.onnx",
        tmp_path / "restored.onnx",
    )
    fused = kvfuse.rewrite(source, rewritten)  # its format says nothing about the floats
    report = kvfuse.unfuse(rewritten, restored)
    assert sorted(report.layers) == sorted(site.layer for site in fused.fused)
    assert set(report.inputs) == set(entry["past_to_present"])
    original, session = open_session(source), open_session(restored)
    assert signature(session) == signature(original)
    assert not [node for node in onnx.load(restored).graph.node if node.domain == "kvfuse"]
    for batch in ("b1", "b2"):
        arrays = reference(entry, batch)
        expected = arrays["logits"].astype(np.float32)
        total = expected.shape[1]
        real = arrays["attention_mask"].astype(bool) if "attention_mask" in arrays else slice(None)
        limit = TOLERANCE[entry["dtype"]] * max(1.0, float(np.abs(expected).max()))
        for schedule in ([total], [1] * total, [3, 1, 2, *[1] * (total - 6)]):
            logits, caches = run(session, presents_of(report), arrays, schedule)
            assert np.abs(logits - expected)[real].max() <= limit, schedule
        _, wanted = run(original, presents_of(report), arrays, [3, 1, 2, *[1] * (total - 6)])
        for name, cache in caches.items():
            assert cache.dtype == wanted[name].dtype
            assert cache.shape == wanted[name].shape
            close = np.abs(cache.astype(np.float32) - wanted[name].astype(np.float32)).max()
            assert close <= 10 * limit or batch == "b2"  # padded rows of other layers are garbage in both


@pytest.mark.parametrize("name", ["llama_optimum_sdpa.onnx", "llama_dynamo_op23.onnx"])
def test_what_came_back_can_be_rewritten_again(name, tmp_path):
    first = kvfuse.rewrite(CORPUS / name, tmp_path / "rewritten.onnx")
    kvfuse.unfuse(tmp_path / "rewritten.onnx", tmp_path / "restored.onnx")
    second = kvfuse.rewrite(tmp_path / "restored.onnx", tmp_path / "again.onnx")
    for before, after in zip(first.sites, second.sites, strict=True):
        assert (after.outcome, after.layer, after.mask["kind"]) == (
            "fused",
            before.layer,
            before.mask["kind"],
        )
        assert after.details["scale"] == pytest.approx(before.details["scale"], rel=1e-6)
    kvfuse.unfuse(tmp_path / "again.onnx", tmp_path / "restored_again.onnx")
    assert kvfuse.diff(tmp_path / "restored.onnx", tmp_path / "restored_again.onnx").equal
