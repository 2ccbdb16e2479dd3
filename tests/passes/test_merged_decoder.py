"""Decoders behind If(use_cache): both branches get one state per layer, or the layer stays as it is."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from decoder_graphs import HEAD_DIM, HEADS, WIDTH
from merged_graphs import merged

import kvfuse

SCHEDULE = (5, 1, 3, 1)


def conversation(session, *, seed=0, batch=2, encoder_seed=0, schedule=SCHEDULE, use_cache=lambda n: n > 0):
    """The logits of each run, the caches fed back, the way optimum calls a merged decoder."""
    ids = np.random.default_rng(seed).integers(0, 32, (batch, sum(schedule)))
    encoder = np.random.default_rng(encoder_seed).standard_normal((batch, 6, WIDTH)).astype(np.float32)
    wanted = [value.name for value in session.get_inputs()]
    pasts = {
        name: np.zeros((batch, HEADS, 0 if "decoder" in name else 6, HEAD_DIM), np.float32)
        for name in wanted
        if name.startswith("past.")
    }
    names = [value.name for value in session.get_outputs()]
    rows, start = [], 0
    for number, count in enumerate(schedule):
        feeds = {
            "input_ids": ids[:, start : start + count],
            "encoder": encoder,
            "use_cache": np.array([use_cache(number)]),
        }
        got = session.run(None, {name: feeds[name] for name in feeds if name in wanted} | pasts)
        outputs = dict(zip(names, got, strict=True))
        pasts = {name: outputs[name.replace("past", "present", 1)] for name in pasts}
        rows.append(outputs["logits"])
        start += count
    return np.concatenate(rows, axis=1)


def both(model, folder, sites):
    """(original session, rewritten session, report) in exact mode."""
    source, target = folder / "merged.onnx", folder / "fused.onnx"
    onnx.save(model, source)
    report = kvfuse.rewrite(source, target, n_recent=4096)
    assert len(report.fused) == sites, [site.reason for site in report.sites]
    original = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    return original, kvfuse.InferenceSession(target), report


def assert_same(original, fused, **how):
    expected = conversation(original, **how)
    np.testing.assert_allclose(conversation(fused, **how), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("past_branch", ["then_branch", "else_branch"])
@pytest.mark.parametrize("cross", [False, True])
def test_conversations_one_after_another(cross, past_branch, tmp_path):
    model = merged(cross=cross, past_branch=past_branch)
    # In the else branch, the flag means "first run".
    flag = {} if past_branch == "then_branch" else {"use_cache": lambda number: number == 0}
    original, fused, report = both(model, tmp_path, 2)
    assert [site.layer for site in report.fused] == ["0", "1"]
    assert_same(original, fused, **flag)
    assert_same(original, fused, seed=1, encoder_seed=1, schedule=(2, 1, 1), **flag)
    assert_same(original, fused, seed=2, batch=1, schedule=(1, 4), **flag)


def test_the_branch_with_a_past_may_start_a_conversation_too(tmp_path):
    original, fused, _ = both(merged(), tmp_path, 2)
    assert_same(original, fused, use_cache=lambda number: True)


def test_one_state_per_layer_whichever_branch_runs(tmp_path):
    _, fused, _ = both(merged(), tmp_path, 2)
    conversation(fused)
    assert [len(sequence) for sequence in fused.sequences] == [sum(SCHEDULE)] * 2
    conversation(fused, schedule=(3,))
    assert [len(sequence) for sequence in fused.sequences] == [3, 3]


def test_a_fed_past_length_does_not_reach_the_branch_without_a_past(tmp_path):
    _, fused, _ = both(merged(), tmp_path, 2)
    expected = conversation(fused, schedule=(4,))
    ids = np.random.default_rng(0).integers(0, 32, (2, 4))
    conversation(fused)
    feeds = {"input_ids": ids, "use_cache": np.array([False]), "kv_past_length": np.array([3])}
    np.testing.assert_array_equal(fused.run(["logits"], feeds)[0], expected)


def test_a_rollback_in_the_branch_with_a_past(tmp_path):
    _, fused, _ = both(merged(), tmp_path, 2)
    whole = conversation(fused)
    ids = np.random.default_rng(0).integers(0, 32, (2, sum(SCHEDULE)))
    feeds = {"input_ids": ids[:, 6:], "use_cache": np.array([True]), "kv_past_length": np.array([6])}
    np.testing.assert_allclose(fused.run(["logits"], feeds)[0], whole[:, 6:], rtol=0, atol=2e-5)


def subgraphs(model):
    choice = next(node for node in model.graph.node if node.op_type == "If")
    return {entry.name: entry.g for entry in choice.attribute}


def test_cross_attention_stays_byte_for_byte(tmp_path):
    # Once through the reader and writer, which leave out empty fields.
    model = ir.to_proto(ir.from_proto(merged(cross=True)))
    _, _, report = both(model, tmp_path, 2)
    refused = [site for site in report.sites if site.outcome == "refused"]
    assert len(refused) == 2
    assert all("nothing is appended to it" in site.reason for site in refused)
    saved = onnx.load(tmp_path / "fused.onnx")
    onnx.checker.check_model(saved)
    assert [v.name for v in saved.graph.input if v.name.startswith("past")] == [
        f"past.{i}.encoder.{side}" for i in (0, 1) for side in ("key", "value")
    ]
    for name, before in subgraphs(model).items():
        after = {node.output[0]: node for node in subgraphs(saved)[name].node}
        softmaxes = [node for node in before.node if node.op_type == "Softmax"]
        assert [node.output[0] in after for node in softmaxes] == [False, True] * 2
        kept = [node for node in before.node if node.output[0] in after]
        changed = [node for node in kept if after[node.output[0]] != node]
        # The two that read a fused attention's output have another operand now.
        assert [node.op_type for node in changed] == ["Transpose"] * 2


def test_nothing_of_the_caches_is_left_and_weights_are_shared(tmp_path):
    model = merged()
    both(model, tmp_path, 2)
    saved = onnx.load(tmp_path / "fused.onnx")
    assert [value.name for value in saved.graph.output] == ["logits"]
    assert [node.op_type for node in saved.graph.node] == ["Where", "KvCacheBegin", "If"]
    weights = {name for graph in subgraphs(model).values() for node in graph.node for name in node.input}
    weights &= {tensor.name for tensor in model.graph.initializer}
    assert weights <= {tensor.name for tensor in saved.graph.initializer}
    for graph in subgraphs(saved).values():
        assert sum(node.op_type == "QuantizedKvSdpa" for node in graph.node) == 2
        assert not weights & {tensor.name for tensor in graph.initializer}


def test_the_rewriter_on_its_own_output_changes_nothing(tmp_path):
    both(merged(cross=True), tmp_path, 2)
    report = kvfuse.rewrite(tmp_path / "fused.onnx", tmp_path / "again.onnx")
    assert report.fused == ()
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "fused.onnx").read_bytes()


def test_each_branch_keeps_its_own_scale_and_mask(tmp_path):
    model = merged(fresh={"scale": 0.2, "mask": "none"})
    original, fused, report = both(model, tmp_path, 2)
    assert_same(original, fused)
    assert {entry.get("mask") for entry in report.fused[0].evidence} == {None, "none"}


def refused(model):
    before = model.SerializeToString(deterministic=True)
    report = kvfuse.rewrite(model)
    assert report.fused == ()
    assert report.model.SerializeToString(deterministic=True) == before
    return [site.reason for site in report.sites]


def test_a_fresh_branch_that_attends_to_other_keys_is_refused():
    def negated(b, keys):
        return b.op("Neg", keys)

    reasons = refused(merged(fresh={"change": negated}))
    assert len(reasons) == 2
    assert all("the branch without a past has no attention that fills this cache" in r for r in reasons)


def test_a_fresh_branch_that_attends_to_permuted_heads_is_refused():
    def permuted(b, keys):
        return b.op("Gather", keys, b.ints(3, 2, 1, 0), axis=1)

    reasons = refused(merged(fresh={"change": permuted}))
    assert any("does not compute what its description says" in reason for reason in reasons)


def test_one_layer_that_only_one_branch_has_goes_in_neither(tmp_path):
    def first_only(b, keys):
        negated = getattr(b, "seen", False)
        b.seen = True
        return b.op("Neg", keys) if negated else keys

    model = merged(fresh={"change": first_only})
    original, fused, report = both(model, tmp_path, 1)
    assert [site.outcome for site in report.sites].count("refused") == 1
    assert_same(original, fused)


@pytest.mark.parametrize("op", ["Not", "Identity"])
def test_a_condition_that_is_computed_is_refused_with_the_reason(op):
    reasons = refused(merged(condition=lambda outer: outer.op(op, "use_cache")))
    assert reasons
    assert all("expected one If on a graph input" in reason for reason in reasons)


def test_a_cache_that_both_branches_append_to_is_no_merged_decoder():
    model = merged()
    choice = next(node for node in model.graph.node if node.op_type == "If")
    choice.attribute[1].g.CopyFrom(choice.attribute[0].g)
    assert all("inside a subgraph of a control-flow node" in reason for reason in refused(model))


@pytest.mark.parametrize("broken", ["no else_branch", "outputs", "no branches"])
def test_a_broken_if_ends_in_a_report(broken):
    model = merged()
    choice = next(node for node in model.graph.node if node.op_type == "If")
    if broken == "no branches":
        del choice.attribute[:]
    elif broken == "outputs":
        del choice.attribute[0].g.output[0]
    else:
        del choice.attribute[next(i for i, a in enumerate(choice.attribute) if a.name == "else_branch")]
    assert kvfuse.rewrite(model).fused == ()
