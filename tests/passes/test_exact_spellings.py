"""Every spelling of scale, head expansion, cap, bias, window and layout, in exact mode."""

import numpy as np
import pytest
from decoder_graphs import HEAD_DIM, HEADS, decoder, merge_heads, scores, sdpa
from equivalence import assert_same, run

import kvfuse

SCALES = ("query", "key", "both", "scores_mul", "scores_div", "per_head")
EXPANSIONS = ("expand", "tile", "gather", "groups", "none")


def in_groups(b, names, options):
    """Two kv heads as they are, the query's heads in groups: products of five axes."""
    names["present_key"] = b.op("Concat", names["past_key"], names["key"], axis=2)
    names["present_value"] = b.op("Concat", names["past_value"], names["value"], axis=2)
    factor, form = options["factor"], options["scale"]
    by = {
        "query": (factor, 1.0, 1.0),
        "key": (1.0, factor, 1.0),
        "both": (factor**0.5, factor**0.5, 1.0),
        "per_head": (factor * np.arange(1, HEADS + 1).reshape(HEADS, 1, 1), 1.0, 1.0),
    }.get(form, (1.0, 1.0, factor))
    query = b.op("Mul", names["query"], b.const(by[0]))
    query = b.op("Reshape", query, b.ints(0, 2, 2, -1, HEAD_DIM))  # B K G S D
    keys = b.op("Mul", b.op("Unsqueeze", names["present_key"], b.ints(2)), b.const(by[1]))
    raw = b.op("MatMul", query, b.op("Transpose", keys, perm=[0, 1, 2, 4, 3]))  # B K G S T
    raw = b.op("Div", raw, b.const(1 / by[2])) if form == "scores_div" else b.op("Mul", raw, b.const(by[2]))
    raw = b.op("Add", raw, causal(b, names))
    values = b.op("Unsqueeze", names["present_value"], b.ints(2))
    y = b.op("MatMul", b.op("Softmax", raw, axis=-1), values)
    y = b.op("Reshape", y, b.ints(0, HEADS, -1, HEAD_DIM))
    return merge_heads(b, y), names["present_key"], names["present_value"]


def causal(b, names):
    """0 or -inf, [S, T]."""
    past = b.dim(names["past_key"], 2)
    total = b.op("Add", past, b.dim("input_ids", 1))
    position = b.op("Unsqueeze", b.op("Range", past, total, b.number(1)), b.ints(1))
    key = b.op("Range", b.number(0), total, b.number(1))
    return b.op("Where", b.op("LessOrEqual", key, position), b.const(0.0), b.const(-np.inf))


@pytest.mark.parametrize("expansion", EXPANSIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_scale_and_head_expansion(scale, expansion, tmp_path):
    if expansion == "groups":
        model = decoder(scale=scale, factor=0.3, layer=in_groups)
    else:
        kv_heads = 1 if expansion == "none" else 2
        model = decoder(scale=scale, factor=0.3, repeat=expansion, kv_heads=kv_heads)
    report = assert_same(model, tmp_path, sites=1)
    assert report.fused[0].details["scale"] == pytest.approx(1.0 if scale == "per_head" else 0.3, rel=1e-6)


@pytest.mark.parametrize("window", [3, 5])
@pytest.mark.parametrize("dtype_mask", ["add", "where", "add_lowest"])
def test_windows_around_their_edges(window, dtype_mask, tmp_path):
    model = decoder(mask="window", window=window, mask_form=dtype_mask)
    lengths = (window - 1, window, window + 1, 3 * window)
    schedules = [(n,) for n in lengths] + [(1,) * (3 * window), (window - 1, 1, 1, window, 1)]
    report = assert_same(model, tmp_path, sites=1, schedules=schedules)
    assert (report.fused[0].mask["kind"], report.fused[0].mask["window"]) == ("window", window - 1)


def test_alibi_follows_absolute_positions(tmp_path):
    report = assert_same(decoder(mask="alibi", layers=2), tmp_path, sites=2)
    assert [site.mask["kind"] for site in report.fused] == ["other", "other"]


def test_alibi_of_key_positions_alone(tmp_path):
    def key_bias(b, value, names):
        total = b.op("Add", b.dim(names["past_key"], 2), b.dim("input_ids", 1))
        keys = b.op("Cast", b.op("Range", b.number(0), total, b.number(1)), to=1)
        return b.op(
            "Add", value, b.op("Mul", keys, b.const(np.arange(1, HEADS + 1).reshape(HEADS, 1, 1) / 8))
        )

    report = assert_same(decoder(finish=key_bias), tmp_path, sites=1)
    assert report.fused[0].mask["kind"] == "other"


def test_buckets_of_relative_positions(tmp_path):
    def bucket_bias(b, value, names):
        past = b.dim(names["past_key"], 2)
        total = b.op("Add", past, b.dim("input_ids", 1))
        position = b.op("Unsqueeze", b.op("Range", past, total, b.number(1)), b.ints(1))
        distance = b.op("Sub", position, b.op("Range", b.number(0), total, b.number(1)))
        bucket = b.op("Min", b.op("Max", distance, b.number(0)), b.number(7))
        table = b.op("Gather", b.weight(8, HEADS), bucket, axis=0)  # S T H
        return b.op("Add", value, b.op("Unsqueeze", b.op("Transpose", table, perm=[2, 0, 1]), b.ints(0)))

    report = assert_same(decoder(finish=bucket_bias), tmp_path, sites=1)
    assert report.fused[0].mask["kind"] == "other"


def poison(b, names):
    """Values of 1e4 for token 20; a key that is masked must not let one through."""
    big = b.op("Cast", b.op("Equal", "input_ids", b.number(20)), to=1)
    big = b.op("Unsqueeze", b.op("Mul", big, b.const(1e4)), b.ints(1, 3))
    names["value"] = b.op("Add", names["value"], big)


@pytest.mark.parametrize("mask_form", ["add", "where"])
def test_a_soft_cap_before_the_mask_lets_no_masked_value_through(mask_form, tmp_path):
    def layer(b, names, options):
        poison(b, names)
        return sdpa(b, names, options)

    model = decoder(softcap="before", mask_form=mask_form, layer=layer, factor=3.0)
    report = assert_same(model, tmp_path, sites=1)
    assert report.fused[0].details["softcap"] == pytest.approx(5.0)
    (outputs,) = run(kvfuse.InferenceSession(tmp_path / "fused.onnx"), (9,), 2)
    largest = np.abs(outputs["logits"]).max(axis=-1)
    assert largest[:, :7].max() < 100 < largest[1, 7:].min()  # token 20 is the eighth of the second row


LAYOUTS = {"BSHD": 1, "SBHD": 0, "BHDS": 3}


def in_layout(layout):
    """Caches of another axis order; the attention itself in [B, H, S, D]."""
    to_cache = {"BSHD": [0, 2, 1, 3], "SBHD": [2, 0, 1, 3], "BHDS": [0, 1, 3, 2]}[layout]
    back = {"BSHD": [0, 2, 1, 3], "SBHD": [1, 2, 0, 3], "BHDS": [0, 1, 3, 2]}[layout]
    shape = {"BSHD": ["batch", "past", HEADS, HEAD_DIM], "SBHD": ["past", "batch", HEADS, HEAD_DIM],
             "BHDS": ["batch", HEADS, HEAD_DIM, "past"]}[layout]  # fmt: skip

    def layer(b, names, options):
        for side in ("key", "value"):
            past = b.input(f"past.9.{side}", shape)
            new = b.op("Transpose", names[side], perm=to_cache)
            names[f"present_{side}"] = b.op("Concat", past, new, axis=LAYOUTS[layout])
            b.output(names[f"present_{side}"], f"present.9.{side}", [None] * 4)
            names[f"{side}s"] = b.op("Transpose", names[f"present_{side}"], perm=back)
            names[f"past_{side}"] = past
        names["keys"], names["values"] = names["keys"], names["values"]
        y = b.op(
            "MatMul", b.op("Softmax", scores(b, names, {**options, "mask": "none"}), axis=-1), names["values"]
        )
        return merge_heads(b, y), names["present_key"], names["present_value"]

    return layer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_layouts_where_batch_new_tokens_and_heads_are_equally_many(layout, tmp_path):
    model = decoder(kv_heads=HEADS, layer=in_layout(layout))
    # The plain cache of the builder is not used here: its input and outputs go.
    keep = [value for value in model.graph.input if not value.name.startswith("past.0")]
    del model.graph.input[:]
    model.graph.input.extend(keep)
    out = [value for value in model.graph.output if not value.name.startswith("present.0")]
    del model.graph.output[:]
    model.graph.output.extend(out)
    nodes = [node for node in model.graph.node if not node.output[0].startswith("present.0")]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert_same(model, tmp_path, sites=1, batch=HEADS, schedules=((HEADS, HEADS, 1), (1,) * 6))


def holes(start, stop):
    """int64 [2, T]: the first row padded on the left, the second with holes, its newest token too."""
    real = np.ones((2, 9), np.int64)
    real[0, :3] = 0
    real[1, [1, 4, 8]] = 0
    return real[:, :stop]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("mask_form", ["add", "where"])
def test_padding_with_holes_and_rows_that_see_nothing(mask_form, window, tmp_path):
    mask = "causal+padding" if window is None else "window+padding"
    model = decoder(mask=mask, window=window or 3, mask_form=mask_form, guard=True, layers=2)
    report = assert_same(model, tmp_path, sites=2, values={"attention_mask": holes})
    assert report.fused[0].mask["padding_input"] == "attention_mask"


def refusal(model):
    before = model.SerializeToString(deterministic=True)
    report = kvfuse.rewrite(model)
    assert report.fused == ()
    assert report.model.SerializeToString(deterministic=True) == before
    return " / ".join(site.reason for site in (*report.sites, *report.seen))


def test_one_tensor_of_keys_and_values_is_refused():
    """StarCoder: keys and values side by side in one cache, split after the Concat."""

    def layer(b, names, options):
        past = b.input("past.9.both", ["batch", "past", HEADS * 2 * HEAD_DIM])
        both = b.op("Concat", names["key"], names["value"], axis=3)
        flat = b.op("Reshape", b.op("Transpose", both, perm=[0, 2, 1, 3]), b.ints(0, 0, -1))
        present = b.op("Concat", past, flat, axis=1)
        b.output(present, "present.9.both", ["batch", "all", HEADS * 2 * HEAD_DIM])
        split = b.op("Transpose", b.op("Reshape", present, b.ints(0, 0, HEADS, -1)), perm=[0, 2, 1, 3])
        names["keys"], names["values"] = b.op("Split", split, outputs=2, axis=3, num_outputs=2)
        weights = b.op("Softmax", scores(b, names, {**options, "mask": "none"}), axis=-1)
        return (
            merge_heads(b, b.op("MatMul", weights, names["values"])),
            names["past_key"],
            names["past_value"],
        )

    assert "does not come from a Concat with a cache input but from Split" in refusal(
        decoder(kv_heads=HEADS, layer=layer)
    )


def test_scores_of_cached_and_new_keys_apart_are_refused():
    """Gemma: Softmax over Concat(Q K_cache, Q K_new), then one product for each part."""

    def layer(b, names, options):
        both = []
        for key in (names["past_key"], names["key"]):
            both.append(b.op("MatMul", names["query"], b.op("Transpose", key, perm=[0, 1, 3, 2])))
        weights = b.op("Softmax", b.op("Concat", *both, axis=-1), axis=-1)
        lengths = b.op("Concat", *(b.vector(b.dim(names[n], 2)) for n in ("past_value", "value")), axis=0)
        old, new = b.op("Split", weights, lengths, outputs=2, axis=3)
        y = b.op("Add", b.op("MatMul", old, names["past_value"]), b.op("MatMul", new, names["value"]))
        present = [b.op("Concat", names[f"past_{side}"], names[side], axis=2) for side in ("key", "value")]
        return merge_heads(b, y), *present

    assert "go to Split" in refusal(decoder(kv_heads=HEADS, layer=layer))
