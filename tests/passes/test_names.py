"""Values that have the names of ours: both keep theirs, or the file is refused with the name."""

import numpy as np
import onnx
import onnxruntime
import pytest
from decoder_graphs import decoder
from equivalence import run
from onnx import TensorProto, helper

import kvfuse

EXACT = 4096


def logits(path, session=kvfuse.InferenceSession):
    return np.concatenate([row["logits"] for row in run(session(path), (4, 1, 3), 2)], axis=1)


def original(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def rename(graph, old, new):
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for tensor in graph.initializer:
        tensor.name = new if tensor.name == old else tensor.name


OURS = ["slots", "past_length", "past_lengths", "begin", "attention_0", "Transpose", "Reshape", "integers"]


def test_values_with_names_like_ours_keep_them(tmp_path):
    model = decoder(layers=2, mask="causal+padding")
    taken = [f"kvfuse.{name}" for name in OURS]
    places = [node.output[0] for node in model.graph.node if node.op_type != "Identity"]
    for old, new in zip(places, taken[:-1], strict=False):
        rename(model.graph, old, new)
    rename(model.graph, model.graph.initializer[0].name, taken[-1])
    for node, name in zip(model.graph.node, taken, strict=False):
        node.name = name
    source, target = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(model, source)
    report = kvfuse.rewrite(source, target, n_recent=EXACT)
    assert len(report.fused) == 2
    onnx.checker.check_model(model)
    made = [name for node in onnx.load(target).graph.node for name in node.output]
    assert len(made) == len(set(made))
    assert taken[-1] in [tensor.name for tensor in onnx.load(target).graph.initializer]
    np.testing.assert_allclose(logits(target), logits(source, original), rtol=0, atol=2e-5)


def in_a_branch(name):
    """An If whose branches have an initializer of that name."""

    def touch(b, names):
        half = helper.make_tensor(name, TensorProto.FLOAT, [], [0.5])
        copy = helper.make_node("Identity", [name], [f"{name}.out"])
        out = helper.make_tensor_value_info(f"{name}.out", TensorProto.FLOAT, [])
        body = helper.make_graph([copy], "body", [], [out], [half])
        chosen = b.op("If", b.const(True, bool), then_branch=body, else_branch=body)
        b.output(chosen, "half", [])

    return touch


@pytest.mark.parametrize("name", ["kv_sequence", "kv_past_length"])
def test_a_value_named_like_our_inputs_refuses_with_the_name(name, tmp_path):
    inside = decoder()
    rename(inside.graph, inside.graph.node[1].output[0], name)
    for model in (inside, decoder(touch=in_a_branch(name))):
        onnx.save(model, tmp_path / "model.onnx")
        report = kvfuse.rewrite(tmp_path / "model.onnx", tmp_path / "out.onnx")
        assert [site.reason for site in report.sites] == [f"the graph already has a value named {name}"]
        assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


def test_a_name_of_ours_inside_a_branch_is_not_shadowed(tmp_path):
    onnx.save(decoder(touch=in_a_branch("kvfuse.slots")), tmp_path / "model.onnx")
    report = kvfuse.rewrite(tmp_path / "model.onnx", tmp_path / "out.onnx", n_recent=EXACT)
    assert len(report.fused) == 1
    begin = onnx.load(tmp_path / "out.onnx").graph.node[0]
    assert begin.output[0] != "kvfuse.slots"
    assert np.isfinite(logits(tmp_path / "out.onnx")).all()
