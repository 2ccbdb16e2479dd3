"""Masks that look causal on some inputs only: passed through exactly, or refused; never taken for causal."""

import numpy as np
import pytest
from decoder_graphs import decoder, merge_heads, scores, sdpa
from equivalence import assert_same
from onnx import TensorProto

import kvfuse

SCHEDULES = ((9,), (1,) * 9, (2, 3, 1, 3))


def grid(b, names):
    """Query positions [S, 1] and key positions [T], both absolute."""
    past = b.dim(names["past_key"], 2)
    total = b.op("Add", past, b.dim("input_ids", 1))
    position = b.op("Unsqueeze", b.op("Range", past, total, b.number(1)), b.ints(1))
    return position, b.op("Range", b.number(0), total, b.number(1))


def hide(b, value, visible):
    return b.op("Where", visible, value, b.const(-np.inf))


def prefix_lm(b, value, names):
    position, key = grid(b, names)
    seen = b.op("Or", b.op("LessOrEqual", key, position), b.op("Less", key, b.number(4)))
    return hide(b, value, seen)


def top_left(b, value, names):
    """Query s of this run sees keys 0..s, wherever the run starts: causal without a past only."""
    position, key = grid(b, names)
    row = b.op("Sub", position, b.dim(names["past_key"], 2))
    return hide(b, value, b.op("LessOrEqual", key, row))


def triangle(b, value, names):
    """Trilu of ones [S, T]: the same as top_left in one op."""
    position, key = grid(b, names)
    ones = b.op("GreaterOrEqual", b.op("Add", position, key), b.number(0))
    lower = b.op("Trilu", b.op("Cast", ones, to=TensorProto.INT64), upper=0)
    return hide(b, value, b.op("Cast", lower, to=TensorProto.BOOL))


def after_the_first_run(b, value, names):
    """Everything is visible in a run without a past, causal later."""
    position, key = grid(b, names)
    first = b.op("Equal", b.dim(names["past_key"], 2), b.number(0))
    return hide(b, value, b.op("Or", b.op("LessOrEqual", key, position), first))


def by_tokens(b, value, names):
    """A run with token 7 hides each query's newest neighbour: the mask depends on the ids."""
    position, key = grid(b, names)
    hidden = b.op(
        "ReduceMax", b.op("Cast", b.op("Equal", "input_ids", b.number(7)), to=TensorProto.INT64), keepdims=0
    )
    limit = b.op("Sub", position, hidden)
    seen = b.op("Or", b.op("LessOrEqual", key, limit), b.op("Equal", key, position))
    return hide(b, value, seen)


@pytest.mark.parametrize("mask", [prefix_lm, top_left, triangle, after_the_first_run, by_tokens])
def test_what_is_causal_now_and_then_is_passed_through(mask, tmp_path):
    model = decoder(mask="none", finish=mask)
    report = assert_same(model, tmp_path, sites=1, schedules=SCHEDULES)
    assert (report.fused[0].mask["kind"], report.fused[0].mask["causal"]) == ("other", False)


def test_one_row_of_the_batch_under_another_rule(tmp_path):
    def mask(b, value, names):
        position, key = grid(b, names)
        row = b.op("Range", b.number(0), b.dim("input_ids", 0), b.number(1))
        odd = b.op("Reshape", b.op("Mod", row, b.number(2)), b.ints(-1, 1, 1, 1))
        limit = b.op("Add", position, b.op("Mul", odd, b.number(100)))
        return hide(b, value, b.op("LessOrEqual", key, limit))

    report = assert_same(
        decoder(mask="none", finish=mask), tmp_path, sites=1, batch=2, schedules=((9,), (4, 5))
    )
    assert report.fused[0].mask["kind"] == "other"


@pytest.mark.parametrize("element", [TensorProto.BOOL, TensorProto.FLOAT])
def test_a_plain_graph_input(element, tmp_path):
    def touch(b, value, names):
        b.input("mask", ["batch", 1, "sequence", "total"], element)
        return hide(b, value, "mask") if element == TensorProto.BOOL else b.op("Add", value, "mask")

    def given(start, stop):
        seen = np.random.default_rng(start).random((2, 1, stop - start, stop)) < 0.6
        seen[..., 0] = True
        return seen if element == TensorProto.BOOL else np.where(seen, 0.5, -np.inf).astype(np.float32)

    model = decoder(mask="none", finish=touch)
    report = assert_same(model, tmp_path, sites=1, values={"mask": given}, schedules=SCHEDULES)
    assert report.fused[0].mask["kind"] == "other"


def test_a_mask_from_the_hidden_states_is_passed_through(tmp_path):
    def mask(b, value, names):
        position, key = grid(b, names)
        gate = b.op("Greater", b.op("ReduceMean", names["x"], keepdims=0), b.const(0.0))
        return hide(b, value, b.op("Or", b.op("LessOrEqual", key, position), gate))

    report = assert_same(decoder(mask="none", finish=mask), tmp_path, sites=1, schedules=SCHEDULES)
    assert report.fused[0].mask["kind"] == "other"


def test_a_mask_from_the_cached_keys_is_refused():
    def mask(b, value, names):
        large = b.op("ReduceMax", names["present_key"], b.ints(1, 3), keepdims=0)  # B T
        seen = b.op("Unsqueeze", b.op("Less", large, b.const(9.0)), b.ints(1, 2))
        return hide(b, value, seen)

    model = decoder(mask="none", finish=mask)
    report = kvfuse.rewrite(model)
    assert report.fused == ()
    assert "cache" in report.sites[0].reason


def test_a_rule_that_changes_beyond_the_probes_is_passed_through():
    def mask(b, value, names):
        position, key = grid(b, names)
        late = b.op("GreaterOrEqual", position, b.number(700_000))
        near = b.op("Greater", key, b.op("Sub", position, b.number(5)))
        return hide(
            b, value, b.op("And", b.op("LessOrEqual", key, position), b.op("Or", b.op("Not", late), near))
        )

    report = kvfuse.rewrite(decoder(mask="none", finish=mask))
    assert (report.fused[0].mask["kind"], report.fused[0].mask["window"]) == ("other", -1)


def test_no_mask_at_all_is_not_causal(tmp_path):
    report = assert_same(decoder(mask="none"), tmp_path, sites=1, schedules=SCHEDULES)
    assert (report.fused[0].mask["kind"], report.fused[0].mask["causal"]) == ("none", False)


def test_two_attentions_on_one_cache_are_named_in_the_refusal():
    """One appends and attends, the other attends to the same present: one state cannot be read twice."""

    def layer(b, names, options):
        _, key, value = sdpa(b, names, options)
        second = b.op("Softmax", scores(b, {**names, "query": b.op("Neg", names["query"])}, options), axis=-1)
        other = b.op("MatMul", second, names["values"])
        both = b.op("Add", names["y"], other)
        return merge_heads(b, both), key, value

    model = decoder(layer=layer)
    before = model.SerializeToString(deterministic=True)
    report = kvfuse.rewrite(model)
    assert [site.outcome for site in report.sites] == ["refused", "refused"]
    assert all("is read by 2 attentions" in site.reason for site in report.sites)
    assert report.model.SerializeToString(deterministic=True) == before
