"""The mask subgraph that exporters compute once, outside the attention, from the length of a cache.

Dims: B batch_size, S sequence_length, P past_sequence_length, T = P + S.
"""

import numpy as np
import onnx_ir as ir

from models.graph import GraphWriter


def _range(graph: GraphWriter, start: ir.Value | int, end: ir.Value) -> ir.Value:
    """Returns int64 start, start + 1, …, end - 1."""
    first = graph.constant(start) if isinstance(start, int) else graph.cast(start, ir.DataType.INT64)
    return graph.op("Range", first, graph.cast(end, ir.DataType.INT64), graph.constant(1))


def _along(graph: GraphWriter, index: ir.Value, axis: int) -> ir.Value:
    """Reshapes a vector to four dimensions, of which only `axis` is not 1."""
    for other in (a for a in range(4) if a != axis):
        index = graph.unsqueeze(index, other)
    return index


def _padding(graph: GraphWriter, attention_mask: ir.Value, rows: ir.Value, keys: ir.Value) -> ir.Value:
    """Returns attention_mask[b, key] as bool [B, 1, 1, T], gathered from the flattened mask."""
    flat_index = graph.op("Add", keys, graph.op("Mul", rows, graph.dim(attention_mask, 1)))
    gathered = graph.op("Gather", graph.op("Flatten", attention_mask, axis=2), flat_index, axis=0)
    shape = graph.op("Concat", graph.op("Shape", flat_index), axis=0)
    return graph.cast(graph.reshape(graph.reshape(gathered, graph.constant([-1])), shape), ir.DataType.BOOL)


def boolean_mask(
    graph: GraphWriter,
    past_key: ir.Value,
    embeddings: ir.Value,
    attention_mask: ir.Value | None,
    sliding_window: int,
) -> ir.Value:
    """Writes the mask of all layers: causal, in the window, and not padding.

    Args:
        graph: where to write.
        past_key: [B, K, P, D], the cache whose length stands for all of them.
        embeddings: [B, S, hidden].
        attention_mask: int64 [B, T], nonzero = attend; None leaves padding out.
        sliding_window: keys that a query sees, itself included; 0 = all.

    Returns:
        bool [B, 1, S, T], true = attend.
    """
    past = graph.dim(past_key, 2)
    positions = _range(graph, past, graph.op("Add", past, graph.dim(embeddings, 1)))
    padding = None if attention_mask is None else graph.cast(attention_mask, ir.DataType.BOOL)
    new = graph.dim(positions, 0)
    total = graph.op("Add", past, new)
    batch = graph.dim(embeddings, 0)
    queries = _along(graph, positions, axis=2)
    rows = _along(graph, _range(graph, 0, batch), axis=0)
    keys = _along(graph, _range(graph, 0, total), axis=3)
    mask = graph.op("ConstantOfShape", graph.constant([]), value=ir.tensor(np.ones(1, np.bool_)))
    if sliding_window:
        inside = graph.op("Greater", keys, graph.op("Sub", queries, graph.constant(sliding_window)))
        mask = graph.op("And", mask, graph.cast(inside, ir.DataType.BOOL))
    causal = graph.op("LessOrEqual", keys, queries)
    mask = graph.op("And", mask, graph.cast(causal, ir.DataType.BOOL))
    if padding is not None:
        mask = graph.op("And", mask, _padding(graph, padding, rows, keys))
    return graph.expand(mask, batch, -1, new, total)


def additive_mask(graph: GraphWriter, mask: ir.Value) -> ir.Value:
    """Turns a bool mask into 0 where true and the lowest finite number elsewhere, as eager exports do."""
    return graph.op("Where", mask, graph.number(0), graph.number(np.finfo(graph.dtype).min))
