"""Head sizes that are no power of two, head sizes that differ between layers, and presents without a past."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import kvfuse
from kvfuse.decoder import Decoder
from models import tiny_decoder

TOKENS = np.random.default_rng(5).integers(0, 64, 20).tolist()
CHUNKS = (9, 1, 1, 7, 2)


def logits(model):
    decoder = Decoder(kvfuse.InferenceSession(model.SerializeToString()))
    rows, start = [], 0
    for count in CHUNKS:
        rows.append(decoder.step(TOKENS[start : start + count]))
        start += count
    return np.concatenate(rows)


@pytest.mark.parametrize("spelling", ["decomposed", "attention"])
@pytest.mark.parametrize("head_dim", [2, 6, 12, 40, 80, 96, 160, 192, 576])
def test_any_head_size_is_the_original_in_exact_mode(head_dim, spelling):
    original = tiny_decoder.build(spelling, head_dim=head_dim, num_layers=1)
    report = kvfuse.rewrite(original, n_recent=4096)
    assert [site.outcome for site in report.sites] == ["fused"]
    expected = logits(original)
    error = np.abs(logits(report.model) - expected).max()
    assert error <= 1e-5 * max(1.0, float(np.abs(expected).max()))


def attention_layers(sizes, pasts=True):
    """One ONNX Attention for each head size, fed from graph inputs; outputs `y<i>` and presents."""
    nodes, inputs, outputs = [], [], []
    for i, size in enumerate(sizes):
        fed = [f"{name}{i}" for name in ("q", "k", "v")]
        inputs += [helper.make_tensor_value_info(name, 1, ["B", 2, "S", size]) for name in fed]
        past = [f"past.{i}.key", f"past.{i}.value"] if pasts else []
        inputs += [helper.make_tensor_value_info(name, 1, ["B", 2, "P", size]) for name in past]
        made = [f"y{i}", f"present.{i}.key", f"present.{i}.value"]
        outputs += [helper.make_tensor_value_info(name, 1, None) for name in made]
        nodes.append(helper.make_node("Attention", [*fed, "", *past], made, is_causal=1))
    graph = helper.make_graph(nodes, "layers", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def test_layers_of_different_head_sizes_have_formats_of_their_own():
    sizes = (256, 512, 7)
    original = attention_layers(sizes)
    report = kvfuse.rewrite(original, n_recent=4096)
    assert [site.outcome for site in report.sites] == ["fused"] * 3
    random = np.random.default_rng(0)
    shape = {i: (1, 2, sum(CHUNKS), size) for i, size in enumerate(sizes)}
    given = {
        f"{n}{i}": random.standard_normal(shape[i], dtype=np.float32) for i in shape for n in ("q", "k", "v")
    }
    sessions = [kvfuse.InferenceSession(model.SerializeToString()) for model in (original, report.model)]
    pasts = {
        f"past.{i}.{side}": np.zeros((1, 2, 0, size), np.float32)
        for i, size in enumerate(sizes)
        for side in ("key", "value")
    }
    start = 0
    for count in CHUNKS:
        feeds = {name: array[:, :, start : start + count] for name, array in given.items()}
        names = [output.name for output in sessions[0].get_outputs()]
        results = dict(zip(names, sessions[0].run(names, feeds | pasts), strict=True))
        pasts = {name: results[name.replace("past", "present")] for name in pasts}
        for i, found in enumerate(sessions[1].run([f"y{i}" for i in range(3)], feeds)):
            np.testing.assert_allclose(found, results[f"y{i}"], rtol=0, atol=1e-5)
        start += count


def test_presents_without_a_past_leave_nothing_to_fuse():
    original = attention_layers((16,), pasts=False)
    before = original.SerializeToString()
    report = kvfuse.rewrite(original)
    assert not report.fused
    assert report.model.SerializeToString() == before
    assert onnx.load_from_string(before).graph.output[1].type.tensor_type.elem_type == TensorProto.FLOAT
