"""com.microsoft GroupQueryAttention: what it does inside becomes nodes, its lengths are kept row by row."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from contrib_graphs import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MS,
    WIDTH,
    compare,
    decoder,
    group_query,
    ragged,
    rewritten,
    steps,
)
from kvfuse.passes.pairing import stem
from onnx import TensorProto, helper

import kvfuse
from models import tiny_decoder


def causal_slopes(b):
    """An attention_bias that depends on the key's absolute position."""
    total = b.dim("attention_mask", 1)
    keys = b.op("Cast", b.op("Range", b.number(0), total, b.number(1)), to=b.element)
    shape = b.op("Concat", b.ints(1, 1), b.vector(b.dim("input_ids", 1)), b.vector(total), axis=0)
    return b.op("Expand", b.op("Mul", keys, b.const(-0.3)), shape)


FORMS = {
    "packed": {},
    "separate": {"packed": False},
    "no_rotary": {"rotary": False},
    "interleaved": {"interleaved": 1},
    "half_rotary": {"channels": HEAD_DIM // 2},
    "half_rotary_interleaved_separate": {"channels": HEAD_DIM // 2, "interleaved": 1, "packed": False},
    "scale": {"scale": 0.21},
    "scale_zero": {"scale": 0.0},
    "window": {"local_window_size": 3},
    "softcap": {"softcap": 0.7},
    "window_softcap": {"local_window_size": 4, "softcap": 0.7},
    "bias": {"bias": causal_slopes},
    "head_sink": {"sink": True},
    "smooth_softmax": {"smooth_softmax": 1},
    "position_ids": {"position_ids": True},
}


def site_of(report):
    assert {site.pattern for site in report.sites} == {"group_query_attention"}
    return report.sites[0]


def refusal(layer, **options):
    report = kvfuse.inspect(decoder(layer, **options))
    assert report.fused == ()
    return [site.reason for site in report.refused]


def nodes(model, op_type):
    return [node for node in model.graph.node if node.op_type == op_type]


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_different_length_decode_as_in_the_original(form, tmp_path):
    options = FORMS[form]
    ids = options.get("position_ids", False)
    model = decoder(group_query(**options), position_ids=ids)
    report = compare(model, ragged([6, 3, 1], 5, ids), tmp_path)
    assert len(report.fused) == 2


@pytest.mark.parametrize("form", FORMS)
def test_one_row_in_chunks_is_the_original(form, tmp_path):
    options = FORMS[form]
    ids = options.get("position_ids", False)
    model = decoder(group_query(**options), position_ids=ids)
    compare(model, steps([5, 3, 1, 4, 1], batch=1, position_ids=ids, offset=2), tmp_path)


def test_a_first_prompt_reads_the_first_of_the_position_ids_only(tmp_path):
    (prompt, _), (decode, _) = steps([5, 1], batch=2, position_ids=True)
    prompt["position_ids"][:] = [[7, 3, 30, 1, 2], [9, 9, 9, 9, 9]]
    decode["position_ids"][:] = [[20], [14]]
    model = decoder(group_query(position_ids=True), position_ids=True)
    compare(model, [(prompt, None), (decode, None)], tmp_path)


def test_padding_that_a_bias_hides_is_recognised(tmp_path):
    def bias(b):
        real = b.op("Unsqueeze", b.op("Cast", "attention_mask", to=TensorProto.BOOL), b.ints(1, 2))
        added = b.op("Where", real, b.const(0.0), b.const(-1e9))
        wide = b.op("Concat", b.ints(1, 1), b.vector(b.dim("input_ids", 1)), b.ints(1), axis=0)
        return b.op("Expand", added, wide)

    model = decoder(group_query(bias=bias))
    report = compare(model, ragged([6, 3], 3), tmp_path)
    assert report.sites[0].mask["kind"] == "causal+padding"


@pytest.mark.parametrize("kv_heads", [1, HEADS])
def test_any_number_of_kv_heads(kv_heads, tmp_path):
    compare(decoder(group_query(kv_heads=kv_heads), kv_heads=kv_heads), steps([4, 1, 1]), tmp_path)


def test_half_precision(tmp_path):
    model = decoder(group_query(), dtype=np.float16)
    compare(model, ragged([6, 4], 4), tmp_path, np.float16)


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 4}, {"softcap": 0.8}, {"kv_num_heads": 1}, {"num_heads": 9, "kv_num_heads": 3}],
)
def test_the_tiny_decoders_of_that_spelling(options, tmp_path):
    model = tiny_decoder.build("group_query_attention", **options)
    specs = {value.name for value in model.graph.input}
    feeds = steps([5, 1, 1, 3, 1], batch=1, position_ids="position_ids" in specs)
    report = compare(model, feeds, tmp_path)
    assert len(report.fused) == 2


def test_the_attributes_become_the_ops():
    report = kvfuse.rewrite(decoder(group_query(local_window_size=4, softcap=2.0, scale=0.3)))
    site = site_of(report)
    assert (site.mask["kind"], site.mask["window"]) == ("window", 3)
    op = nodes(report.model, "QuantizedKvSdpa")[0]
    found = {entry.name: helper.get_attribute_value(entry) for entry in op.attribute}
    assert (found["axis"], found["causal"], found["window_left"], found["softcap"]) == (1, 1, 3, 2.0)
    assert found["scale"] == pytest.approx(0.3)


def test_the_scale_defaults_to_the_root_of_the_head_size():
    report = kvfuse.inspect(decoder(group_query()))
    assert site_of(report).details["scale"] == pytest.approx(HEAD_DIM**-0.5)


def test_heads_are_split_by_a_reshape_and_nothing_is_transposed():
    model = kvfuse.rewrite(decoder(group_query())).model
    makers = {name: node for node in model.graph.node for name in node.output}
    op = nodes(model, "QuantizedKvSdpa")[0]
    assert [makers[name].op_type for name in op.input[:3]] == ["Reshape"] * 3
    rotated = [makers[makers[name].input[0]] for name in op.input[:2]]
    assert [(node.domain, node.op_type) for node in rotated] == [(MS, "RotaryEmbedding")] * 2
    assert not nodes(model, "GroupQueryAttention")


def test_positions_are_written_once_and_without_the_scalar_past_length():
    model = kvfuse.rewrite(decoder(group_query(), layers=3)).model
    assert len({node.input[1] for node in nodes(model, "RotaryEmbedding")}) == 1
    (begin,) = nodes(model, "KvCacheBegin")
    assert helper.get_node_attr_value(begin, "uniform") == 0
    onnx.checker.check_model(model)  # the nodes are in order although KvCacheBegin waits for the lengths


def test_the_proof_has_ragged_rows_and_the_end_of_the_window():
    report = kvfuse.inspect(decoder(group_query(local_window_size=30)))
    probes = report.to_dict()["sites"][0]["evidence"]
    assert {"ragged"} <= {probe["padding"] for probe in probes}
    assert 30 in {probe["past"] for probe in probes}


def test_the_callers_past_length_wins(tmp_path):
    session, _ = rewritten(decoder(group_query()), tmp_path)
    first, second, third = (feeds for feeds, _ in steps([4, 1, 1], batch=1))
    session.run(None, first)
    (expected,) = session.run(None, second)
    session.run(None, third)
    (again,) = session.run(None, {**third, "input_ids": second["input_ids"], "kv_past_length": np.array([4])})
    np.testing.assert_array_equal(again, expected)


def test_a_mask_of_the_new_tokens_only_starts_again(tmp_path):
    session, _ = rewritten(decoder(group_query()), tmp_path)
    (feeds, _), *rest = steps([4, 1], batch=1)
    (expected,) = session.run(None, feeds)
    session.run(None, rest[0][0])
    (again,) = session.run(None, feeds)
    np.testing.assert_array_equal(again, expected)


def test_a_mask_of_more_tokens_than_the_cache_holds_is_an_error(tmp_path):
    session, _ = rewritten(decoder(group_query()), tmp_path)
    first, second, _ = (feeds for feeds, _ in steps([4, 1, 1], batch=1))
    session.run(None, first)
    with pytest.raises(Exception, match="past"):
        session.run(None, {**second, "attention_mask": np.ones((1, 9), np.int64)})


def test_metadata_names_the_original_caches():
    model = kvfuse.rewrite(decoder(group_query())).model
    (text,) = [entry.value for entry in model.metadata_props if entry.key == "kvfuse"]
    record = json.loads(text)["caches"][1]
    assert (record["past_key"], record["present_value"]) == ("past.1.key", "present.1.value")
    assert record["stacked_index"] == [None, None]


def test_a_ring_is_refused():
    for reason in refusal(group_query(sliding_window_cache=1, local_window_size=4)):
        assert "is a ring that keeps the newest tokens only" in reason


def test_not_causal_is_refused():
    for reason in refusal(group_query(causal=0)):
        assert "is not causal" in reason


def test_rotary_tables_wider_than_a_head_are_refused():
    for reason in refusal(group_query(channels=2 * HEAD_DIM)):
        assert "could not be evaluated" in reason


def test_norms_inside_are_refused():
    def weights(b):
        return ["", "", *(b.const(np.ones(HEAD_DIM)) for _ in range(2))]

    for reason in refusal(group_query(extra=weights)):
        assert "normalizes its query inside" in reason


def test_a_quantized_cache_is_refused():
    def scales(b):
        return [b.const([0.1]) for _ in range(2)]

    for reason in refusal(group_query(extra=scales)):
        assert "its cache is quantized already" in reason


def test_scores_that_are_returned_refuse_the_site():
    def layer(b, x, past):
        y, key, value = group_query(qk_output=1)(b, x, past)
        b.nodes[-1].output.append("scores")
        b.output("scores", "scores", None)
        return y, key, value

    report = kvfuse.inspect(decoder(layer, layers=1))
    assert "returns its scores" in report.sites[0].reason


def test_a_fixed_buffer_is_refused():
    model = decoder(group_query())
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[2].dim_value = 64
    for site in kvfuse.inspect(model).sites:
        assert (site.outcome, "is a fixed buffer of 64 tokens" in site.reason) == ("refused", True)


def test_a_past_that_is_no_input_is_refused():
    def layer(b, x, past):
        return group_query()(b, x, [b.op("Add", past[0], past[0]), past[1]])

    for reason in refusal(layer):
        assert "not a graph input" in reason


def test_layers_that_are_told_different_lengths_are_not_all_fused():
    report = kvfuse.inspect(decoder(group_query(share_lengths=False)))
    assert [site.outcome for site in report.sites].count("refused") == 1
    assert "its lengths are" in report.refused[0].reason


def test_lengths_that_follow_the_cached_tokens_are_refused():
    def lengths(b):
        total = b.op("Add", b.dim("past.0.key", 2), b.dim("input_ids", 1))
        batch = b.vector(b.dim("input_ids", 0))
        last = b.op("Expand", b.op("Sub", total, b.number(1)), batch)
        return b.op("Cast", last, to=TensorProto.INT32), b.op("Cast", total, to=TensorProto.INT32)

    for reason in refusal(group_query(lengths=lengths)):
        assert "reads the cache's" in reason


def test_an_attention_that_is_not_told_its_lengths_beside_it_keeps_it_out():
    other = iter([True, False])

    def layer(b, x, past):
        if next(other):
            return group_query(kv_heads=HEADS)(b, x, past)
        query, key, value = (b.op("MatMul", x, b.weight(WIDTH, HEADS * HEAD_DIM)) for _ in range(3))
        return b.op("MultiHeadAttention", query, key, value, "", "", "", *past, outputs=3, domain=MS,
                    num_heads=HEADS, unidirectional=1)  # fmt: skip

    report = kvfuse.inspect(decoder(layer, kv_heads=HEADS))
    outcomes = {site.pattern: (site.outcome, site.reason) for site in report.sites}
    assert outcomes["multi_head_attention"][0] == "fused"
    assert "is told its lengths by" in outcomes["group_query_attention"][1]


def test_caches_of_other_layouts_are_not_mistaken():
    model = decoder(group_query())
    for value in model.graph.input:
        if value.name.startswith("past"):
            shape = value.type.tensor_type.shape
            dims = [("batch", 0), ("past", 0), ("", KV_HEADS), ("", HEAD_DIM)]
            for dim, (name, size) in zip(shape.dim, dims, strict=True):
                dim.Clear()
                if name:
                    dim.dim_param = name
                else:
                    dim.dim_value = size
    assert [site.outcome for site in kvfuse.inspect(model).sites] == ["refused"] * 2


def test_caches_that_change_places_by_their_names_are_refused():
    def layer(b, x, past):
        return group_query()(b, x, past[::-1])

    for reason in refusal(layer):
        assert "grows into present" in reason


@pytest.mark.parametrize(
    "names",
    [
        ("past_key_values.3.key", "present.3.key"),
        ("past_key_self_0", "present_key_self_0"),
        ("input.past_key_values.layers.1.keys", "output.past_key_values.layers.1.keys"),
        ("past_0", "present_0"),
        ("in_k_2", "out_k_2"),
    ],
)
def test_names_of_exporters_are_paired(names):
    past, present = (ir.Value(name=name) for name in names)
    assert stem(past) == stem(present)
