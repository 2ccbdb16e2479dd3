"""Small merged decoders: one If, a branch with a past and one without, weights in the outer graph.

Dims: B batch_size, S new tokens, E encoder tokens, H = 4 heads, D = 8.
"""

import numpy as np
import onnx
from decoder_graphs import HEAD_DIM, HEADS, VOCABULARY, WIDTH, GraphBuilder, merge_heads
from onnx import TensorProto, helper

INNER = HEADS * HEAD_DIM


def merged(
    *, layers=2, cross=False, past_branch="then_branch", with_past=None, fresh=None, condition=None, opset=18
) -> onnx.ModelProto:
    """A merged decoder.

    Args:
        cross: Adds a cross-attention, whose keys and values the fresh branch computes.
        past_branch: Which branch of the If reads the caches.
        with_past, fresh: Options of a branch: scale, mask ("causal" or "none"), change (keys -> keys).
        condition: Called with the outer builder; returns the condition (the input use_cache by default).
    """
    outer = GraphBuilder()
    outer.input("input_ids", ["batch", "sequence"], TensorProto.INT64)
    if cross:
        outer.input("encoder", ["batch", "encoder_sequence", WIDTH])
    kinds = ("decoder", "encoder") if cross else ("decoder",)
    for i in range(layers):
        for kind in kinds:
            length = "past" if kind == "decoder" else "encoder_sequence"
            for side in ("key", "value"):
                outer.input(f"past.{i}.{kind}.{side}", ["batch", HEADS, length, HEAD_DIM])
    outer.input("use_cache", [1], TensorProto.BOOL)
    chosen = "use_cache" if condition is None else condition(outer)
    weights = weights_of(outer, layers)
    graphs = {
        past_branch: branch(weights, layers, cross, True, with_past or {}),
        other(past_branch): branch(weights, layers, cross, False, fresh or {}),
    }
    names = [output.name for output in graphs["then_branch"].output]
    outer.nodes.append(helper.make_node("If", [chosen], names, name="choice", **graphs))
    for name in names:
        outer.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * dims(name)))
    return outer.model(opset)


def other(branch_name):
    return {"then_branch": "else_branch", "else_branch": "then_branch"}[branch_name]


def dims(name):
    return 3 if name == "logits" else 4


def weights_of(outer, layers):
    names = {"table": outer.weight(VOCABULARY, WIDTH), "head": outer.weight(WIDTH, VOCABULARY)}
    for i in range(layers):
        for kind in ("decoder", "encoder"):
            for side in ("query", "key", "value"):
                names[f"{i}.{kind}.{side}"] = outer.weight(WIDTH, INNER)
            names[f"{i}.{kind}.out"] = outer.weight(INNER, WIDTH)
    return names


def branch(weights, layers, cross, past, options):
    """The graph of one branch; all of its values are its own."""
    b = GraphBuilder(first=1000 if past else 2000)
    x = b.op("Gather", weights["table"], "input_ids")
    presents = []
    for i in range(layers):
        x, present = attention(b, x, x, weights, f"{i}.decoder", past, options)
        presents += [(f"present.{i}.decoder.{side}", present[side]) for side in ("key", "value")]
        if cross:
            x, present = cross_attention(b, x, weights, i, past)
            presents += [(f"present.{i}.encoder.{side}", present[side]) for side in ("key", "value")]
    b.output(b.op("MatMul", x, weights["head"]), "logits")
    for name, value in presents:
        b.output(value, name)
    return helper.make_graph(b.nodes, "past" if past else "fresh", [], b.outputs, b.initializers)


def heads(b, x, weight):
    split = b.op("Reshape", b.op("MatMul", x, weight), b.ints(0, 0, HEADS, HEAD_DIM))
    return b.op("Transpose", split, perm=[0, 2, 1, 3])


def attention(b, x, source, weights, name, past, options):
    """Self-attention; the fresh branch uses the new keys as they are."""
    query = heads(b, x, weights[f"{name}.query"])
    present = {side: heads(b, source, weights[f"{name}.{side}"]) for side in ("key", "value")}
    length = b.number(0)
    if past:
        cached = f"past.{name}.key"
        length = b.dim(cached, 2)
        present = {side: b.op("Concat", f"past.{name}.{side}", new, axis=2) for side, new in present.items()}
    keys = options.get("change", lambda b, keys: keys)(b, present["key"])
    raw = b.op("MatMul", query, b.op("Transpose", keys, perm=[0, 1, 3, 2]))
    raw = b.op("Mul", raw, b.const(options.get("scale", 0.35)))
    if options.get("mask", "causal") == "causal":
        total = b.op("Add", length, b.dim("input_ids", 1))
        position = b.op("Unsqueeze", b.op("Range", length, total, b.number(1)), b.ints(1))
        visible = b.op("LessOrEqual", b.op("Range", b.number(0), total, b.number(1)), position)
        raw = b.op("Where", visible, raw, b.const(-np.inf))
    y = b.op("MatMul", b.op("Softmax", raw, axis=-1), present["value"])
    return b.op("Add", x, b.op("MatMul", merge_heads(b, y), weights[f"{name}.out"])), present


def cross_attention(b, x, weights, i, past):
    name = f"{i}.encoder"
    query = heads(b, x, weights[f"{name}.query"])
    if past:
        present = {side: b.op("Identity", f"past.{name}.{side}") for side in ("key", "value")}
    else:
        present = {side: heads(b, "encoder", weights[f"{name}.{side}"]) for side in ("key", "value")}
    raw = b.op("MatMul", query, b.op("Transpose", present["key"], perm=[0, 1, 3, 2]))
    weights_ = b.op("Softmax", b.op("Mul", raw, b.const(0.35)), axis=-1)
    y = b.op("MatMul", weights_, present["value"])
    return b.op("Add", x, b.op("MatMul", merge_heads(b, y), weights[f"{name}.out"])), present
