"""com.microsoft MultiHeadAttention: with its own past, and behind a Concat."""

import numpy as np
import pytest
from contrib_graphs import HEAD_DIM, HEADS, KV_HEADS, MS, WIDTH, compare, decoder, steps
from onnx import TensorProto, helper

import kvfuse

CHANNELS = HEADS * HEAD_DIM


def causal(b, past):
    """An additive causal mask [1, 1, S, T] from the length of the cache."""
    cached = b.dim(past[0], 2)
    total = b.op("Add", cached, b.dim("input_ids", 1))
    position = b.op("Unsqueeze", b.op("Range", cached, total, b.number(1)), b.ints(1))
    key = b.op("Unsqueeze", b.op("Range", b.number(0), total, b.number(1)), b.ints(0))
    added = b.op("Where", b.op("LessOrEqual", key, position), b.const(0.0), b.const(-1e9))
    return b.op("Unsqueeze", added, b.ints(0, 1))


def padding(b):
    """int32 [B, T]."""
    return b.op("Cast", "attention_mask", to=TensorProto.INT32)


def lengths(b):
    """int32 [B], the right-padded form of the padding mask."""
    return b.op("Cast", b.op("ReduceSum", "attention_mask", b.ints(1), keepdims=0), to=TensorProto.INT32)


def own_past(*, bias=False, hide=None, added=None, tail=(), outputs=3, **attributes):
    """A layer writer: MultiHeadAttention with past_key and past_value."""

    def layer(b, x, past):
        operands = [b.op("MatMul", x, b.weight(WIDTH, CHANNELS)) for _ in range(3)]
        inputs = [*operands, b.const(b.random.standard_normal(3 * CHANNELS)) if bias else ""]
        inputs += ["" if hide is None else hide(b), "" if added is None else added(b, past), *past, *tail]
        given = {"num_heads": HEADS, "unidirectional": 1, **attributes}
        found = b.op("MultiHeadAttention", *inputs, outputs=outputs, domain=MS, **given)
        if outputs == 4:
            b.output(found[3], "scores", None)
        return found[:3]

    return layer


def behind_concat(*, repeat="expand", bias=False, heads_first=False, double=False, **attributes):
    """A layer writer: Concat with the cache, heads repeated and packed, then MultiHeadAttention."""

    def layer(b, x, past):
        query = b.op("MatMul", x, b.weight(WIDTH, CHANNELS))
        presents, operands = [], []
        for cache in past:
            new = b.op("MatMul", x, b.weight(WIDTH, KV_HEADS * HEAD_DIM))
            new = b.op("Reshape", new, b.ints(0, 0, KV_HEADS, HEAD_DIM))
            presents.append(b.op("Concat", cache, b.op("Transpose", new, perm=[0, 2, 1, 3]), axis=-2))
            repeated = repeat_heads(b, presents[-1], repeat)
            if not heads_first:
                repeated = b.op("Transpose", repeated, perm=[0, 2, 1, 3])
                repeated = b.op("Reshape", repeated, b.ints(0, 0, -1))
            operands.append(repeated)
        if double:
            operands[1] = b.op("Mul", operands[1], b.const(2.0))
        added = b.const(np.zeros(3 * CHANNELS)) if bias else ""
        mask = causal(b, past)
        given = {"num_heads": HEADS, **attributes}
        y = b.op("MultiHeadAttention", query, *operands, added, "", mask, domain=MS, **given)
        return y, *presents

    return layer


def repeat_heads(b, value, form):
    """K heads -> H heads of this module's sizes."""
    group = HEADS // KV_HEADS
    order = np.tile(np.arange(KV_HEADS), group) if form == "wrong" else np.repeat(np.arange(KV_HEADS), group)
    return b.op("Gather", value, b.ints(*order), axis=1)


OWN = {
    "plain": ({}, "causal"),
    "bias": ({"bias": True}, "causal"),
    "not_causal": ({"unidirectional": 0}, "none"),
    "scale": ({"scale": 0.3}, "causal"),
    "causal_by_its_mask": ({"unidirectional": 0, "added": causal}, "causal"),
    "padding": ({"hide": padding}, "causal+padding"),
    "padding_bias": ({"hide": padding, "bias": True, "mask_filter_value": -1e9}, "causal+padding"),
}


@pytest.mark.parametrize("form", OWN)
def test_its_own_past_is_the_original(form, tmp_path):
    options, kind = OWN[form]
    report = compare(decoder(own_past(**options), kv_heads=HEADS), steps([4, 1, 3, 1]), tmp_path)
    assert [(site.pattern, site.mask["kind"]) for site in report.sites] == [
        ("multi_head_attention", kind)
    ] * 2


def test_left_padding_is_the_original(tmp_path):
    def padded():
        hidden = np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
        for feeds, _ in steps([4, 1, 1]):
            extra = feeds["attention_mask"].shape[1] - 4
            feeds["attention_mask"] = np.concatenate([hidden, np.ones((2, extra), np.int64)], axis=1)
            yield feeds, feeds["attention_mask"][:, -feeds["input_ids"].shape[1] :].astype(bool)

    compare(decoder(own_past(hide=padding), kv_heads=HEADS), padded(), tmp_path)


def test_half_precision(tmp_path):
    model = decoder(own_past(bias=True), kv_heads=HEADS, dtype=np.float16)
    compare(model, steps([4, 1, 1]), tmp_path, np.float16)


def test_its_bias_is_added_to_new_tokens_only():
    model = kvfuse.rewrite(decoder(own_past(bias=True), kv_heads=HEADS)).model
    makers = {name: node for node in model.graph.node for name in node.output}
    op = next(node for node in model.graph.node if node.op_type == "QuantizedKvSdpa")
    assert helper.get_node_attr_value(op, "axis") == 1
    assert [makers[makers[name].input[0]].op_type for name in op.input[:3]] == ["Add"] * 3


@pytest.mark.parametrize("heads_first", [False, True])
def test_behind_a_concat_is_the_original(heads_first, tmp_path):
    report = compare(decoder(behind_concat(heads_first=heads_first)), steps([4, 1, 3, 1]), tmp_path)
    site = report.sites[0]
    assert (site.pattern, site.mask["kind"]) == ("multi_head_attention", "causal")
    assert (site.details["num_heads"], site.details["kv_num_heads"]) == (HEADS, KV_HEADS)


REFUSED = {
    "scores": (own_past(outputs=4), HEADS, "returns its scores"),
    "counted_padding": (own_past(hide=lengths), HEADS, "expected [batch, all tokens]"),
    "buffer": (own_past(tail=["length"]), HEADS, "the length of a fixed cache buffer"),
    "top_left": (behind_concat(unidirectional=1), KV_HEADS, "aligns unidirectional to the first key"),
    "cached_bias": (behind_concat(bias=True), KV_HEADS, "adds a bias to the keys and values that are cached"),
    "wrong_heads": (behind_concat(repeat="wrong"), KV_HEADS, "does not compute what its description says"),
    "scaled_value": (behind_concat(double=True), KV_HEADS, "is multiplied by"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_almost_right_is_refused(form):
    layer, kv_heads, reason = REFUSED[form]

    def with_length(b, x, past):
        if form == "buffer":
            b.input("length", [1], TensorProto.INT32)
        return layer(b, x, past)

    report = kvfuse.inspect(decoder(with_length, kv_heads=kv_heads, layers=1))
    (site,) = report.sites
    assert site.outcome == "refused"
    assert reason in site.reason


def test_cross_attention_stays():
    def layer(b, x, past):
        y, key, value = own_past()(b, x, past)
        query = b.op("MatMul", y, b.weight(CHANNELS, CHANNELS))
        cross = [b.input(f"encoder.{side}", ["batch", HEADS, 7, HEAD_DIM]) for side in ("key", "value")]
        return b.op("MultiHeadAttention", query, *cross, domain=MS, num_heads=HEADS), key, value

    report = kvfuse.inspect(decoder(layer, kv_heads=HEADS, layers=1))
    assert [site.outcome for site in report.sites] == ["fused", "refused"]
    assert "nothing is appended to it" in report.refused[0].reason


@pytest.mark.parametrize("shared", [0, 1])
def test_the_form_for_one_token_is_refused(shared):
    def layer(b, x, past):
        operands = [b.op("MatMul", x, b.weight(WIDTH, CHANNELS)) for _ in range(3)]
        return b.op("DecoderMaskedMultiHeadAttention", *operands, "", "", *past, outputs=3, domain=MS,
                    num_heads=HEADS, past_present_share_buffer=shared)  # fmt: skip

    (site,) = kvfuse.inspect(decoder(layer, kv_heads=HEADS, layers=1)).sites
    assert (site.outcome, "on CPU cannot evaluate it" in site.reason) == ("refused", True)
