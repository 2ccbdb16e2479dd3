"""Mutants of com.microsoft's attentions: refused, or equal to their own original.

KVFUSE_FUZZ multiplies the number of tries (default 1).
"""

import os
import random

import numpy as np
import onnx
import pytest
from contrib_graphs import HEADS, MS, Original, decoder, group_query, ragged, steps
from test_contrib_attention import attention
from test_contrib_attention import padding as stacked_padding
from test_multi_head_attention import behind_concat, causal, own_past, padding

import kvfuse

TRIES = int(os.environ.get("KVFUSE_FUZZ", "1"))


def grown(rng):
    """A random decoder of one of the four forms, and whether it is told its lengths."""
    form = rng.choice(["group_query", "group_query", "own_past", "behind_concat", "stacked"])
    if form == "group_query":
        ids = rng.choice([False, True])
        layer = group_query(
            packed=rng.choice([True, False]), rotary=rng.choice([True, True, False]), position_ids=ids,
            interleaved=rng.choice([0, 1]), channels=rng.choice([16, 32]), sink=rng.choice([False, True]),
            local_window_size=rng.choice([-1, -1, 3]), softcap=rng.choice([0.0, 0.9]),
        )  # fmt: skip
        return decoder(layer, position_ids=ids), ids, True
    if form == "stacked":
        layer = attention(mask=rng.choice([None, stacked_padding]), unidirectional=rng.choice([0, 1]))
        return decoder(layer, kv_heads=HEADS, stacked=True), False, False
    if form == "behind_concat":
        return decoder(behind_concat()), False, False
    layer = own_past(
        bias=rng.choice([False, True]), hide=rng.choice([None, padding]), added=rng.choice([None, causal]),
        unidirectional=rng.choice([0, 1]),
    )  # fmt: skip
    return decoder(layer, kv_heads=HEADS), False, False


def mutate(model, rng):
    """Changes one operand, attribute or edge of an attention, or a constant.

    What tells GroupQueryAttention its lengths and positions stays: onnxruntime reads and writes wherever they
    point, and crashes.
    """
    nodes = model.graph.node
    place = rng.choice([place for place, node in enumerate(nodes) if node.domain == MS])
    node = nodes[place]
    operands = [
        i for i in range(len(node.input)) if node.op_type != "GroupQueryAttention" or i not in (5, 6, 9)
    ]
    kind = rng.choice(["order", "drop", "attribute", "attribute", "edge", "constant"])
    if kind == "order":
        first, second = rng.sample(operands, 2)
        node.input[first], node.input[second] = node.input[second], node.input[first]
    elif kind == "drop":
        node.input[rng.choice(operands)] = ""
    elif kind == "attribute":
        entry = rng.choice(node.attribute)
        if entry.type == onnx.AttributeProto.FLOAT:
            entry.f = rng.choice([0.0, 0.5, 1.0, -1.0, entry.f * 1.01])
        else:
            entry.i = rng.choice([0, 1, 2, 3, 4, 8, -1])
    elif kind == "edge":
        earlier = [name for other in nodes[:place] for name in other.output]
        node.input[rng.choice(operands)] = rng.choice(
            [*earlier, *(value.name for value in model.graph.input)]
        )
    else:
        tensor = rng.choice([t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT])
        array = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array * np.float32(1.5), tensor.name))


@pytest.mark.parametrize("seed", range(60 * TRIES))
def test_a_mutant_is_refused_or_computes_the_same(seed, tmp_path):
    rng = random.Random(seed)
    model, ids, told = grown(rng)
    mutate(model, rng)
    source, target = tmp_path / "mutant.onnx", tmp_path / "fused.onnx"
    onnx.save(model, source)
    report = kvfuse.rewrite(source, target, n_recent=4096)
    if report.refused or not report.fused:
        return  # refused layers keep their inputs and outputs, and with them their arithmetic
    runs = [
        list(steps([4, 3, 1, 1], batch=1, position_ids=ids, offset=1)),
        list(steps([4, 1, 1], position_ids=ids)),
    ]
    if told:
        runs.append(list(ragged([5, 2], 3, ids)))
    for run in runs:
        compare_runs(model, target, run)


def compare_runs(model, target, run):
    """Every step of a run that the mutant itself can do with a finite result."""
    try:
        original = Original(model)
        expected = [original.run(feeds) for feeds, _ in run]
    except Exception:  # an invalid mutant: onnxruntime's errors share no base class
        return
    session = kvfuse.InferenceSession(target)
    known = {value.name for value in session.get_inputs()}
    if any(name.startswith("past") for name in known):
        return  # a layer reads no cache any more and was not even refused
    for (feeds, counts), row in zip(run, expected, strict=True):
        (found,) = session.run(["logits"], {name: a for name, a in feeds.items() if name in known})
        counts = np.ones(row.shape[:2], bool) if counts is None else counts
        if row.ndim != 3 or not np.isfinite(row[counts]).all():
            return
        assert np.abs(found - row)[counts].max() <= 2e-5 * max(1.0, np.abs(row[counts]).max())
