"""Broken and nearly right models: never a crash, and whatever is fused still computes what the original did.

KVFUSE_FUZZ multiplies the number of tries (default 1).
"""

import os
import random

import numpy as np
import onnx
import onnxruntime
import pytest
from decoder_graphs import HEAD_DIM, KV_HEADS, VOCABULARY, decoder

import kvfuse

TRIES = int(os.environ.get("KVFUSE_FUZZ", "1"))
CHUNKS = (5, 1, 4, 1, 2)
SWAPS = {
    "Add": ["Sub", "Mul"], "Sub": ["Add"], "Mul": ["Div", "Add"], "Div": ["Mul"], "And": ["Or", "Xor"],
    "LessOrEqual": ["Less", "GreaterOrEqual", "Equal"], "Greater": ["GreaterOrEqual", "Less"],
    "Tanh": ["Sigmoid"], "Softmax": ["LogSoftmax"],
}  # fmt: skip


def options(rng):
    return {
        "layers": rng.choice([1, 2]),
        "scale": rng.choice(["query", "key", "both", "scores_mul", "scores_div", "runtime"]),
        "repeat": rng.choice(["expand", "tile", "gather"]),
        "mask": rng.choice(
            ["none", "causal", "causal+padding", "window", "alibi", "window+padding", "chunks"]
        ),
        "mask_form": rng.choice(["add", "where", "add_lowest"]),
        "softcap": rng.choice(["", "before"]),
        "guard": rng.choice([True, False]),
    }


def mutate(model, rng):
    """Changes one operator, operand order, attribute, small constant or edge."""
    nodes = model.graph.node
    place = rng.randrange(len(nodes))
    node = nodes[place]
    kind = rng.choice(["operator", "order", "attribute", "constant", "edge"])
    if kind == "operator" and node.op_type in SWAPS:
        node.op_type = rng.choice(SWAPS[node.op_type])
    elif kind == "order" and len(node.input) > 1:
        first, second = rng.sample(range(len(node.input)), 2)
        node.input[first], node.input[second] = node.input[second], node.input[first]
    elif kind == "attribute" and node.attribute:
        attribute = rng.choice(node.attribute)
        if attribute.type == onnx.AttributeProto.INTS:
            shuffled = rng.sample(list(attribute.ints), len(attribute.ints))
            attribute.ints[:] = shuffled
        elif attribute.type == onnx.AttributeProto.INT:
            attribute.i = rng.choice([0, 1, 2, 3, -1, -2])
    elif kind == "edge" and place and node.input:
        earlier = [name for other in nodes[:place] for name in other.output]
        node.input[rng.randrange(len(node.input))] = rng.choice(earlier)
    else:
        tensor = rng.choice(
            [tensor for tensor in model.graph.initializer if np.prod(tensor.dims or [1]) <= 8]
        )
        array = onnx.numpy_helper.to_array(tensor)
        with np.errstate(invalid="ignore"):  # masks hold infinities
            by = rng.choice([-1, 1, 2]) if array.dtype.kind == "i" else rng.choice([0.5, 0.0, 1.01])
            changed = array + by if array.dtype.kind == "i" else array * by
        tensor.CopyFrom(onnx.numpy_helper.from_array(changed.astype(array.dtype), tensor.name))


def logits_of_original(path, layers):
    """Logits by chunk, or None when the mutated model does not run or computes nothing finite."""
    past = {
        f"past.{i}.{side}": np.zeros((2, KV_HEADS, 0, HEAD_DIM), np.float32)
        for i in range(layers)
        for side in ("key", "value")
    }
    rows = []
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        for feeds in chunks({value.name for value in session.get_inputs()}):
            got = dict(zip(names, session.run(None, {**feeds, **past}), strict=True))
            past = {name: got[name.replace("past", "present")] for name in past}
            rows.append(got["logits"])
    except Exception:  # an invalid mutant: onnxruntime's errors share no base class
        return None
    return rows if all(np.isfinite(row).all() and row.ndim == 3 for row in rows) else None


def chunks(wanted):
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, sum(CHUNKS)))
    start = 0
    for count in CHUNKS:
        feeds = {
            "input_ids": ids[:, start : start + count],
            "attention_mask": np.ones((2, start + count), np.int64),
        }
        yield {name: array for name, array in feeds.items() if name in wanted}
        start += count


@pytest.mark.parametrize("seed", range(60 * TRIES))
def test_a_mutant_is_refused_or_computes_the_same(seed, tmp_path):
    rng = random.Random(seed)
    chosen = options(rng)
    model = decoder(**chosen)
    mutate(model, rng)
    source, target = tmp_path / "mutant.onnx", tmp_path / "fused.onnx"
    onnx.save(model, source)
    report = kvfuse.rewrite(source, target, n_recent=4096)
    if len(report.fused) < chosen["layers"]:
        return  # refused layers keep their inputs and outputs, and with them their arithmetic
    expected = logits_of_original(source, chosen["layers"])
    if expected is None:
        return
    session = kvfuse.InferenceSession(target)
    for feeds, row in zip(chunks({value.name for value in session.get_inputs()}), expected, strict=True):
        (found,) = session.run(["logits"], feeds)
        assert np.abs(found - row).max() <= 2e-5 * max(1.0, np.abs(row).max())


@pytest.mark.parametrize("seed", range(60 * TRIES))
def test_flipped_bytes_end_in_a_sentence_or_a_report(seed, tmp_path):
    rng = random.Random(seed)
    data = bytearray(decoder(**options(rng)).SerializeToString())
    for _ in range(rng.choice([1, 2, 5])):
        place = rng.randrange(len(data))
        if rng.random() < 0.7:
            data[place] = rng.randrange(256)
        else:
            del data[place : place + rng.randrange(1, 20)]
    source = tmp_path / "model.onnx"
    source.write_bytes(data)
    found = outcome(source, tmp_path / "out.onnx")
    if isinstance(found, kvfuse.KVFuseError):
        assert "\n" not in str(found)
        assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    else:
        assert all(site.outcome == "fused" or site.reason for site in found.sites)


def outcome(source, target):
    """The report, or the error that kvfuse raised on purpose; anything else is a defect."""
    try:
        return kvfuse.rewrite(source, target)
    except kvfuse.KVFuseError as error:
        return error
