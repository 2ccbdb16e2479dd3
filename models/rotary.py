"""Rotary position embedding, rotate-half form, as the three spellings write it.

Dims: B batch_size, S sequence_length, H heads (of queries or keys), D head_dim, M max_positions.
"""

import numpy as np
import onnx_ir as ir

from models.config import DecoderConfig
from models.graph import INT64_MAX, GraphWriter

CosSin = tuple[ir.Value, ir.Value]


def decomposed_tables(graph: GraphWriter, config: DecoderConfig, position_ids: ir.Value) -> CosSin:
    """Returns cos and sin, each [B, S, D], of the positions; angles are f32 in f16 graphs too."""
    frequencies = graph.constant(config.inverse_frequencies.reshape(1, -1, 1), np.float32)
    frequencies = graph.expand(frequencies, graph.dim(position_ids, 0), -1, 1)
    positions = graph.cast(graph.unsqueeze(position_ids, 1), ir.DataType.FLOAT)
    angles = graph.op("MatMul", graph.cast(frequencies, ir.DataType.FLOAT), positions)  # B D/2 S
    angles = graph.op("Transpose", angles, perm=[0, 2, 1])
    angles = graph.op("Concat", angles, angles, axis=-1)
    cos = graph.op("Mul", graph.op("Cos", angles), graph.constant(1.0, np.float32))
    sin = graph.op("Mul", graph.op("Sin", angles), graph.constant(1.0, np.float32))
    return graph.cast(cos, graph.float_type), graph.cast(sin, graph.float_type)


def rotate_decomposed(graph: GraphWriter, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Returns x·cos + rotate_half(x)·sin for x [B, H, S, D] and cos, sin [B, 1, S, D]."""
    straight = graph.op("Mul", x, cos)
    half = graph.op("Div", graph.dim(x, 3), graph.constant(2))
    half = graph.cast(graph.cast(half, ir.DataType.INT64), ir.DataType.INT64)
    low = graph.slice(x, 0, half, axis=3)
    high = graph.slice(x, half, INT64_MAX, axis=3)
    turned = graph.op("Concat", graph.op("Neg", high), low, axis=-1)
    return graph.op("Add", straight, graph.op("Mul", turned, sin))


def operator_tables(graph: GraphWriter, config: DecoderConfig, position_ids: ir.Value) -> CosSin:
    """Returns cos and sin, each [B, S, D/2], for ONNX RotaryEmbedding without position ids."""
    positions = graph.cast(graph.unsqueeze(position_ids, 2), ir.DataType.FLOAT)
    angles = graph.op("Mul", positions, graph.constant(config.inverse_frequencies, np.float32))
    cos, sin = graph.op("Cos", angles), graph.op("Sin", angles)
    return graph.cast(cos, graph.float_type), graph.cast(sin, graph.float_type)


def rotate_operator(graph: GraphWriter, x: ir.Value, cos: ir.Value, sin: ir.Value, heads: int) -> ir.Value:
    """Returns ONNX RotaryEmbedding of x [B, H, S, D]."""
    return graph.op("RotaryEmbedding", x, cos, sin, interleaved=0, num_heads=heads)


def cached_tables(graph: GraphWriter, config: DecoderConfig) -> CosSin:
    """Adds the initializers `cos_cache` and `sin_cache`, each [M, D/2], that GroupQueryAttention reads."""
    positions = np.arange(config.max_positions, dtype=np.float32)
    angles = np.outer(positions, config.inverse_frequencies)  # f32, like the other spellings' angles
    return (
        graph.weight("cos_cache", angles.shape, lambda: np.cos(angles)),
        graph.weight("sin_cache", angles.shape, lambda: np.sin(angles)),
    )
