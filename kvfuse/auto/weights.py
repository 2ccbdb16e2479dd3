"""What the weights alone say: can 4-bit keys carry the constant part that a projection's bias gives them?

Keys are made as the graph makes them, rotary embedding and all, from inputs that stand for any text: normal
random numbers where the projection reads the normalized hidden state (times that norm's weights). The bias
then shows in them as the offset that it is at each position: constant in slow rotary pairs, turning in fast
ones, which a block's mean cannot take away. The error of the stored keys is measured against their varying
part, because a constant part says nothing about which token a query means.

Dims: S tokens, C hidden size, K kv_num_heads, D head_dim.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvfuse.formats import KvFormat
from kvfuse.passes.evaluate import Evaluator
from kvfuse.passes.lower import DOMAIN
from kvfuse.passes.site import Mismatch
from kvfuse.passes.values import constant

from .attention import Attention
from .rewritten import attributes_of, op_nodes

# Four blocks of 64: the offsets of the slowest rotary pairs hardly move in them, as in any text.
_TOKENS = 256
_PROJECTIONS = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulBnb4", "FusedGemm")
_MAX_DEPTH = 64  # nodes between a projection and the attention
_TOKEN_INPUTS = ("input_ids", "position_ids", "attention_mask", "cache_position", "inputs_embeds")


@dataclasses.dataclass(frozen=True)
class KeyOffset:
    """A layer whose keys have a constant part.

    Attributes:
        error: |stored - key| / |key - its constant part| of 4-bit keys; None when it could not be computed.
        problem: Why not.
    """

    error: float | None
    problem: str = ""


def key_offsets(model: ir.Model, base: KvFormat) -> dict[str, KeyOffset]:
    """The layers of a rewritten model whose key projection adds a constant, and what 4 bits make of it."""
    found = {}
    for layer, node in op_nodes(model).items():
        key = node.inputs[1]
        if key is None:
            continue
        projections = list(_projections(key))
        if any(projection.biased for projection in projections):
            # One evaluator for each layer: it keeps what it has read of the weights.
            found[layer] = _weigh(Evaluator(model), node, key, projections, base)
    return found


@dataclasses.dataclass(frozen=True)
class _Projection:
    """A product with constant weights on the way to the keys.

    Attributes:
        node: The product.
        biased: A constant vector is added to it, by itself or behind it.
    """

    node: ir.Node
    biased: bool


def _projections(key: ir.Value) -> Iterator[_Projection]:
    """The projections nearest to the keys."""
    queue: deque[tuple[ir.Value, bool, int]] = deque([(key, False, 0)])
    seen: set[ir.Value] = set()
    while queue:
        value, biased, depth = queue.popleft()
        node = value.producer()
        if value in seen or node is None or depth > _MAX_DEPTH or _is_constant(value):
            continue
        seen.add(value)
        if node.op_type in _PROJECTIONS and _reads_weights(node):
            own = len(node.inputs) > 2 and node.op_type == "Gemm" and node.inputs[2] is not None
            yield _Projection(node, biased or own)
        elif node.op_type != "Shape":
            vector = node.op_type in ("Add", "BiasAdd") and any(_is_vector(v) for v in node.inputs)
            queue.extend((v, biased or vector, depth + 1) for v in node.inputs if v is not None)


def _reads_weights(node: ir.Node) -> bool:
    """Whether the second operand is a constant matrix, however it is stored."""
    weights = node.inputs[1]
    return weights is not None and _is_constant(weights)


def _is_constant(value: ir.Value, depth: int = 0) -> bool:
    """A constant, or made of constants only (a dequantized or transposed weight)."""
    node = value.producer()
    if value.const_value is not None and node is None:
        return not value.is_graph_input()
    if node is None or depth > 4:
        return False
    if node.op_type == "Constant":
        return True
    operands = [operand for operand in node.inputs if operand is not None]
    return bool(operands) and all(_is_constant(operand, depth + 1) for operand in operands)


def _is_vector(value: ir.Value | None) -> bool:
    """A constant of more than one number: what a projection, or anything behind it, adds to every token."""
    if value is None or not _is_constant(value) or value.shape is None:
        return False
    sizes = [size for size in value.shape if isinstance(size, int)]
    return len(sizes) == len(value.shape) and int(np.prod(sizes)) > 1


def _weigh(
    evaluator: Evaluator, node: ir.Node, key: ir.Value, projections: list[_Projection], base: KvFormat
) -> KeyOffset:
    try:
        rng = np.random.default_rng(0)
        varied = _keys(evaluator, node, key, projections, rng)
        offset = _keys(evaluator, node, key, projections, None)
        if not np.isfinite(varied).all() or not np.isfinite(offset).all():
            return KeyOffset(None, "the keys of random inputs are not finite")
        return KeyOffset(_key_error(node, base, varied, offset))
    except (Mismatch, ValueError, KeyError) as error:
        return KeyOffset(None, str(error).splitlines()[0][:120])


def _keys(
    evaluator: Evaluator,
    node: ir.Node,
    key: ir.Value,
    projections: list[_Projection],
    rng: np.random.Generator | None,
) -> NDArray[np.float32]:
    """Keys as the op reads them, of random inputs or (rng None) of zeros."""
    bindings: dict[ir.Value, NDArray[np.generic]] = {}
    for projection in projections:
        hidden = projection.node.inputs[0]
        if hidden is None or hidden in bindings:
            continue
        width = _width(projection.node)
        rank = 2 if projection.node.op_type.endswith("Gemm") else 3
        array = np.zeros((_TOKENS, width) if rank == 2 else (1, _TOKENS, width))
        if rng is not None:
            array = rng.standard_normal(array.shape) * _norm_weights(hidden, width)
        bindings[hidden] = array.astype(hidden.dtype.numpy() if hidden.dtype is not None else np.float32)
    graph = node.graph
    for value in () if graph is None else graph.inputs:
        if value.name in _TOKEN_INPUTS and value not in bindings:
            bindings[value] = _token_input(value)
    bindings |= _lengths(node)
    return np.asarray(evaluator.on(bindings).array(key), np.float32)


def _width(node: ir.Node) -> int:
    """C: how many channels a projection reads."""
    if "K" in node.attributes:  # block-quantized weights state it
        return node.attributes["K"].as_int()
    weights = node.inputs[1]
    shape = None if weights is None else weights.shape
    transposed = any(node.attributes[n].as_int() for n in ("transB",) if n in node.attributes)
    size = None if shape is None or len(shape) != 2 else shape[1 if transposed else 0]
    if not isinstance(size, int):
        raise Mismatch("the size of the key projection is not known", node)
    return size


def _norm_weights(hidden: ir.Value, width: int) -> NDArray[np.floating] | float:
    """The weights [C] of the norm that makes the projection's input; 1 when there are none to be seen."""
    node = hidden.producer()
    while node is not None and node.op_type in ("Cast", "Reshape", "Identity") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    for operand in () if node is None else node.inputs:
        if operand is not None and operand.const_value is not None and operand.shape is not None:
            weights = constant(operand) if operand.const_value.size <= 4096 else operand.const_value.numpy()
            if weights is not None and weights.size == width:
                return np.asarray(weights, np.float64).reshape(-1)
    return 1.0


def _token_input(value: ir.Value) -> NDArray[np.generic]:
    """A graph input for one row of S new tokens after none."""
    dtype = np.dtype(value.dtype.numpy() if value.dtype is not None else np.int64)
    steps = np.arange(_TOKENS)
    if value.name == "attention_mask":
        return np.ones((1, _TOKENS), dtype)
    if value.name == "cache_position":
        return steps.astype(dtype)
    rank = 2 if value.shape is None else len(value.shape)
    if value.name == "position_ids":
        return np.broadcast_to(steps, (1,) * (rank - 1) + (_TOKENS,)).astype(dtype)
    if value.name == "inputs_embeds":
        raise Mismatch("the model reads embeddings", value)
    return np.zeros((1, _TOKENS), dtype)


def _lengths(node: ir.Node) -> dict[ir.Value, NDArray[np.generic]]:
    """The outputs of KvCacheBegin before the first token."""
    slots = node.inputs[3]
    begin = None if slots is None else slots.producer()
    if begin is None or begin.domain != DOMAIN:
        raise Mismatch("the op has no slots", node)
    arrays: Mapping[int, NDArray[np.generic]] = {
        0: np.zeros((1, 3), np.int64),
        1: np.zeros((), np.int64),
        2: np.zeros(1, np.int64),
    }
    return {value: arrays[position] for position, value in enumerate(begin.outputs)}


def _key_error(
    node: ir.Node, base: KvFormat, varied: NDArray[np.float32], offset: NDArray[np.float32]
) -> float:
    """The worst head's error of stored 4-bit keys against what varies in them."""
    attributes = attributes_of(node)
    stored = Attention(attributes, {"query": varied, "key": varied, "value": varied}).stored_keys(
        dataclasses.replace(base, key_bits=min(4, base.key_bits), value_bits=16)
    )
    tokens = stored.shape[1]
    if attributes["axis"] == 1:
        varied, offset = varied.swapaxes(1, 2), offset.swapaxes(1, 2)
    keys, constant_part = varied[0, :, :tokens], offset[0, :, :tokens]
    axes = (1, 2)
    noise = np.sqrt(((stored - keys) ** 2).sum(axes))
    signal = np.sqrt(((keys - constant_part) ** 2).sum(axes))
    return float((noise / np.where(signal == 0, 1, signal)).max())
