"""com.microsoft Attention: its projection becomes nodes, its stacked cache one state."""

import json

import numpy as np
import pytest
from contrib_graphs import HEAD_DIM, HEADS, MS, WIDTH, compare, decoder, steps
from onnx import TensorProto

import kvfuse

CHANNELS = HEADS * HEAD_DIM


def padding(b):
    """int32 [B, T]."""
    return b.op("Cast", "attention_mask", to=TensorProto.INT32)


def lengths(b):
    """int32 [B], the right-padded form of the mask."""
    return b.op("Cast", b.op("ReduceSum", "attention_mask", b.ints(1), keepdims=0), to=TensorProto.INT32)


def slopes(b):
    """An attention_bias that depends on the key's absolute position."""
    total = b.dim("attention_mask", 1)
    keys = b.op("Cast", b.op("Range", b.number(0), total, b.number(1)), to=b.element)
    shape = b.op("Concat", b.ints(1, 1), b.vector(b.dim("input_ids", 1)), b.vector(total), axis=0)
    return b.op("Expand", b.op("Mul", keys, b.const(-0.3)), shape)


def attention(*, bias=True, mask=None, added=None, **attributes):
    """A layer writer: com.microsoft Attention with a stacked past."""

    def layer(b, x, past):
        inputs = [x, b.weight(WIDTH, 3 * CHANNELS)]
        inputs += [b.const(b.random.standard_normal(3 * CHANNELS)) if bias else ""]
        inputs += ["" if mask is None else mask(b), *past, "" if added is None else added(b)]
        while inputs[-1] == "":
            inputs.pop()
        given = {"num_heads": HEADS, "unidirectional": 1, **attributes}
        return b.op("Attention", *inputs, outputs=2, domain=MS, **given)

    return layer


def graph(layer, **options):
    return decoder(layer, kv_heads=HEADS, stacked=True, **options)


FORMS = {
    "plain": ({}, "causal"),
    "not_causal": ({"unidirectional": 0}, "none"),
    "scale": ({"scale": 0.3}, "causal"),
    "padding": ({"mask": padding}, "causal+padding"),
    "equal_sizes": ({"qkv_hidden_sizes": [CHANNELS] * 3}, "causal"),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_original(form, tmp_path):
    options, kind = FORMS[form]
    report = compare(graph(attention(**options)), steps([4, 1, 3, 1]), tmp_path)
    assert [(site.pattern, site.mask["kind"]) for site in report.sites] == [("contrib_attention", kind)] * 2


def test_half_precision(tmp_path):
    compare(graph(attention(), dtype=np.float16), steps([4, 1, 1]), tmp_path, np.float16)


def test_the_one_cache_goes_and_metadata_says_where_each_side_was():
    report = kvfuse.rewrite(graph(attention()))
    assert report.dropped["inputs"] == ("past.0", "past.1")
    assert report.dropped["outputs"] == ("present.0", "present.1")
    (text,) = [entry.value for entry in report.model.metadata_props if entry.key == "kvfuse"]
    record = json.loads(text)["caches"][1]
    assert (record["past_key"], record["past_value"]) == ("past.1", "past.1")
    assert (record["present_key"], record["present_value"]) == ("present.1", "present.1")
    assert record["stacked_index"] == [0, 1]


def test_the_shape_of_the_stacked_cache_is_rewired(tmp_path):
    def layer(b, x, past):
        y, present = attention()(b, x, past)
        length = b.op("Cast", b.dim(past[0], 3), to=b.element)
        return b.op("Add", y, length), present

    report = compare(graph(layer), steps([4, 1, 1]), tmp_path)
    assert "P" in report.rewired[0]["dims"]


REFUSED = {
    "attention_bias": ({"added": slopes}, "cannot have both past and attention_bias"),
    "counted_mask": ({"mask": lengths}, "expected [batch, all tokens]"),
    "no_bias": ({"bias": False}, "has no bias"),
    "shared_buffer": ({"past_present_share_buffer": 1}, "writes into a fixed buffer"),
    "rotary": ({"do_rotary": 1}, "rotates inside"),
    "unequal_sizes": ({"qkv_hidden_sizes": [CHANNELS, CHANNELS, CHANNELS // 2]}, "could not be evaluated"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_almost_right_is_refused(form):
    options, reason = REFUSED[form]
    for site in kvfuse.inspect(graph(attention(**options))).sites:
        assert site.outcome == "refused"
        assert reason in site.reason


def test_a_reader_of_the_present_keeps_the_site():
    def layer(b, x, past):
        y, present = attention()(b, x, past)
        b.output(b.op("ReduceSum", present, keepdims=0), "total_of_cache", [])
        return y, present

    (site,) = kvfuse.inspect(graph(layer, layers=1)).sites
    assert (site.outcome, "is also read by" in site.reason) == ("refused", True)


def test_without_a_past_it_is_listed_only():
    def layer(b, x, past):
        weights = [b.weight(WIDTH, 3 * CHANNELS), b.const(np.zeros(3 * CHANNELS))]
        return b.op("Attention", x, *weights, domain=MS, num_heads=HEADS), past[0]

    report = kvfuse.inspect(graph(layer, layers=1))
    assert report.sites == ()
    assert "has no past" in report.seen[0].reason
