"""Masks by meaning: one rule is found in every spelling, and the proof shows what each query saw."""

import numpy as np
import pytest
from decoder_graphs import HEADS, decoder
from onnx import TensorProto, helper

import kvfuse

RULES = {
    "none": ("none", False, -1, None),
    "padding": ("padding", False, -1, "attention_mask"),
    "causal": ("causal", True, -1, None),
    "causal+padding": ("causal+padding", True, -1, "attention_mask"),
    "window": ("window", True, 2, None),
    "window+padding": ("window+padding", True, 2, "attention_mask"),
}


def mask_of(model):
    report = kvfuse.rewrite(model)
    (site,) = report.sites
    assert site.outcome == "fused", site.reason
    op = next(node for node in report.model.graph.node if node.op_type == "QuantizedKvSdpa")
    return site.mask, op, report.model.graph


def attribute(node, name):
    return next(helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name)


@pytest.mark.parametrize("form", ["add", "add_lowest", "where"])
@pytest.mark.parametrize("mask", RULES)
def test_rules_are_found_in_every_form(mask, form):
    found, op, _ = mask_of(decoder(mask=mask, mask_form=form))
    kind, causal, window, padding = RULES[mask]
    assert (found["kind"], found["causal"], found["window"], found["padding_input"]) == (
        kind,
        causal,
        window,
        padding,
    )
    assert (attribute(op, "causal"), attribute(op, "window_left")) == (int(causal), window)
    assert list(op.input[4:]) == ([padding] if padding else [])


@pytest.mark.parametrize("mask", ["alibi", "alibi+padding", "chunks", "chunks+padding"])
def test_what_no_rule_explains_is_passed_through(mask):
    found, op, graph = mask_of(decoder(mask=mask))
    assert (found["kind"], found["padding_input"]) == ("other", None)
    assert (attribute(op, "causal"), attribute(op, "window_left")) == (0, -1)
    assert op.input[4] == ""
    assert op.input[5] in {name for node in graph.node for name in node.output}


def test_hidden_by_a_small_number_is_a_bias_and_no_mask():
    assert mask_of(decoder(mask_form="add_small"))[0]["kind"] == "other"


def test_a_bias_has_the_type_of_the_query():
    _, op, graph = mask_of(decoder(mask="alibi", dtype=np.float16))
    bias = next(node for node in graph.node if op.input[5] in node.output)
    assert bias.op_type == "Add"
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert {
        types[name] for node in graph.node if node.op_type == "Where" for name in node.input if name in types
    } == {TensorProto.FLOAT16}


def test_the_proof_says_what_every_query_saw():
    found, _, _ = mask_of(decoder(mask="window+padding"))
    probes = {(p["sequence"], p["past"], p["padding"]): p["visible"] for p in found["proof"]}
    assert probes[5, 0, "none"][0] == ["0-0", "0-1", "0-2", "1-3", "2-4"]
    assert probes[1, 6, "none"][0] == ["4-6"]
    # Row 1 of a left-padded batch has its first three keys hidden.
    assert probes[3, 4, "left"][1] == ["3-4", "3-5", "4-6"]
    assert max(past for _, past, _ in probes) >= 300000


def test_a_window_is_found_although_every_short_probe_is_causal():
    found, op, _ = mask_of(decoder(mask="window", window=30000))
    assert (found["kind"], found["window"], attribute(op, "window_left")) == ("window", 29999, 29999)


def test_a_constant_table_ends_the_search_and_its_window_is_found():
    near = np.tril(np.ones((64, 64), bool)) & ~np.tril(np.ones((64, 64), bool), -5)

    def from_table(b, value, names):
        past, total = (b.vector(b.dim(names[name], 2)) for name in ("past_key", "present_key"))
        rows = b.op("Slice", b.const(near[None, None], np.bool_), past, total, b.ints(2))
        return b.op("Where", b.op("Slice", rows, b.ints(0), total, b.ints(3)), value, b.const(-1e9))

    found, _, _ = mask_of(decoder(mask="none", finish=from_table))
    assert (found["kind"], found["window"]) == ("window", 4)
    assert max(probe["past"] for probe in found["proof"]) == 62


def test_a_mask_given_by_the_caller_is_passed_through():
    def add_input(b, value, names):
        return b.op("Add", value, b.input("bias", ["batch", 1, "sequence", "total"]))

    found, op, _ = mask_of(decoder(mask="none", finish=add_input))
    assert (found["kind"], op.input[5]) == ("other", "bias")


def test_a_mask_of_some_heads_only_is_passed_through():
    def first_head_sees_less(b, value, names):
        past = b.dim(names["past_key"], 2)
        keys = b.op("Range", b.number(0), b.op("Add", past, b.dim("input_ids", 1)), b.number(1))
        late = b.op("Greater", keys, b.number(0))
        first = b.const(np.arange(HEADS).reshape(HEADS, 1, 1) == 0, np.bool_)
        return b.op("Where", b.op("And", late, first), b.const(-np.inf), value)

    found, op, _ = mask_of(decoder(finish=first_head_sees_less))
    assert (found["kind"], attribute(op, "causal")) == ("other", 0)


def test_an_input_of_padding_in_floats_is_cast():
    def hide(b, value, names):
        given = b.input("attention_mask", ["batch", "total"])
        real = b.op("Unsqueeze", b.op("Cast", given, to=TensorProto.BOOL), b.ints(1, 2))
        return b.op("Where", real, value, b.const(-np.inf))

    found, op, graph = mask_of(decoder(finish=hide))
    assert found["kind"] == "causal+padding"
    cast = next(node for node in graph.node if op.input[4] in node.output)
    assert (cast.op_type, list(cast.input)) == ("Cast", ["attention_mask"])


def test_a_mask_that_depends_on_cache_data_is_refused():
    def add_peak(b, value, names):
        return b.op("Add", value, b.op("ReduceMax", names["past_key"], keepdims=0))

    (site,) = kvfuse.inspect(decoder(finish=add_peak)).sites
    assert (site.outcome, "depends on the data of the cache" in site.reason) == ("refused", True)
