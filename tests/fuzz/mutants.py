"""Mutants of decoders: one to three small damages to a graph, or to the bytes of its file.

A mutant is named by (sources, seed, index) alone: `mutant` gives the same bytes on every machine.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from decoder_graphs import decoder
from onnx import AttributeProto, numpy_helper
from sources import Decoder, sequence_input

OPERATORS = {
    "Add": ["Sub", "Mul", "Max"], "Sub": ["Add"], "Mul": ["Div", "Add"], "Div": ["Mul"], "And": ["Or", "Xor"],
    "Or": ["And"], "LessOrEqual": ["Less", "GreaterOrEqual", "Equal"], "Less": ["LessOrEqual", "Greater"],
    "Greater": ["GreaterOrEqual", "Less"], "GreaterOrEqual": ["Greater", "LessOrEqual"], "Equal": ["Less"],
    "Tanh": ["Sigmoid", "Identity"], "Softmax": ["LogSoftmax", "Identity"], "Sqrt": ["Identity", "Neg"],
    "Cos": ["Sin"], "Sin": ["Cos"], "Not": ["Identity"], "Max": ["Min"], "Min": ["Max"],
    "Trilu": ["Identity"], "MatMul": ["Add"], "Reciprocal": ["Sqrt"], "IsNaN": ["IsInf"],
    "ReduceMean": ["ReduceSum"],
}  # fmt: skip
# Lengths and positions: onnxruntime reads and writes wherever they point.
GUARDED = {"GroupQueryAttention": {5, 6, 7, 8, 9}, "DecoderMaskedMultiHeadAttention": {7, 8, 9, 10}}
SMALL = 64  # elements of a constant that is worth changing


def tiny(rng: random.Random) -> Decoder:
    """A decoder of one or two layers in a random spelling."""
    layers = rng.choice([1, 1, 2])
    model = decoder(
        layers=layers,
        scale=rng.choice(["query", "key", "both", "scores_mul", "scores_div", "runtime"]),
        repeat=rng.choice(["expand", "tile", "gather"]),
        mask=rng.choice(["none", "causal", "causal+padding", "window", "alibi", "window+padding", "chunks"]),
        mask_form=rng.choice(["add", "where", "add_lowest"]),
        softcap=rng.choice(["", "before", "after"]),
        guard=rng.choice([True, False]),
    )
    pasts = [f"past.{i}.{side}" for i in range(layers) for side in ("key", "value")]
    return Decoder("tiny", model, {name: name.replace("past", "present") for name in pasts})


def mutant(sources: Sequence[Decoder], seed: int, index: int) -> tuple[Decoder, bytes, str]:
    """The decoder that mutant `index` comes from, the mutant's bytes, and what was done to it."""
    rng = random.Random(f"{seed}/{index}")
    source = rng.choice(sources) if sources and rng.random() < 0.6 else tiny(rng)
    if rng.random() < 0.15:
        data, how = damage(bytearray(source.model.SerializeToString()), rng)
        return source, data, how
    model = onnx.ModelProto()
    model.CopyFrom(source.model)
    done = [mutate(model, rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    return source, model.SerializeToString(), ", ".join(done)


def damage(data: bytearray, rng: random.Random) -> tuple[bytes, str]:
    """Truncates, flips or cuts out bytes."""
    kind = rng.choice(["truncated", "bits flipped", "bytes replaced", "bytes cut out"])
    if kind == "truncated":
        del data[rng.randrange(len(data)) :]
        return bytes(data), kind
    for _ in range(rng.choice([1, 2, 8])):
        place = rng.randrange(len(data))
        if kind == "bits flipped":
            data[place] ^= 1 << rng.randrange(8)
        elif kind == "bytes replaced":
            data[place] = rng.randrange(256)
        else:
            del data[place : place + rng.randrange(1, 20)]
    return bytes(data), kind


def mutate(model: onnx.ModelProto, rng: random.Random) -> str:
    """Does one thing to one node, constant, or the graph's interface; returns what."""
    scope = rng.choice([scope for scope in scopes(model) if scope.node] or [None])
    if scope is None:
        return "nothing"
    kinds = [drop, swap, swap, operator, operator, attribute, attribute, edge, edge]
    kinds += [constant, constant, interface]
    kind = rng.choice(kinds)
    return f"{kind.__name__} {kind(model, scope, rng)}"


def scopes(model: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """The graph, the bodies of its Ifs and the model's functions."""
    yield model.graph
    yield from model.functions
    for node in model.graph.node:
        yield from (entry.g for entry in node.attribute if entry.type == AttributeProto.GRAPH)


def drop(model, scope, rng):
    """Removes a node; its readers read one of its inputs, or nothing that exists."""
    place = rng.randrange(len(scope.node))
    node = scope.node[place]
    given = [name for name in node.input if name]
    label = node.op_type
    if given and rng.random() < 0.8:
        instead = rng.choice(given)
        for other in scope.node:
            for i, name in enumerate(other.input):
                if name in node.output:
                    other.input[i] = instead
    del scope.node[place]
    return label


def free(node) -> list[int]:
    """Positions of the inputs that may be changed."""
    guarded = GUARDED.get(node.op_type, set())
    return [i for i in range(len(node.input)) if i not in guarded]


def swap(model, scope, rng):
    """Two inputs of a node change places."""
    nodes = [node for node in scope.node if len(free(node)) > 1]
    if not nodes:
        return "nothing"
    node = rng.choice(nodes)
    first, second = rng.sample(free(node), 2)
    node.input[first], node.input[second] = node.input[second], node.input[first]
    return node.op_type


def operator(model, scope, rng):
    """A node computes something else."""
    nodes = [node for node in scope.node if node.op_type in OPERATORS]
    if not nodes:
        return "nothing"
    node = rng.choice(nodes)
    old = node.op_type
    node.op_type = rng.choice(OPERATORS[old])
    return f"{old} -> {node.op_type}"


def attribute(model, scope, rng):
    """One attribute of a node has another value, or is gone."""
    nodes = [node for node in scope.node if node.attribute]
    if not nodes:
        return "nothing"
    node = rng.choice(nodes)
    place = rng.randrange(len(node.attribute))
    entry = node.attribute[place]
    label = f"{node.op_type}.{entry.name}"
    if rng.random() < 0.15 and entry.type != AttributeProto.GRAPH:
        del node.attribute[place]
    elif entry.type == AttributeProto.INTS:
        entry.ints[:] = rng.sample(list(entry.ints), len(entry.ints))
    elif entry.type == AttributeProto.INT:
        entry.i = rng.choice([0, 1, 2, 3, 4, 6, -1, -2, entry.i + 1])
    elif entry.type == AttributeProto.FLOAT:
        entry.f = rng.choice([0.0, 0.5, 1.0, -1.0, entry.f * 1.01])
    elif entry.type == AttributeProto.STRING:
        entry.s = bytes(rng.sample(list(entry.s), len(entry.s)))
    elif entry.type == AttributeProto.TENSOR:
        change(entry.t, rng)
    return label


def edge(model, scope, rng):
    """A node reads another value: an earlier one, an input or an initializer."""
    place = rng.randrange(len(scope.node))
    node = scope.node[place]
    if not free(node):
        return "nothing"
    names = [name for other in scope.node[:place] for name in other.output if name]
    names += [value.name for value in model.graph.input] + [""]
    if isinstance(scope, onnx.FunctionProto):
        names = [*names, *scope.input]
    node.input[rng.choice(free(node))] = rng.choice(names)
    return node.op_type


def constant(model, scope, rng):
    """A small constant has another value."""
    tensors = [tensor for tensor in model.graph.initializer if np.prod(tensor.dims or [1]) <= SMALL]
    tensors += [
        entry.t
        for node in scope.node
        for entry in node.attribute
        if node.op_type in ("Constant", "ConstantOfShape") and entry.type == AttributeProto.TENSOR
    ]
    if not tensors:
        return "nothing"
    tensor = rng.choice(tensors)
    change(tensor, rng)
    return f"of {list(tensor.dims)}"


def change(tensor: onnx.TensorProto, rng: random.Random) -> None:
    array = numpy_helper.to_array(tensor)
    with np.errstate(all="ignore"):  # masks hold infinities
        if array.dtype.kind == "b":
            changed = ~array
        elif array.dtype.kind in "iu":
            changed = array + rng.choice([-1, 1, 2])
        else:
            changed = array * rng.choice([0.5, 0.0, 1.01, -1.0])
        replacement = numpy_helper.from_array(changed.astype(array.dtype), tensor.name)
    tensor.CopyFrom(replacement)


def interface(model, scope, rng):
    """A declared shape, a graph output, a name or a version is not what it was."""
    graph = model.graph
    kind = rng.choice(["dim", "drop output", "swap outputs", "our name", "opset", "batch", "ir_version"])
    if kind == "dim":
        shapes = [value.type.tensor_type.shape for value in (*graph.input, *graph.output)]
        dim = rng.choice(rng.choice([shape for shape in shapes if shape.dim]).dim)
        dim.dim_param = rng.choice(["batch", "past", "sequence", "q", ""])
    elif kind == "drop output" and len(graph.output) > 1:
        del graph.output[rng.randrange(len(graph.output))]
    elif kind == "swap outputs" and len(graph.output) > 2:
        first, second = rng.sample(range(len(graph.output)), 2)
        one, other = graph.output[first], graph.output[second]
        one.name, other.name = other.name, one.name
    elif kind == "our name":
        nodes = [node for node in graph.node if node.output]
        ours = ["kv_sequence", "kvfuse.slots", "kv_past_length"]
        rename(graph, rng.choice(nodes).output[0], rng.choice(ours))
    elif kind == "opset":
        model.opset_import[0].version = rng.choice([1, 7, 11, 13, 17, 21, 23, 24, 25, 99])
    elif kind == "ir_version":
        model.ir_version = rng.choice([0, 3, 8, 13, 14, 99])
    else:
        dims = sequence_input(graph)
        if dims is not None:
            dims[0].dim_value = rng.choice([1, 2, 3])
    return kind


def rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for value in graph.output:
        value.name = new if value.name == old else value.name
