"""Decomposed attention: every spelling that exporters use is read, everything almost like it is refused."""

import numpy as np
import onnx
import pytest
from decoder_graphs import HEAD_DIM, HEADS, decoder, merge_heads, repeat_kv, scores, sdpa
from onnx import TensorProto

import kvfuse

SCALES = ("query", "key", "both", "scores_mul", "scores_div")
REPEATS = ("expand", "tile", "gather")


def only_site(model):
    report = kvfuse.rewrite(model)
    assert len(report.sites) == 1
    return report.sites[0], report


def refused(model):
    """The reason, after checking that the model came back byte for byte."""
    before = model.SerializeToString(deterministic=True)
    site, report = only_site(model)
    assert site.outcome == "refused"
    assert report.model.SerializeToString(deterministic=True) == before
    return site.reason


@pytest.mark.parametrize("repeat", REPEATS)
@pytest.mark.parametrize("factor", [0.25, 0.3])
@pytest.mark.parametrize("scale", SCALES)
def test_scale_and_head_expansion_are_read_in_every_spelling(scale, factor, repeat):
    site, _ = only_site(decoder(scale=scale, factor=factor, repeat=repeat))
    assert site.outcome == "fused"
    assert site.details["scale"] == pytest.approx(factor, rel=1e-6)
    assert (site.details["num_heads"], site.details["kv_num_heads"], site.details["head_dim"]) == (4, 2, 8)


def test_a_scale_computed_from_shapes_at_run_time_becomes_a_number():
    site, _ = only_site(decoder(scale="runtime"))
    assert site.details["scale"] == pytest.approx(HEAD_DIM**-0.5, rel=1e-6)


@pytest.mark.parametrize(("kv_heads", "repeat"), [(1, "none"), (1, "concat"), (HEADS, "none")])
def test_one_kv_head_and_as_many_kv_heads_as_heads(kv_heads, repeat):
    site, _ = only_site(decoder(kv_heads=kv_heads, repeat=repeat))
    assert (site.outcome, site.details["kv_num_heads"]) == ("fused", kv_heads)


def test_a_scale_per_head_stays_in_front_of_the_query():
    site, report = only_site(decoder(scale="per_head"))
    assert (site.outcome, site.details["scale"]) == ("fused", 1.0)
    assert any(node.op_type == "Mul" for node in report.model.graph.node)


@pytest.mark.parametrize("repeat", ["tile_wrong", "gather_wrong"])
def test_heads_in_another_order_are_refused_by_the_numbers(repeat):
    assert "does not compute what its description says" in refused(decoder(repeat=repeat))


def test_a_soft_cap_before_the_mask_is_read():
    site, _ = only_site(decoder(softcap="before"))
    assert (site.outcome, site.details["softcap"]) == ("fused", 5.0)


def test_a_soft_cap_after_the_mask_is_refused():
    assert "before the soft cap" in refused(decoder(softcap="after"))


def test_a_mask_before_the_scale_is_read_when_it_hides_for_good():
    site, _ = only_site(decoder(scale="after_mask", mask_form="add_lowest"))
    assert (site.outcome, site.mask["kind"]) == ("fused", "causal")


def test_a_bias_before_the_scale_is_refused():
    assert "before they are scaled" in refused(decoder(scale="after_mask", mask="alibi"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_op_has_the_type_of_the_graph(dtype):
    _, report = only_site(decoder(dtype=dtype, guard=True))
    op = next(node for node in report.model.graph.node if node.op_type == "QuantizedKvSdpa")
    assert not any(node.op_type == "Cast" and node.output[0] in op.input for node in report.model.graph.node)


def read_by(name):
    """Adds a reader of the named value that ends in a graph output."""

    def touch(b, names):
        b.output(b.op("ReduceSum", names[name], keepdims=0), "seen", [])

    return touch


@pytest.mark.parametrize(
    "name",
    ["past_key", "past_value", "present_key", "present_value", "keys", "values", "raw", "scores", "weights"],
)
def test_another_reader_of_any_link_refuses_the_site(name):
    reason = refused(decoder(touch=read_by(name)))
    assert "also read by" in reason


@pytest.mark.parametrize("name", ["query", "key", "value", "y"])
def test_another_reader_of_what_stays_is_fine(name):
    site, report = only_site(decoder(touch=read_by(name)))
    assert site.outcome == "fused"
    assert [output.name for output in report.model.graph.output] == ["seen", "logits"]


def test_probabilities_that_are_an_output_refuse_the_site():
    def touch(b, names):
        b.outputs.append(onnx.helper.make_tensor_value_info(names["weights"], TensorProto.FLOAT, None))

    assert "the attention probabilities" in refused(decoder(touch=touch))


def variant(change):
    """An attention like sdpa whose names pass through `change` after the caches are joined."""

    def layer(b, names, options):
        names["present_key"] = b.op("Concat", names["past_key"], names["key"], axis=2)
        names["present_value"] = b.op("Concat", names["past_value"], names["value"], axis=2)
        keys, values = names["present_key"], names["present_value"]
        keys, values = change(b, names, keys, values)
        names["keys"] = repeat_kv(b, keys, options["repeat"], options["kv_heads"])
        names["values"] = repeat_kv(b, values, options["repeat"], options["kv_heads"])
        weights = b.op("Softmax", scores(b, names, options), axis=-1)
        y = b.op("MatMul", weights, names["values"])
        return merge_heads(b, y), names["present_key"], names["present_value"]

    return layer


def test_new_tokens_before_the_cache_are_refused():
    def layer(b, names, options):
        swapped = {"past_key": names["key"], "key": names["past_key"]}
        return sdpa(b, {**names, **swapped}, {**options, "mask": "none"})

    assert "before the cache" in refused(decoder(layer=layer))


def test_a_scaled_value_is_refused():
    layer = variant(lambda b, names, keys, values: (keys, b.op("Mul", values, b.const(0.5))))
    assert "is multiplied by" in refused(decoder(layer=layer))


def test_an_attention_that_reads_the_newest_tokens_only_is_refused():
    def newest(b, names, keys, values):
        cut = (b.ints(-64), b.ints(2**31), b.ints(2), b.ints(1))
        return b.op("Slice", keys, *cut), b.op("Slice", values, *cut)

    assert "for 300009 tokens; expected all of them" in refused(decoder(layer=variant(newest), mask="none"))


def test_a_slice_that_keeps_everything_is_fine():
    def all_of_it(b, names, keys, values):
        return b.op("Slice", keys, b.ints(0), b.ints(2**31), b.ints(2), b.ints(1)), values

    site, _ = only_site(decoder(layer=variant(all_of_it)))
    assert site.outcome == "fused"


def test_a_reordered_batch_is_refused():
    def reversed_batch(b, names, keys, values):
        last = b.op("Sub", b.dim(keys, 0), b.number(1))
        order = b.op("Range", last, b.number(-1), b.number(-1))
        return b.op("Gather", keys, order, axis=0), b.op("Gather", values, order, axis=0)

    assert "does not compute" in refused(decoder(layer=variant(reversed_batch)))


def test_a_query_of_the_last_token_only_is_refused():
    """As where the last layer computes the logits of one token: the op takes as many queries as keys."""

    def layer(b, names, options):
        last = b.op("Slice", names["query"], b.ints(-1), b.ints(2**31), b.ints(2), b.ints(1))
        return sdpa(b, {**names, "query": last}, {**options, "mask": "none"})

    assert "expected it to hold the new tokens" in refused(decoder(layer=layer))


def test_a_query_made_of_the_cache_is_refused():
    def layer(b, names, options):
        keys = b.op("Concat", names["past_key"], names["key"], axis=2)
        return sdpa(b, {**names, "query": b.op("Neg", keys)}, {**options, "mask": "none"})

    assert "expected it to hold the new tokens" in refused(decoder(layer=layer, kv_heads=HEADS))


def test_a_cache_that_nothing_is_appended_to_is_refused():
    def layer(b, names, options):
        names["keys"] = repeat_kv(b, names["past_key"], "expand", options["kv_heads"])
        names["values"] = repeat_kv(b, names["past_value"], "expand", options["kv_heads"])
        weights = b.op("Softmax", scores(b, names, {**options, "mask": "none"}), axis=-1)
        y = b.op("MatMul", weights, names["values"])
        return merge_heads(b, y), b.op("Identity", names["past_key"]), b.op("Identity", names["past_value"])

    assert "nothing is appended to it" in refused(decoder(layer=layer))


def test_a_fixed_buffer_is_refused():
    def written(b, names, keys, values):
        at = b.ints(0, 0, 0, 0)
        wide = b.op("Reshape", at, b.ints(1, 4))
        return b.op("ScatterND", keys, wide, b.const([1.0])), values

    assert "fixed buffer" in refused(decoder(layer=variant(written)))


def test_a_factor_on_the_probabilities_is_refused():
    def layer(b, names, options):
        y, key, value = sdpa(b, names, options)
        node = next(node for node in b.nodes if node.output[0] == names["y"])
        node.input[0] = b.op("Mul", names["weights"], b.const(np.ones((HEADS, 1, 1))))
        b.nodes.insert(b.nodes.index(node), b.nodes.pop())
        return y, key, value

    assert "the attention probabilities go to Mul" in refused(decoder(layer=layer))


def test_a_present_that_the_caller_never_gets_is_refused():
    model = decoder()
    del model.graph.output[1]
    assert "is not a graph output" in refused(model)


def test_two_attentions_on_one_cache_are_both_refused():
    shared = {}

    def layer(b, names, options):
        if shared:
            names |= {side: shared[side] for side in ("past_key", "past_value")}
        shared.update(names)
        return sdpa(b, names, options)

    report = kvfuse.rewrite(decoder(layers=2, layer=layer))
    assert [site.outcome for site in report.sites] == ["refused", "refused"]
    assert all("is read by 2 attentions" in site.reason for site in report.sites)


def test_a_router_is_no_attention():
    def touch(b, names):
        b.output(b.op("Softmax", b.op("MatMul", names["x"], b.weight(16, 4)), axis=-1), "router", None)

    report = kvfuse.inspect(decoder(touch=touch))
    assert (len(report.sites), len(report.seen)) == (1, 0)


def test_an_attention_without_a_cache_is_seen_but_no_site():
    def touch(b, names):
        keys = b.op("Transpose", names["key"], perm=[0, 1, 3, 2])
        weights = b.op("Softmax", b.op("MatMul", names["key"], keys), axis=-1)
        b.output(b.op("MatMul", weights, names["value"]), "encoder", None)

    report = kvfuse.inspect(decoder(touch=touch))
    assert [site.outcome for site in report.sites] == ["fused"]
    assert "does not come from a Concat with a cache input" in report.seen[0].reason
