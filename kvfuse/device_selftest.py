"""Proves the kernels of one device: its stored bytes against the CPU's, its outputs against NumPy.

Dims: H num_heads, K kv_num_heads, S new tokens, T total tokens, L low-bit tokens, D head_dim; one batch row.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuse.library import native
from kvfuse.provider import GPUS, VARIANTS
from kvfuse.selftest import dequantize, hadamard, plain_attributes

Array = NDArray[np.float64]
State = dict[str, Any]

NUM_HEADS, KV_NUM_HEADS, HEAD_DIM = 4, 2, 64
SCHEDULE = (150, 1, 1, 40, 1, 1)  # tokens of each run: prompts that cross pages, and decode steps

# One rounding of each product and sum of D = 64 terms of |s| <= 8 grows like a random walk to 8 * 8 * 2^-24;
# softmax and a weighted sum of values of |v| <= 5 keep that size.
TOLERANCE = 1e-5

_PLAIN = plain_attributes(HEAD_DIM)
_DEFAULT_PRESET = {"codes": "full", "group_size": 32, "n_recent": 64, "block": 64, "n_sink": 4}
CASES: dict[str, dict[str, Any]] = {
    "4 bits": _PLAIN,
    "8-bit keys": _PLAIN | {"key_bits": 8, "group_size": 64, "n_recent": 16},
    "default preset": _PLAIN | _DEFAULT_PRESET | {"key_center": "block"},
}
# What the device has stored and the CPU would have: compared bit by bit.
_STORED = ("key_codes", "key_scales", "value_codes", "value_scales", "key_means", "sink_key", "sink_value")


def check_device(device: str) -> str | None:
    """Returns None when every case is right on `device`, else one sentence about the first that is not.

    Raises:
        KVFuseError: the device is unknown or does not run here.
        Exception: whatever onnxruntime raises when it cannot load or run the nodes.
    """
    module = native()
    before = module.exact_weights()
    module.set_exact_weights(True)  # the CPU's integer weights would add an error of their own
    try:
        return _first_wrong(device)
    finally:
        module.set_exact_weights(before)


def _first_wrong(device: str) -> str | None:
    tokens = _tokens()
    variants = VARIANTS if device in GPUS else (None,)  # the emulator is slow: its default variant
    for (case, attributes), variant in itertools.product(CASES.items(), variants):
        name = case if variant is None else f"{case}, {variant}"
        expected, _ = _run("cpu", attributes, tokens)
        state, output = _run(device, attributes, tokens, variant)
        for part in _STORED:
            if not np.array_equal(state.get(part, ()), expected.get(part, ())):
                return f"expected the {part} of the CPU, bit by bit ({name}); found others"
        gap = float(np.abs(output - _attention(attributes, *tokens, expected)).max())
        if not gap <= TOLERANCE:
            return f"expected outputs within {TOLERANCE:.0e} of the formula ({name}); found {gap:.2g}"
    return None


def _tokens() -> tuple[Array, Array, Array]:
    """Returns seeded query [H, T, D], key and value [K, T, D], representable in f32; keys have an offset."""
    random = np.random.default_rng(2025)
    shapes = [(heads, sum(SCHEDULE), HEAD_DIM) for heads in (NUM_HEADS, KV_NUM_HEADS, KV_NUM_HEADS)]
    query, key, value = (random.standard_normal(s, np.float32) for s in shapes)
    key += random.standard_normal((KV_NUM_HEADS, 1, HEAD_DIM), np.float32)
    return query.astype(np.float64), key.astype(np.float64), value.astype(np.float64)


def _run(
    device: str,
    attributes: dict[str, Any],
    tokens: tuple[Array, Array, Array],
    variant: str | None = None,
) -> tuple[State, Array]:
    """Runs the node over SCHEDULE; returns the layer's state and the outputs [H, T, D]."""
    from kvfuse.session import InferenceSession

    session = InferenceSession(two_node_model(attributes), device=device, variant=variant)
    start, rows = 0, []
    for count in SCHEDULE:
        chunk = [np.float32(a[np.newaxis, :, start : start + count]) for a in tokens]
        rows.append(session.run(["output"], dict(zip(("query", "key", "value"), chunk, strict=True)))[0][0])
        start += count
    state = native().dump_layer(session.sequences[0].id, attributes["layer"])
    return state, np.concatenate(rows, axis=1)


def _attention(attributes: dict[str, Any], query: Array, key: Array, value: Array, state: State) -> Array:
    """Returns the op's formula in f64 [H, T, D]: each query sees its window exactly, the rest as stored."""
    length, group = query.shape[1], NUM_HEADS // KV_NUM_HEADS
    rotation = hadamard(HEAD_DIM)
    position, token = np.arange(length)[:, np.newaxis], np.arange(length)
    block = attributes["block"]
    exact = token < attributes["n_sink"]
    if attributes["n_recent"] or block > 1:
        exact = exact | ((token // block + 1) * block > position - attributes["n_recent"] + 1)
    exact = np.broadcast_to(exact, (length, length))

    low_key = np.zeros_like(key)
    low_value = np.zeros_like(value)
    stored = state["encoded_end"]
    low_key[:, :stored] = _decode(state, "key", attributes["key_bits"])
    low_value[:, :stored] = _decode(state, "value", attributes["value_bits"]) @ rotation
    low_query = dequantize(query @ rotation, limit=127)
    keys, values = (np.repeat(rows, group, axis=0) for rows in (key, value))
    low_keys, low_values = (np.repeat(rows, group, axis=0) for rows in (low_key, low_value))

    low_scores = low_query @ low_keys.transpose(0, 2, 1)
    if "key_means" in state:
        means = np.repeat(np.repeat(state["key_means"].astype(np.float64), block, axis=1), group, axis=0)
        low_scores[:, :, :stored] += query @ means[:, :stored].transpose(0, 2, 1)
    scores = np.where(exact, query @ keys.transpose(0, 2, 1), low_scores) * attributes["scale"]
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.where(exact, weights, 0) @ values + np.where(exact, 0, weights) @ low_values)


def _decode(state: State, side: str, bits: int) -> Array:
    """Returns the stored rows of one side, still rotated [K, L, D]."""
    packed = state[f"{side}_codes"]
    if bits == 8:
        codes = packed.view(np.int8).astype(np.float64)
    else:  # the even channel is in the low nibble
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], HEAD_DIM)
        codes = ((nibbles.astype(np.int64) ^ 8) - 8).astype(np.float64)
    scales: Array = state[f"{side}_scales"].astype(np.float64)
    return np.asarray(codes * np.repeat(scales, HEAD_DIM // scales.shape[-1], axis=-1))


def two_node_model(
    attributes: dict[str, Any],
    num_heads: int = NUM_HEADS,
    kv_num_heads: int = KV_NUM_HEADS,
    head_dim: int = HEAD_DIM,
) -> bytes:
    """Returns a serialized model of KvCacheBegin and one QuantizedKvSdpa, on the session's own sequence."""
    from onnx import TensorProto, helper

    heads = {"query": num_heads, "key": kv_num_heads, "value": kv_num_heads}
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, count, "sequence", head_dim])
        for name, count in heads.items()
    ]
    states = {"kv_sequence": 0, "kv_past_length": -1}
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT64, [1]) for name in states]
    constants = [
        helper.make_tensor(name, TensorProto.INT64, [1], [default]) for name, default in states.items()
    ]
    shape: list[int | str | None] = [1, num_heads, "sequence", head_dim]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, shape)
    begin = helper.make_node(
        "KvCacheBegin",
        [*states, "query"],
        ["slots", "past_length", "past_lengths"],
        domain="kvfuse",
        fingerprint="selftest",
        layers=attributes["layer"],
        uniform=0,
    )
    attend = helper.make_node("QuantizedKvSdpa", [*heads, "slots"], ["output"], domain="kvfuse", **attributes)
    graph = helper.make_graph([begin, attend], "selftest", inputs, [output], constants)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("kvfuse", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
