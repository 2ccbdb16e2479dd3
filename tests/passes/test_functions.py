"""Attention inside model-local functions: what hides a site is inlined, two calls are two states."""

import numpy as np
import onnx
import pytest
from decoder_graphs import HEAD_DIM, HEADS, decoder, merge_heads
from equivalence import assert_same
from onnx import TensorProto, helper

import kvfuse

DOMAIN = "local"


def node(op_type, inputs, outputs, **attributes):
    return helper.make_node(op_type, inputs, outputs, **attributes)


def reference(name, target):
    """An attribute that takes its value from the caller's."""
    return onnx.AttributeProto(name=name, ref_attr_name=target, type=onnx.AttributeProto.FLOAT)


def core(opset=18):
    """Core<factor>(query, keys, values) -> y: causal attention [B, H, S, D]."""
    scale = node("Constant", [], ["factor"])
    scale.attribute.append(reference("value_float", "factor"))
    nodes = [
        scale,
        node("Transpose", ["keys"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["query", "kt"], ["raw"]),
        node("Mul", ["raw", "factor"], ["scores"]),
        node("Shape", ["query"], ["s1"], start=2, end=3),
        node("Shape", ["keys"], ["t1"], start=2, end=3),
        node("Constant", [], ["scalar"], value=helper.make_tensor("e", TensorProto.INT64, [0], [])),
        node("Reshape", ["s1", "scalar"], ["s"]),
        node("Reshape", ["t1", "scalar"], ["t"]),
        node("Visible", ["s", "t"], ["visible"], domain=DOMAIN),
        node("Constant", [], ["hidden"], value_float=float("-inf")),
        node("Where", ["visible", "scores", "hidden"], ["masked"]),
        node("Softmax", ["masked"], ["p"], axis=-1),
        node("MatMul", ["p", "values"], ["y"]),
    ]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    names = ["query", "keys", "values"]
    return helper.make_function(DOMAIN, "Core", names, ["y"], nodes, opsets, attributes=["factor"])


def visible(opset=18):
    """Visible(s, t) -> bool [S, T]: the causal mask from two lengths."""
    nodes = [
        node("Constant", [], ["zero"], value_int=0),
        node("Constant", [], ["one"], value_int=1),
        node("Constant", [], ["last"], value_ints=[1]),
        node("Sub", ["t", "s"], ["p"]),
        node("Range", ["p", "t", "one"], ["positions"]),
        node("Unsqueeze", ["positions", "last"], ["column"]),
        node("Range", ["zero", "t", "one"], ["keys"]),
        node("LessOrEqual", ["keys", "column"], ["mask"]),
    ]
    return helper.make_function(
        DOMAIN, "Visible", ["s", "t"], ["mask"], nodes, [helper.make_opsetid("", opset)]
    )


def block(opset=18):
    """Block<factor>(query, key, value, past_key, past_value) -> y, presents: the append and a nested call."""
    call = node("Core", ["query", "present_key", "present_value"], ["y"], domain=DOMAIN)
    call.attribute.append(reference("factor", "factor"))
    nodes = [
        node("Concat", ["past_key", "key"], ["present_key"], axis=2),
        node("Concat", ["past_value", "value"], ["present_value"], axis=2),
        call,
    ]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    names = ["query", "key", "value", "past_key", "past_value"]
    outputs = ["y", "present_key", "present_value"]
    return helper.make_function(DOMAIN, "Block", names, outputs, nodes, opsets, attributes=["factor"])


def widen():
    """Widen(x) -> 2 x: a function that hides nothing."""
    nodes = [node("Add", ["x", "x"], ["y"])]
    return helper.make_function(DOMAIN, "Widen", ["x"], ["y"], nodes, [helper.make_opsetid("", 18)])


def core_layer(b, names, options):
    present = [b.op("Concat", names[f"past_{side}"], names[side], axis=2) for side in ("key", "value")]
    factor = 0.2 + 0.1 * len([n for n in b.nodes if n.domain == DOMAIN])
    y = b.op("Core", names["query"], *present, domain=DOMAIN, factor=factor)
    return merge_heads(b, y), *present


def block_layer(b, names, options):
    operands = [names[name] for name in ("query", "key", "value", "past_key", "past_value")]
    y, *present = b.op("Block", *operands, outputs=3, domain=DOMAIN, factor=0.3)
    return merge_heads(b, b.op("Widen", y, domain=DOMAIN)), *present


def with_functions(model, *functions):
    model.functions.extend(functions)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return model


def core_decoder(**options):
    model = decoder(layers=2, layer=core_layer, kv_heads=HEADS, **options)
    return with_functions(model, core(), visible(), widen())


def function_names(model):
    return sorted(function.name for function in model.functions)


def test_two_calls_are_two_states_with_the_scale_of_each(tmp_path):
    report = assert_same(core_decoder(), tmp_path, sites=2)
    assert [site.layer for site in report.fused] == ["0", "1"]
    assert [site.details["scale"] for site in report.fused] == pytest.approx([0.2, 0.3])
    assert [site.mask["kind"] for site in report.fused] == ["causal", "causal"]
    saved = onnx.load(tmp_path / "fused.onnx")
    onnx.checker.check_model(saved)
    layers = [n.attribute for n in saved.graph.node if n.op_type == "QuantizedKvSdpa"]
    assert len({next(a.s for a in attributes if a.name == "layer") for attributes in layers}) == 2


def test_the_append_and_a_nested_call_inside_a_function(tmp_path):
    model = decoder(layers=2, layer=block_layer, kv_heads=HEADS)
    with_functions(model, block(), core(), visible(), widen())
    assert_same(model, tmp_path, sites=2)
    assert function_names(onnx.load(tmp_path / "fused.onnx")) == ["Visible", "Widen"]


def test_only_functions_that_hide_a_site_are_inlined():
    report = kvfuse.rewrite(core_decoder())
    assert function_names(report.model) == ["Visible", "Widen"]


def test_the_default_of_a_function_attribute_is_the_scale(tmp_path):
    model = core_decoder()
    function = model.functions[0]
    del function.attribute[:]
    function.attribute_proto.append(helper.make_attribute("factor", 0.7))
    for call in model.graph.node:
        if call.op_type == "Core":
            del call.attribute[:]
    report = assert_same(model, tmp_path, sites=2)
    assert [site.details["scale"] for site in report.fused] == pytest.approx([0.7, 0.7])


def test_names_inside_a_function_do_not_meet_those_of_the_graph(tmp_path):
    def touch(b, names):
        names["scores"] = b.op("Identity", names["x"], name="scores")
        b.op("Identity", names["scores"], name="raw")

    assert_same(core_decoder(touch=touch), tmp_path, sites=2)


def test_names_inside_a_function_do_not_meet_those_of_a_subgraph(tmp_path):
    def touch(b, names):
        branches = [
            helper.make_graph(
                [node(op, [names["x"]], ["scores"]), node("Identity", ["scores"], [f"out_{op}"])],
                op, [], [helper.make_tensor_value_info(f"out_{op}", TensorProto.FLOAT, None)],
            )
            for op in ("Neg", "Abs")
        ]  # fmt: skip
        b.output(
            b.op("If", b.const(True, bool), then_branch=branches[0], else_branch=branches[1]), "seen", None
        )

    assert_same(core_decoder(touch=touch), tmp_path, sites=2)
    names = [n.output[0] for n in onnx.load(tmp_path / "fused.onnx").graph.node]
    assert "scores" not in names


def refused(model):
    before = model.SerializeToString(deterministic=True)
    report = kvfuse.rewrite(model)
    assert report.fused == ()
    assert report.model.SerializeToString(deterministic=True) == before
    return [site.reason for site in report.sites]


def test_a_model_of_which_nothing_is_fused_keeps_its_functions(tmp_path):
    model = core_decoder()
    del model.graph.output[:4]
    assert all("is not a graph output" in reason for reason in refused(model))
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "out").mkdir()
    kvfuse.rewrite(tmp_path / "model.onnx", tmp_path / "out" / "model.onnx")
    assert (tmp_path / "out" / "model.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


def test_a_function_of_another_opset_stays_with_the_reason():
    model = decoder(layer=core_layer, kv_heads=HEADS)
    with_functions(model, core(opset=17), visible())
    (reason,) = refused(model)
    assert "is inside the model-local function Core" in reason
    assert "version 17 of the operator set ''" in reason


def test_functions_that_call_each_other_end_in_a_refusal():
    model = core_decoder()
    loop = model.functions[0].node.add()
    loop.CopyFrom(node("Core", ["query", "keys", "values"], ["again"], domain=DOMAIN, factor=1.0))
    assert all("model-local function Core" in reason for reason in refused(model))


def test_a_function_that_hands_its_input_on_stays():
    model = core_decoder()
    function = model.functions[0]
    function.output.append("keys")
    for position, call in enumerate(n for n in model.graph.node if n.op_type == "Core"):
        call.output.append(f"spare_{position}")
    assert all("returns one of its inputs as it is" in reason for reason in refused(model))


def test_an_attention_that_is_almost_right_in_a_function_is_refused_by_the_numbers():
    model = core_decoder()
    function = model.functions[0]
    twisted = next(n for n in function.node if n.output[0] == "y")
    twisted.input[1] = "twisted"
    at = list(function.node).index(twisted)
    rest = [onnx.NodeProto.FromString(n.SerializeToString()) for n in function.node[at:]]
    del function.node[at:]
    index = helper.make_tensor("i", TensorProto.INT64, [HEADS], np.arange(HEADS)[::-1].tolist())
    function.node.extend(
        [
            node("Constant", [], ["order"], value=index),
            node("Gather", ["values", "order"], ["twisted"], axis=1),
        ]
    )
    function.node.extend(rest)
    assert all("does not compute what its description says" in reason for reason in refused(model))
    assert HEAD_DIM == 8
