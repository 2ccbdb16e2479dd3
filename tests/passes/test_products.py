"""Products of query, key and value as Einsum, with folded or grouped heads, and sinks behind the scores."""

import numpy as np
import pytest
from decoder_graphs import HEAD_DIM, HEADS, decoder, merge_heads, repeat_kv
from equivalence import assert_same
from test_exact_spellings import causal

import kvfuse


def reason(model):
    """The reason of the only site, after checking that the model came back byte for byte."""
    before = model.SerializeToString(deterministic=True)
    report = kvfuse.rewrite(model)
    assert [site.outcome for site in report.sites] == ["refused"]
    assert report.model.SerializeToString(deterministic=True) == before
    return report.sites[0].reason


def joined(b, names):
    names["present_key"] = b.op("Concat", names["past_key"], names["key"], axis=2)
    names["present_value"] = b.op("Concat", names["past_value"], names["value"], axis=2)
    return names["present_key"], names["present_value"]


PERMS = {"bhqd": [0, 1, 2, 3], "bqhd": [0, 2, 1, 3], "qbhd": [2, 0, 1, 3], "bhdq": [0, 1, 3, 2]}


def einsum(scores="{q},bhkd->bhqk", query="bhqd", product="bhqk,bhkd->bhqd", swapped=False, back=None):
    """Attention by Einsum; `back` brings the product to [B, H, S, D]."""

    def layer(b, names, options):
        present = joined(b, names)
        operand = b.op("Transpose", names["query"], perm=PERMS[query])
        operands = (present[0], operand) if swapped else (operand, present[0])
        raw = b.op("Einsum", *operands, equation=scores.format(q=query))
        raw = b.op("Add", b.op("Mul", raw, b.const(0.3)), causal(b, names))
        y = b.op("Einsum", b.op("Softmax", raw, axis=-1), present[1], equation=product)
        y = y if back is None else b.op("Transpose", y, perm=back)
        return merge_heads(b, y), *present

    return decoder(layer=layer, kv_heads=HEADS)


@pytest.mark.parametrize("query", PERMS)
def test_an_einsum_reads_the_query_in_any_layout(query, tmp_path):
    assert_same(einsum(query=query), tmp_path, sites=1)


def test_an_einsum_names_its_operands_by_letters_and_not_by_order(tmp_path):
    assert_same(einsum(scores="bhkd,bhqd->bhqk", swapped=True), tmp_path, sites=1)
    assert_same(einsum(scores="n m j c , nmtc -> nmjt", product="nmjt,nmtc->nmjc"), tmp_path, sites=1)


def test_an_einsum_writes_the_output_sequence_first(tmp_path):
    assert_same(einsum(product="bhqk,bhkd->bqhd", back=[0, 2, 1, 3]), tmp_path, sites=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"scores": "bhqd,bhkd->bhqk", "product": "bhqk,bhkd->qbhd", "back": [1, 2, 0, 3]},
            "gives axes SBHD",
        ),
        ({"scores": "bhqd,bhkd->hbqk", "product": "hbqk,bhkd->bhqd"}, "an operand of axes HBSD"),
        ({"scores": "bhqd,bhkd->bqhk", "product": "bqhk,bhkd->bhqd"}, ""),
        ({"scores": "...qd,...kd->...qk"}, "expected two operands"),
        ({"product": "bhqk,bhkd->bhdq", "back": [0, 1, 3, 2]}, "gives axes BHDS"),
    ],
)
def test_einsums_that_are_almost_right(options, words):
    assert words in reason(einsum(**options))


def grouped_einsum(scores="bqkgd,bskd->bkgqs", product="bkgqs,bskd->bqkgd", heads_first=False):
    """Query heads in groups by Einsum, caches [B, T, K, D]."""

    def layer(b, names, options):
        present = [b.op("Transpose", each, perm=[0, 2, 1, 3]) for each in joined(b, names)]
        perm = [0, 1, 2, 3] if heads_first else [0, 2, 1, 3]
        shape = b.ints(0, 2, 2, -1, HEAD_DIM) if heads_first else b.ints(0, 0, 2, 2, HEAD_DIM)
        query = b.op("Reshape", b.op("Transpose", names["query"], perm=perm), shape)
        raw = b.op("Einsum", b.op("Mul", query, b.const(0.3)), present[0], equation=scores)
        weights = b.op("Softmax", b.op("Add", raw, causal(b, names)), axis=-1)
        y = b.op("Einsum", weights, present[1], equation=product)
        y = b.op("Reshape", y, b.ints(0, 0, HEADS * HEAD_DIM))
        return y, names["present_key"], names["present_value"]

    return decoder(layer=layer)


def test_einsums_over_groups_of_heads(tmp_path):
    report = assert_same(grouped_einsum(), tmp_path, sites=1)
    assert (report.fused[0].details["num_heads"], report.fused[0].details["kv_num_heads"]) == (4, 2)
    assert report.fused[0].details["scale"] == pytest.approx(0.3)
    assert_same(grouped_einsum(scores="bkgqd,bskd->bkgqs", heads_first=True), tmp_path, sites=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scores": "bqgkd,bskd->bkgqs"}, "axes BSGKD"),
        ({"product": "bkgqs,bskd->bqgkd"}, "axes BSGKD"),
        ({"scores": "bqkgd,bskd->bgkqs", "product": "bgkqs,bskd->bqgkd"}, "axes BSGKD"),
    ],
)
def test_groups_of_heads_the_wrong_way_round_are_refused(options, words):
    assert words in reason(grouped_einsum(**options))


def folded(b, names, options):
    """Heads folded into the batch around both products, as torch.bmm and torch.baddbmm want them."""
    present = joined(b, names)
    batch = b.vector(b.dim("input_ids", 0))
    rows = b.op("Mul", batch, b.ints(HEADS))
    flat = b.op("Concat", rows, b.ints(-1, HEAD_DIM), axis=0)
    query = b.op("Reshape", names["query"], flat)
    keys, values = (b.op("Reshape", each, flat) for each in present)
    raw = b.op("MatMul", query, b.op("Transpose", keys, perm=[0, 2, 1]))  # B*H S T
    raw = b.op("Mul", raw, b.const(0.3))
    if options["mask_form"] == "bias":
        raw = b.op(
            "Add", raw, b.op("Reshape", alibi(b, names, batch), b.op("Concat", rows, b.ints(1, -1), axis=0))
        )
    if options["mask_form"] in ("row", "broadcast"):  # a number per key, for all heads: [1, T] and [1, 1, T]
        total = b.op("Add", b.dim(names["past_key"], 2), b.dim("input_ids", 1))
        near = b.op("Cast", b.op("Range", b.number(0), total, b.number(1)), to=1)
        axes = (0,) if options["mask_form"] == "row" else (0, 1)
        raw = b.op("Add", raw, b.op("Mul", b.op("Unsqueeze", near, b.ints(*axes)), b.const(0.1)))
    split = b.op("Concat", batch, b.ints(HEADS), b.vector(b.dim("input_ids", 1)), b.ints(-1), axis=0)
    raw = b.op("Add", b.op("Reshape", raw, split), causal(b, names))
    weights = b.op("Softmax", raw, axis=-1)
    together = b.op("Concat", rows, b.vector(b.dim("input_ids", 1)), b.ints(-1), axis=0)
    y = b.op("MatMul", b.op("Reshape", weights, together), values)
    y = b.op("Reshape", y, b.op("Concat", batch, b.ints(HEADS, -1, HEAD_DIM), axis=0))
    return merge_heads(b, y), *present


def alibi(b, names, batch):
    """Slope times key position, [B, H, 1, T]."""
    total = b.op("Add", b.dim(names["past_key"], 2), b.dim("input_ids", 1))
    keys = b.op("Cast", b.op("Range", b.number(0), total, b.number(1)), to=1)
    bias = b.op("Mul", keys, b.const(np.arange(1, HEADS + 1).reshape(1, HEADS, 1, 1) / 8))
    return b.op("Expand", bias, b.op("Concat", batch, b.ints(1, 1, 1), axis=0))


@pytest.mark.parametrize(
    ("form", "kind"), [("plain", "causal"), ("bias", "other"), ("row", "other"), ("broadcast", "other")]
)
def test_heads_folded_into_the_batch(form, kind, tmp_path):
    model = decoder(layer=folded, kv_heads=HEADS, mask_form=form)
    report = assert_same(model, tmp_path, sites=1)
    assert report.fused[0].mask["kind"] == kind


def grouped(perm_back=(0, 3, 1, 2, 4), biased=False):
    """Query [B, S, K, G, D] -> [B, K, G, S, D]; a packed cache [B, T, K*D]; a bias of five axes."""

    def layer(b, names, options):
        present = []
        for side in ("key", "value"):
            past = b.input(f"past.9.{side}", ["batch", "past", 2 * HEAD_DIM])
            flat = b.op(
                "Reshape", b.op("Transpose", names[side], perm=[0, 2, 1, 3]), b.ints(0, 0, 2 * HEAD_DIM)
            )
            present.append(b.op("Concat", past, flat, axis=1))
            b.output(present[-1], f"present.9.{side}", ["batch", "all", 2 * HEAD_DIM])
        names["past_key"] = "past.0.key"
        keys, values = (
            b.op("Transpose", b.op("Reshape", each, b.ints(0, 0, 2, 1, HEAD_DIM)), perm=[0, 2, 3, 1, 4])
            for each in present
        )
        query = b.op(
            "Reshape", b.op("Transpose", names["query"], perm=[0, 2, 1, 3]), b.ints(0, 0, HEADS * HEAD_DIM)
        )
        query = b.op("Reshape", query, b.ints(0, 0, 2, 2, HEAD_DIM))
        query = b.op("Transpose", query, perm=[0, 2, 3, 1, 4])
        raw = b.op("MatMul", query, b.op("Transpose", keys, perm=[0, 1, 2, 4, 3]))
        raw = b.op("Mul", raw, b.const(0.3))
        if biased:
            total = b.op("Gather", b.op("Shape", present[0]), b.number(1), axis=0)
            near = b.op("Cast", b.op("Range", b.number(0), total, b.number(1)), to=1)
            raw = b.op("Add", raw, b.op("Mul", near, b.const(np.arange(4).reshape(1, 2, 2, 1, 1) / 4)))
        y = b.op("MatMul", b.op("Softmax", raw, axis=-1), values)
        y = b.op("Reshape", b.op("Transpose", y, perm=list(perm_back)), b.ints(0, 0, HEADS * HEAD_DIM))
        return y, names["past_key"], names["past_value"]

    model = decoder(layer=layer)
    for kept in (model.graph.input, model.graph.output):
        rest = [value for value in kept if ".0." not in value.name]
        del kept[:]
        kept.extend(rest)
    nodes = [node for node in model.graph.node if ".0." not in node.output[0]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_cache_with_the_heads_in_groups_and_no_mask_is_not_causal(biased, tmp_path):
    # What a query sees depends on the chunks of the original too, so both get the same ones.
    report = assert_same(grouped(biased=biased), tmp_path, sites=1)
    assert report.fused[0].mask["causal"] is False
    assert report.fused[0].mask["kind"] == ("other" if biased else "none")
    assert (report.fused[0].details["num_heads"], report.fused[0].details["kv_num_heads"]) == (4, 2)


def test_groups_in_another_order_are_refused_by_the_numbers():
    assert "does not compute" in reason(grouped(perm_back=(0, 3, 2, 1, 4)))


def with_sink(sink, *, stable=True, cut=(0, -1, 3, 1), axis=-1, shape=(1, HEADS, 1, 1)):
    """gpt-oss: Softmax over the scores and one more column per head, which is cut off again."""

    def layer(b, names, options):
        present = joined(b, names)
        keys, values = (repeat_kv(b, each, "expand", 2) for each in present)
        raw = b.op("MatMul", names["query"], b.op("Transpose", keys, perm=[0, 1, 3, 2]))
        raw = b.op("Add", b.op("Mul", raw, b.const(0.3)), causal(b, names))
        batch, new = b.vector(b.dim("input_ids", 0)), b.vector(b.dim("input_ids", 1))
        column = b.op("Reshape", b.const(sink), b.ints(*shape))
        column = b.op("Expand", column, b.op("Concat", batch, b.ints(HEADS), new, b.ints(1), axis=0))
        logits = b.op("Concat", raw, column, axis=axis)
        if stable:
            logits = b.op("Sub", logits, b.op("ReduceMax", logits, b.ints(-1), keepdims=1))
        weights = b.op("Softmax", logits, axis=-1)
        if cut is not None:
            start, end, along, step = (b.ints(number) for number in cut)
            weights = b.op("Slice", weights, start, end, along, step)
        return merge_heads(b, b.op("MatMul", weights, values)), *present

    return decoder(layer=layer)


@pytest.mark.parametrize("stable", [True, False])
def test_sinks_go_into_the_denominator_only(stable, tmp_path):
    report = assert_same(with_sink(np.array([-1.0, 0.5, 2.0, 20.0]), stable=stable), tmp_path, sites=1)
    assert report.fused[0].mask["kind"] == "causal"


def logits(model, folder):
    import onnx
    from equivalence import run

    onnx.save(model, folder / "model.onnx")
    kvfuse.rewrite(folder / "model.onnx", folder / "fused.onnx", n_recent=4096)
    return run(kvfuse.InferenceSession(folder / "fused.onnx"), (6,), 1)[0]["logits"]


def test_a_sink_of_minus_infinity_is_none_and_a_large_one_shrinks_the_output(tmp_path):
    none = logits(with_sink(np.full(HEADS, -1e30)), tmp_path)
    large = logits(with_sink(np.full(HEADS, 20.0)), tmp_path)
    zero = logits(with_sink(np.full(HEADS, 60.0)), tmp_path)
    assert np.abs(large - zero).max() < np.abs(none - zero).max() / 100


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cut": None}, "or cut off, but not both"),
        ({"cut": (1, 2**31, 3, 1)}, "go to Slice"),
        ({"cut": (0, -1, 2, 1)}, ""),
        ({"shape": (HEADS, 1, 1, 1)}, ""),
    ],
)
def test_sinks_that_are_almost_right_are_refused(options, words):
    found = reason(with_sink(np.arange(HEADS), **options))
    assert words in found


def test_a_column_that_is_computed_is_no_sink():
    def layer(b, names, options):
        present = joined(b, names)
        keys, values = (repeat_kv(b, each, "expand", 2) for each in present)
        raw = b.op("MatMul", names["query"], b.op("Transpose", keys, perm=[0, 1, 3, 2]))
        column = b.op("ReduceSum", names["query"], b.ints(-1), keepdims=1)
        weights = b.op("Softmax", b.op("Concat", raw, column, axis=-1), axis=-1)
        weights = b.op("Slice", weights, b.ints(0), b.ints(-1), b.ints(3), b.ints(1))
        return merge_heads(b, b.op("MatMul", weights, values)), *present

    report = kvfuse.rewrite(decoder(layer=layer))
    assert report.fused == ()
    assert "is not one number per head" in report.sites[0].reason


def test_a_cut_without_a_sink_is_refused():
    def layer(b, names, options):
        present = joined(b, names)
        keys, values = (repeat_kv(b, each, "expand", 2) for each in present)
        raw = b.op("MatMul", names["query"], b.op("Transpose", keys, perm=[0, 1, 3, 2]))
        weights = b.op("Slice", b.op("Softmax", raw, axis=-1), b.ints(0), b.ints(-1), b.ints(3), b.ints(1))
        shorter = b.op("Slice", values, b.ints(0), b.ints(-1), b.ints(2), b.ints(1))
        return merge_heads(b, b.op("MatMul", weights, shorter)), *present

    assert "or cut off, but not both" in reason(decoder(layer=layer))
