"""Whatever says something about a model makes a difference, and the text names it."""

import onnx
import pytest
from onnx import TensorProto, helper

import kvfuse
from models.tiny_decoder import build

MODEL = """
<ir_version: 8, opset_import: ["": 18, "local": 1], metadata_props: ["owner": "one"]>
g (float[N, 4] x, bool c) => (float[N, 4] y, float[N, 4] z)
<float[4, 4] weight = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float small = {2}>
{
  a = MatMul(x, weight)
  b = Mul(a, small)
  k = Constant<value = int64[1] {1}>()
  s = Softmax<axis = -1>(b)
  m = ReduceMax<keepdims = 1>(s, k)
  d = Sub(s, m)
  z = local.twice(d)
  y = If(c) <
    then_branch = t () => (float[N, 4] p) { p = Exp(d) },
    else_branch = e () => (float[N, 4] r) { q = Abs(d)  r = Neg(q) }
  >
}
<domain: "local", opset_import: ["": 18]>
twice (u) => (w) { w = Add(u, u) }
"""


def model():
    return onnx.parser.parse_model(MODEL)


def node(found, op):
    return next(node for node in found.graph.node if node.op_type == op)


def set_attribute(found, op, name, value):
    attribute = next(attribute for attribute in node(found, op).attribute if attribute.name == name)
    attribute.CopyFrom(helper.make_attribute(name, value))


def branch(found, name):
    return next(attribute.g for attribute in node(found, "If").attribute if attribute.name == name)


def change_weight(found):
    values = onnx.numpy_helper.to_array(found.graph.initializer[0]).copy()
    values[2, 3] += 1
    found.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "weight"))


def swap(found):
    node(found, "Sub").input[:] = reversed(node(found, "Sub").input)


def swap_outputs(found):
    outputs = [onnx.ValueInfoProto(), onnx.ValueInfoProto()]
    outputs[0].CopyFrom(found.graph.output[1])
    outputs[1].CopyFrom(found.graph.output[0])
    del found.graph.output[:]
    found.graph.output.extend(outputs)


def exchange_outputs(found):
    """y and z change places in what makes them."""
    node(found, "If").output[0], node(found, "twice").output[0] = "z", "y"


def add_dead_node(found):
    found.graph.node.append(helper.make_node("Cos", ["x"], ["unused"]))


def to_initializer(found):
    constant = node(found, "Constant")
    tensor = onnx.TensorProto()
    tensor.CopyFrom(constant.attribute[0].t)
    tensor.name = constant.output[0]
    found.graph.node.remove(constant)
    found.graph.initializer.append(tensor)


CHANGES = {
    "operator": (lambda m: setattr(node(m, "Sub"), "op_type", "Add"), ["- %Sub.1 = Sub", "+ %Sub.1 = Add"]),
    "domain": (lambda m: setattr(node(m, "MatMul"), "domain", "other"), ["+ %MatMul.1 = other::MatMul"]),
    "attribute": (
        lambda m: set_attribute(m, "Softmax", "axis", 0),
        ["- %Softmax.1 = Softmax<axis=-1>", "+ %Softmax.1 = Softmax<axis=0>"],
    ),
    "order of operands": (swap, ["- %Sub.1 = Sub(%Softmax.1, %ReduceMax.1)", "+ %Sub.1 = Sub(%ReduceMax.1"]),
    "weight": (change_weight, ["- @weight: f32[4,4] #", "+ @weight: f32[4,4] #"]),
    "small constant": (
        lambda m: m.graph.initializer[1].float_data.__setitem__(0, 3.0),
        ["- %Mul.1 = Mul(%MatMul.1, f32[]{2})", "+ %Mul.1 = Mul(%MatMul.1, f32[]{3})"],
    ),
    "constant node": (
        lambda m: node(m, "Constant").attribute[0].t.int64_data.__setitem__(0, 0),
        ["const i64[1]{1}", "const i64[1]{0}"],
    ),
    "constant or initializer": (to_initializer, ["const i64[1]{1}", "(%Softmax.1, i64[1]{1})"]),
    "input name": (
        lambda m: [setattr(m.graph.input[0], "name", "v"), node(m, "MatMul").input.__setitem__(0, "v")],
        ["- x: f32[N,4]", "+ v: f32[N,4]"],
    ),
    "input type": (
        lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", TensorProto.FLOAT16),
        ["- x: f32[N,4]", "+ x: f16[N,4]"],
    ),
    "input dim": (
        lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "M"),
        ["- x: f32[N,4]", "+ x: f32[M,4]"],
    ),
    "output order": (swap_outputs, ["order of outputs", "- y, z", "+ z, y"]),
    "exchanged outputs": (exchange_outputs, ["output sources", "+ y is z", "+ z is y"]),
    "dead node": (add_dead_node, ["+ %Cos.1 = Cos(x)"]),
    "branch": (
        lambda m: setattr(branch(m, "then_branch").node[0], "op_type", "Log"),
        ["nodes of then_branch of If making y", "- y = Exp", "+ y = Log"],
    ),
    "branch capture": (
        lambda m: branch(m, "else_branch").node[0].input.__setitem__(0, "s"),
        ["nodes of else_branch", "- %Abs.1 = Abs(%Sub.1)", "+ %Abs.1 = Abs(%Softmax.1)"],
    ),
    "function": (
        lambda m: setattr(m.functions[0].node[0], "op_type", "Mul"),
        ["nodes of function local::twice", "- %output.1 = Add(%input.1, %input.1)", "+ %output.1 = Mul("],
    ),
    "function name": (
        lambda m: [setattr(m.functions[0], "name", "double"), setattr(node(m, "twice"), "op_type", "double")],
        ["- local::twice", "+ local::double"],
    ),
    "function opset": (
        lambda m: setattr(m.functions[0].opset_import[0], "version", 17),
        ["- local::twice opset ai.onnx 18", "+ local::twice opset ai.onnx 17"],
    ),
    "opset": (
        lambda m: setattr(m.opset_import[0], "version", 17),
        ["- opset ai.onnx 18", "+ opset ai.onnx 17"],
    ),
    "ir version": (lambda m: setattr(m, "ir_version", 9), ["- ir_version 8", "+ ir_version 9"]),
    "metadata": (
        lambda m: setattr(m.metadata_props[0], "value", "two"),
        ["- owner: one", "+ owner: two"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_told(name):
    change, expected = CHANGES[name]
    changed = model()
    change(changed)
    found = kvfuse.diff(model(), changed)
    assert not found.equal
    for text in expected:
        assert text in found.text
    back = kvfuse.diff(changed, model())
    assert not back.equal


@pytest.mark.parametrize("name", ["operator", "attribute", "order of operands", "small constant"])
def test_a_change_touches_its_own_line_only(name):
    changed = model()
    CHANGES[name][0](changed)
    text = kvfuse.diff(model(), changed).text
    signs = [line[0] for line in text.splitlines()]
    assert (signs.count("-"), signs.count("+")) == (1, 1), text


@pytest.mark.parametrize("place", range(0, 180, 7))
def test_each_operand_and_operator_of_a_decoder_counts(place):
    """Turning any one node of a decoder into another operator, or feeding it otherwise, is never missed."""
    original = build(num_layers=1)
    nodes = original.graph.node
    changed = onnx.ModelProto()
    changed.CopyFrom(original)
    target = changed.graph.node[place % len(nodes)]
    if place % 2 or not target.input:
        target.op_type = f"{target.op_type}X"
    else:
        target.input[0] = "input_ids" if target.input[0] != "input_ids" else "position_ids"
    assert not kvfuse.diff(original, changed).equal


def test_a_renamed_weight_is_told_once_and_its_readers_are_not():
    changed = model()
    changed.graph.initializer[0].name = node(changed, "MatMul").input[1] = "renamed"
    text = kvfuse.diff(model(), changed).text
    found = [line[0] + line.split(":")[0][2:] for line in text.splitlines() if line[0] in "+-"]
    assert found == ["-@weight", "+@renamed"]


def test_an_inserted_node_leaves_what_follows_alone():
    changed = model()
    changed.graph.node.insert(1, helper.make_node("Sigmoid", ["a"], ["a2"]))
    node(changed, "Mul").input[0] = "a2"
    text = kvfuse.diff(model(), changed).text
    lines = [line for line in text.splitlines() if line[0] in "+-"]
    assert lines == [
        "- %Mul.1 = Mul(%MatMul.1, f32[]{2})",
        "+ %Sigmoid.1 = Sigmoid(%MatMul.1)",
        "+ %Mul.1 = Mul(%Sigmoid.1, f32[]{2})",
    ]
