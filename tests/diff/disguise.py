"""The same model under other names of its inner values and nodes, and with its nodes in another order."""

import random

import onnx


def disguise(model, seed=0):
    """A copy that computes the same: names of inner values and nodes are random, so is the order of nodes."""
    rng = random.Random(seed)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = {value.name for value in [*copy.graph.input, *copy.graph.output]}
    kept |= {tensor.name for tensor in copy.graph.initializer}
    _rename(copy.graph, kept, {}, rng)
    for function in copy.functions:
        _rename(function, set(), {}, rng)
        for names in (function.input, function.output):
            names[:] = [_new(name, set(), _rename.functions, rng) for name in names]
    del copy.graph.value_info[:]
    _shuffle(copy.graph, rng)
    return copy


def _new(name, kept, names, rng):
    if not name or name in kept:
        return name
    return names.setdefault(name, f"v{rng.randrange(10**12)}")


def _rename(graph, kept, names, rng):
    """Gives the values that nodes of a graph or function make, and those inside of them, other names."""
    _rename.functions = names
    for node in graph.node:
        node.name = f"n{rng.randrange(10**9)}"
        node.doc_string = f"line {rng.randrange(100)}"
        for operands in (node.input, node.output):
            operands[:] = [_new(name, kept, names, rng) for name in operands]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                inner = attribute.g
                own = {output for body in inner.node for output in body.output}
                scope = {name: new for name, new in names.items() if name not in own}
                outer = (kept - own) | {tensor.name for tensor in inner.initializer}
                _rename(inner, outer, scope, rng)
                for output in inner.output:
                    output.name = _new(output.name, outer, scope, rng)


def _reads(node):
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            made = {output for inner in attribute.g.node for output in inner.output}
            inside = {name for inner in attribute.g.node for name in _reads(inner)}
            names |= (inside | {value.name for value in attribute.g.output}) - made
    return names


def _shuffle(graph, rng):
    """A random topological order."""
    left = []
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        left.append(copy)
    made = {output for node in left for output in node.output if output}
    needs = {id(node): _reads(node) & made for node in left}
    done, order = set(), []
    while left:
        ready = [node for node in left if needs[id(node)] <= done]
        for node in rng.sample(ready, max(1, len(ready) // 2)):
            order.append(node)
            done.update(node.output)
            left.remove(node)
    del graph.node[:]
    graph.node.extend(order)
