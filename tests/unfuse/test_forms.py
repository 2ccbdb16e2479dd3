"""Each form of attention that the op has, given back as plain ONNX operators."""

import json

import numpy as np
import onnxruntime
import pytest
from float_decoder import TOLERANCE, open_session, presents_of, run, signature
from ops.op_graph import Graph, build_model
from reference import OpConfig, attend

import kvfuse
from models.tiny_decoder import build

RANDOM = np.random.default_rng(0)
TOTAL, SCHEDULE = 12, (5, 1, 1, 3, 2)
FORMS = {
    "sdpa": {},
    "eager": {"style": "eager"},
    "window": {"sliding_window": 4},
    "softcap": {"softcap": 3.0},
    "causal": {"mask": "causal"},
    "no mask": {"mask": "none"},
    "one head per kv head": {"kv_num_heads": 4},
    "f16": {"dtype": "float16"},
    "attention": {"spelling": "attention"},
    "attention f16": {"spelling": "attention", "dtype": "float16"},
    "attention window": {"spelling": "attention", "sliding_window": 4},
    "group query attention": {"spelling": "group_query_attention"},
}


@pytest.mark.parametrize("form", FORMS)
def test_tiny_decoders_come_back(form):
    options = FORMS[form]
    model = build(num_layers=2, **options)
    report = kvfuse.rewrite(model, n_recent=64)
    assert len(report.fused) == 2
    restored = kvfuse.unfuse(report.model)
    original, session = open_session(model), open_session(restored.model)
    assert signature(session) == signature(original)
    arrays = {
        "input_ids": RANDOM.integers(0, 64, (2, TOTAL)),
        "attention_mask": np.ones((2, TOTAL), np.int64),
        "position_ids": np.tile(np.arange(TOTAL), (2, 1)),
    }
    if form in ("sdpa", "eager", "window", "attention"):
        arrays["attention_mask"][1, :2] = 0
    presents = presents_of(restored)
    # onnxruntime's GroupQueryAttention appends several tokens to a cache of one row only.
    schedule = (9, 1, 1, 1) if form == "group query attention" else SCHEDULE
    expected, caches = run(original, presents, arrays, schedule)
    logits, restored_caches = run(session, presents, arrays, schedule)
    real = arrays["attention_mask"].astype(bool)
    limit = TOLERANCE[options.get("dtype", "float32")] * max(1.0, float(np.abs(expected).max()))
    assert np.abs(logits - expected)[real].max() <= limit
    for name, cache in caches.items():
        assert (restored_caches[name].dtype, restored_caches[name].shape) == (cache.dtype, cache.shape)


# The order of the axes of the key's and of the value's cache, and the permutations from B, K, T, D.
LAYOUTS = {
    "BHSD": (0, 1, 2, 3),
    "BSHD": (0, 2, 1, 3),
    "SBHD": (2, 0, 1, 3),
    "BHDS": (0, 1, 3, 2),
    "BSC": None,
}
B, H, K, D, V = 2, 4, 2, 8, 6


def as_layout(rows, layout):
    """[B, K, T, D] in another layout."""
    if layout == "BSC":
        return rows.transpose(0, 2, 1, 3).reshape(rows.shape[0], rows.shape[2], rows.shape[1] * rows.shape[3])
    return rows.transpose(LAYOUTS[layout])


def record(layouts, config, stacked):
    names = ("past", "past") if stacked else ("past_key", "past_value")
    return {
        "layer": config.layer,
        "past_key": names[0],
        "past_value": names[1],
        "present_key": "present" if stacked else "present_key",
        "present_value": "present" if stacked else "present_value",
        "dtype": "float",
        "op_dtype": "float",
        "num_heads": H,
        "kv_num_heads": K,
        "head_dim": D,
        "value_head_dim": V if not stacked else D,
        "key_layout": layouts[0],
        "value_layout": layouts[1],
    }


def restore(config, optional=(), layouts=("BHSD", "BHSD"), stacked=False, opset=18):
    """A model of one node, as if rewritten from a graph with such caches, given back."""
    model = build_model(Graph(layers=(config,), optional=optional, uniform=True))
    model.opset_import[0].version = opset
    entry = model.metadata_props.add()
    entry.key, entry.value = "kvfuse", json.dumps({"caches": [record(layouts, config, stacked)]})
    restored = kvfuse.unfuse(model).model
    return onnxruntime.InferenceSession(restored.SerializeToString(), providers=["CPUExecutionProvider"])


def check(config, layouts=("BHSD", "BHSD"), stacked=False, opset=18, **optional):
    """Chunks through the restored graph against the reference over the whole history."""
    width = D if stacked else V
    rng = np.random.default_rng(1)
    query = rng.standard_normal((B, H, TOTAL, D)).astype(np.float32)
    key, value = (rng.standard_normal((B, K, TOTAL, size)).astype(np.float32) for size in (D, width))
    expected = attend(config, query, key, value, **optional)
    session = restore(config, tuple(optional), layouts, stacked, opset)
    empty = [as_layout(rows[:, :, :0], layout) for rows, layout in zip((key, value), layouts, strict=True)]
    caches = (
        {"past": np.stack(empty)} if stacked else dict(zip(("past_key", "past_value"), empty, strict=True))
    )
    start = 0
    for count in SCHEDULE:
        part = slice(start, start + count)
        rows = [array[:, :, part] for array in (query, key, value)]
        feeds = {"query": rows[0], "key": rows[1], "value": rows[2], **caches}
        if config.axis == 1:
            feeds |= {name: feeds[name].transpose(0, 2, 1, 3) for name in ("query", "key", "value")}
        if "key_padding" in optional:
            feeds["key_padding"] = optional["key_padding"]  # more columns than tokens: the first ones count
        if "attention_bias" in optional:
            feeds["attention_bias"] = optional["attention_bias"][..., part, : start + count]
        if "head_sink" in optional:
            feeds["head_sink"] = optional["head_sink"]
        names = [output.name for output in session.get_outputs()]
        got = dict(zip(names, session.run(None, feeds), strict=True))
        output = got["output_0"].transpose(0, 2, 1, 3) if config.axis == 1 else got["output_0"]
        np.testing.assert_allclose(output, expected[:, :, part], atol=2e-6)
        assert got["past_length"] == start
        assert got["past_lengths"].tolist() == [start] * B
        caches = {name: got[name.replace("past", "present")] for name in caches}
        start += count
    kept = [as_layout(rows, layout) for rows, layout in zip((key, value), layouts, strict=True)]
    for found, rows in zip(caches["past"] if stacked else caches.values(), kept, strict=True):
        np.testing.assert_array_equal(found, rows)


def exact(**attributes):
    return OpConfig(layer="0", n_recent=4096, **attributes)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("layouts", list(zip(LAYOUTS, [*LAYOUTS][2:] + [*LAYOUTS][:2], strict=True)))
def test_caches_come_back_in_their_layout(layouts, axis):
    check(exact(axis=axis, causal=1), layouts)


def test_a_stacked_cache_comes_back_stacked():
    check(exact(causal=1), stacked=True)


ATTRIBUTES = {
    "plain": {},
    "causal": {"causal": 1},
    "window": {"causal": 1, "window_left": 2},
    "window without causal": {"window_left": 0},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 0.7, "scale": 2.0, "causal": 1},
}
PADDING = np.ones((B, TOTAL + 3), np.int64)
PADDING[0, :4], PADDING[1, 7] = 0, 0
BIAS = np.random.default_rng(2).standard_normal((B, H, TOTAL, TOTAL)).astype(np.float32)
BIAS[0, 1, 2] = -np.inf
BIAS[:, :, :, 0] = -np.inf
EXTRAS = {
    "nothing": {},
    "padding": {"key_padding": PADDING},
    "bias": {"attention_bias": BIAS},
    "sink": {"head_sink": np.array([0.5, -1.0, 3.0, 0.0], np.float32)},
    "all": {
        "key_padding": PADDING,
        "attention_bias": BIAS,
        "head_sink": np.array([0.5, -1.0, 3.0, 0.0], np.float32),
    },
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("form", ATTRIBUTES)
def test_every_attribute_and_input_means_the_same(form, extra):
    check(exact(**ATTRIBUTES[form]), **EXTRAS[extra])


@pytest.mark.parametrize("opset", [13, 14, 17, 21, 22, 23])
def test_the_operators_are_those_of_the_models_opset(opset):
    check(exact(causal=1, window_left=3, softcap=1.5), opset=opset, **EXTRAS["all"])


def test_one_kv_head_per_query_head_needs_no_expansion():
    model = build(kv_num_heads=4)
    restored = kvfuse.unfuse(kvfuse.rewrite(model).model).model
    assert "Expand" not in {node.op_type for node in restored.graph.node if node.name.startswith("kvfuse.")}


def test_masks_are_made_once_for_all_layers():
    restored = kvfuse.unfuse(kvfuse.rewrite(build(num_layers=3, mask="causal")).model).model
    ops = [node.op_type for node in restored.graph.node]
    assert (ops.count("LessOrEqual"), ops.count("Softmax")) == (1, 3)
