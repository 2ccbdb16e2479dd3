"""Versions: what a file declares stays declared, and what onnxruntime cannot load is still told apart."""

import numpy as np
import onnx
import onnxruntime
import pytest
from decoder_graphs import decoder
from equivalence import run
from test_onnx_attention import own_past

import kvfuse

EXACT = 4096
IR_VERSIONS = range(8, 14)
OPSETS = range(13, 28)


def imports(model):
    return {entry.domain: entry.version for entry in model.opset_import}


def logits(session):
    return np.concatenate([row["logits"] for row in run(session, (4, 1, 3), 2)], axis=1)


def loads(path):
    """The session of a model that this onnxruntime can load, else None."""
    try:
        return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception:  # a version too new, an op not there: onnxruntime's errors share no base class
        return None


def check(model, folder):
    """Rewrites a file: nothing declared is raised, and it computes the same wherever onnxruntime can tell."""
    source, target = folder / "model.onnx", folder / "fused.onnx"
    onnx.save(model, source)
    report = kvfuse.rewrite(source, target, n_recent=EXACT)
    (site,) = report.sites
    session = loads(source)
    if session is not None:
        assert site.outcome == "fused", site.reason
    if site.outcome == "refused":
        assert site.reason
        assert target.read_bytes() == source.read_bytes()
        return
    rewritten = onnx.load(target)
    assert rewritten.ir_version == model.ir_version
    assert imports(rewritten) == {**imports(model), "kvfuse": 1}
    assert len(rewritten.opset_import) == len(imports(rewritten))
    if session is not None:
        found = logits(kvfuse.InferenceSession(target))
        np.testing.assert_allclose(found, logits(session), rtol=0, atol=2e-5)


@pytest.mark.parametrize("ir_version", IR_VERSIONS)
def test_every_ir_version(ir_version, tmp_path):
    check(decoder(ir_version=ir_version, mask="causal+padding"), tmp_path)


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset(opset, tmp_path):
    check(decoder(opset=opset, mask="causal+padding", softcap="before", guard=True), tmp_path)


@pytest.mark.parametrize("opset", range(23, 28))
def test_every_opset_with_an_attention(opset, tmp_path):
    check(decoder(layer=own_past(scale=0.3), opset=opset, ir_version=10), tmp_path)


@pytest.mark.parametrize("opset", [7, 11, 12, 99])
def test_an_opset_that_nothing_can_load_is_refused(opset, tmp_path):
    source, target = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(decoder(opset=opset), source)
    assert loads(source) is None
    report = kvfuse.rewrite(source, target)
    assert report.fused == ()
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("ir_version", [15, 99])
def test_an_ir_version_of_the_future_is_not_lowered(ir_version, tmp_path):
    source, target = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(decoder(ir_version=ir_version), source)
    kvfuse.rewrite(source, target)
    assert onnx.load(target).ir_version == ir_version


@pytest.mark.parametrize("version", [1, 2])
def test_a_model_that_imports_our_domain_already(version, tmp_path):
    model = decoder(layers=2)
    model.opset_import.add(domain="kvfuse", version=version)
    source, target = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(model, source)
    assert len(kvfuse.rewrite(source, target, n_recent=EXACT).fused) == 2
    assert [entry.domain for entry in onnx.load(target).opset_import].count("kvfuse") == 1
    assert imports(onnx.load(target))["kvfuse"] == version
    found = logits(kvfuse.InferenceSession(target))
    np.testing.assert_allclose(found, logits(kvfuse.InferenceSession(source)), rtol=0, atol=2e-5)
