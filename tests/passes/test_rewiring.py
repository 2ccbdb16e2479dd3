"""What stays of a graph after its sites went: inputs, lengths, names, versions."""

import json

import numpy as np
import onnx
import pytest
from decoder_graphs import HEAD_DIM, HEADS, KV_HEADS, decoder, sdpa
from onnx import TensorProto, helper, numpy_helper

import kvfuse


def rewritten(model, **options):
    report = kvfuse.rewrite(model, **options)
    return report.model.graph, report


def nodes(graph, op_type):
    return [node for node in graph.node if node.op_type == op_type]


def attributes(node):
    return {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}


def producer(graph, name):
    return next((node for node in graph.node if name in node.output), None)


def test_cache_inputs_and_outputs_go_and_everything_else_stays():
    graph, report = rewritten(decoder(layers=2, mask="causal+padding"))
    assert [value.name for value in graph.input] == [
        "input_ids",
        "attention_mask",
        "kv_sequence",
        "kv_past_length",
    ]
    assert [value.name for value in graph.output] == ["logits"]
    assert report.dropped["inputs"] == ("past.0.key", "past.0.value", "past.1.key", "past.1.value")
    assert report.dropped["outputs"] == (
        "present.0.key",
        "present.0.value",
        "present.1.key",
        "present.1.value",
    )


def test_an_input_that_nothing_reads_any_more_stays():
    def touch(b, names):
        b.input("position_ids", ["batch", "sequence"], TensorProto.INT64)

    graph, _ = rewritten(decoder(touch=touch))
    assert "position_ids" in [value.name for value in graph.input]


def test_begin_is_first_and_its_controls_are_inputs_with_defaults():
    graph, report = rewritten(decoder(layers=2))
    begin = graph.node[0]
    assert (begin.domain, begin.op_type) == ("kvfuse", "KvCacheBegin")
    assert list(begin.input) == ["kv_sequence", "kv_past_length", "input_ids"]
    defaults = {
        t.name: numpy_helper.to_array(t).tolist() for t in graph.initializer if t.name.startswith("kv_")
    }
    assert defaults == {"kv_sequence": [0], "kv_past_length": [-1]}
    dims = {value.name: value.type.tensor_type.shape.dim[0].dim_param for value in graph.input}
    assert dims["kv_sequence"] == "kv_sequence_rows"
    assert dims["kv_past_length"] == "kv_past_length_rows"
    assert attributes(begin) == {"fingerprint": report.fingerprint.encode(), "layers": b"0\n1", "uniform": 0}


def test_every_attribute_of_the_op_is_written():
    graph, _ = rewritten(decoder(factor=0.25, softcap="before"), n_recent=100, key_bits=8)
    assert attributes(nodes(graph, "QuantizedKvSdpa")[0]) == {
        "axis": 2, "scale": 0.25, "causal": 1, "n_recent": 100, "block": 64, "n_sink": 4, "key_bits": 8,
        "value_bits": 4, "group_size": 32, "codes": b"full", "rotation": b"hadamard", "key_center": b"block",
        "window_left": -1, "softcap": 5.0, "guard": b"warn", "layer": b"0",
    }  # fmt: skip


def lengths_of(name, *axes):
    """Adds the sizes of a cache value as a graph output, gathered one by one."""

    def touch(b, names):
        parts = [b.vector(b.dim(names[name], axis)) for axis in axes]
        b.output(b.op("Concat", *parts, axis=0), "sizes", [len(axes)], TensorProto.INT64)

    return touch


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("past_key", ["B", str(KV_HEADS), "P", str(HEAD_DIM)]),
        ("present_value", ["B", str(KV_HEADS), "T", str(HEAD_DIM)]),
        ("keys", ["B", "4", "T", str(HEAD_DIM)]),
        ("raw", ["B", "4", "S", "T"]),
    ],
)
def test_lengths_of_caches_are_rewired_by_meaning(name, dims):
    graph, report = rewritten(decoder(touch=lengths_of(name, 0, 1, 2, 3)))
    assert report.rewired[0]["dims"] == dims
    assert len(report.rewired) == 4
    assert attributes(graph.node[0])["uniform"] == 1
    onnx.checker.check_graph(graph, checker_context())


def checker_context():
    context = onnx.checker.DEFAULT_CONTEXT
    context.opset_imports = {"": 18, "kvfuse": 1}
    context.ir_version = 9
    return context


def test_the_past_length_itself_is_used_without_a_detour():
    def touch(b, names):
        b.output(b.op("Add", b.dim(names["past_key"], 2), b.number(1)), "next", [], TensorProto.INT64)

    graph, _ = rewritten(decoder(touch=touch))
    assert producer(graph, producer(graph, "next").input[0]).input[0] == graph.node[0].output[1]


def test_the_batch_size_alone_keeps_rows_independent():
    graph, report = rewritten(decoder(touch=lengths_of("past_value", 0)))
    assert report.rewired[0]["dims"][0] == "B"
    assert attributes(graph.node[0])["uniform"] == 0


def test_shape_attributes_are_honoured():
    def touch(b, names):
        b.output(b.op("Shape", names["present_key"], start=-2, end=-1), "length", [1], TensorProto.INT64)

    _, report = rewritten(decoder(touch=touch))
    assert report.rewired[0]["dims"] == ["T"]


def test_old_opsets_get_no_shape_attributes():
    graph, _ = rewritten(decoder(opset=13, touch=lengths_of("keys", 0, 2)))
    assert not any(node.attribute for node in nodes(graph, "Shape"))


def test_a_length_of_something_else_refuses_the_site():
    def touch(b, names):
        odd = b.op("Concat", names["past_key"], names["past_key"], names["key"], axis=2)
        b.output(b.dim(odd, 2), "odd", [], TensorProto.INT64)

    report = kvfuse.rewrite(decoder(touch=touch))
    assert [site.outcome for site in report.sites] == ["refused"]
    assert "neither batch, new, cached nor all tokens" in report.sites[0].reason


def one_spoilt(b, names, options):
    y, key, value = sdpa(b, names, options)
    if names["past_key"] == "past.1.key":
        b.output(b.op("ReduceSum", key, keepdims=0), "seen", [])
    return y, key, value


def test_a_mixed_model_keeps_the_caches_of_its_refused_layer():
    graph, report = rewritten(decoder(layers=3, layer=one_spoilt))
    assert [(site.outcome, site.layer) for site in report.sites] == [
        ("fused", "0"),
        ("refused", ""),
        ("fused", "2"),
    ]
    kept = [value.name for value in graph.input if "past." in value.name]
    assert kept == ["past.1.key", "past.1.value"]
    assert [v.name for v in graph.output if "present" in v.name] == ["present.1.key", "present.1.value"]
    assert attributes(graph.node[0])["layers"] == b"0\n2"


def test_layer_keys_are_numbers_of_the_names_or_the_order():
    graph, _ = rewritten(decoder(layers=2))
    assert [attributes(op)["layer"] for op in nodes(graph, "QuantizedKvSdpa")] == [b"0", b"1"]
    model = decoder(layers=2)
    for old, new in (("past.0.key", "a.7.7"), ("past.1.key", "b.7.7")):
        for node in model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
        next(value for value in model.graph.input if value.name == old).name = new
    graph, _ = rewritten(model)
    assert [attributes(op)["layer"] for op in nodes(graph, "QuantizedKvSdpa")] == [b"0", b"1"]


@pytest.mark.parametrize(("opset", "ir_version"), [(13, 7), (18, 8), (18, 10), (21, 10)])
def test_versions_are_not_raised(opset, ir_version):
    report = kvfuse.rewrite(decoder(opset=opset, ir_version=ir_version))
    assert report.fused
    assert report.model.ir_version == ir_version
    assert {entry.domain: entry.version for entry in report.model.opset_import} == {"": opset, "kvfuse": 1}


def test_a_second_rewrite_changes_nothing():
    first = kvfuse.rewrite(decoder(layers=2)).model
    before = first.SerializeToString(deterministic=True)
    second = kvfuse.rewrite(first)
    assert second.sites == ()
    assert second.model.SerializeToString(deterministic=True) == before


def test_the_metadata_keeps_what_unfuse_needs():
    report = kvfuse.rewrite(decoder(dtype=np.float16), n_recent=7)
    (entry,) = [prop for prop in report.model.metadata_props if prop.key == "kvfuse"]
    kept = json.loads(entry.value)
    assert kept["fingerprint"] == report.fingerprint
    assert kept["options"]["n_recent"] == 7
    assert kept["version"] == kvfuse.__version__
    assert kept["caches"] == [
        {
            "layer": "0", "past_key": "past.0.key", "past_value": "past.0.value",
            "present_key": "present.0.key", "present_value": "present.0.value",
            "present_copies": {"key": [], "value": []}, "dtype": "float16", "op_dtype": "float16",
            "num_heads": HEADS, "kv_num_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_head_dim": HEAD_DIM,
            "key_layout": "BHSD", "value_layout": "BHSD", "stacked_index": [None, None],
        }
    ]  # fmt: skip


def test_an_input_of_the_same_name_refuses_everything():
    def touch(b, names):
        b.input("kv_sequence", [1], TensorProto.INT64)

    report = kvfuse.rewrite(decoder(touch=touch))
    assert "already has an input named kv_sequence" in report.sites[0].reason


def test_the_batch_comes_from_an_input_that_has_it():
    graph, _ = rewritten(decoder(ids_first=False, mask="causal+padding"))
    assert graph.node[0].input[2] == "attention_mask"


def test_equal_layers_share_their_evaluations():
    from kvfuse.passes.find import find_sites
    from onnx_ir import from_proto

    one, many = (find_sites(from_proto(decoder(layers=layers))).evaluator for layers in (1, 6))
    assert many.session_count == one.session_count
