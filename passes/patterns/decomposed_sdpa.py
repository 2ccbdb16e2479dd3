"""Concat(past, new) -> repeat KV -> MatMul -> scale, mask -> Softmax -> MatMul: attention written out.

Emitted by: optimum (sdpa and eager), torch.onnx.export(dynamo=True), transformers' OnnxExporter.
Dims: B batch_size, H num_heads, K kv_num_heads, S sequence_length, P past, T = P + S, D head_dim.

    scores = MatMul(query [B H S D], key^T [B H D T])        scalars on either side, in any spelling
    probabilities = Softmax(mask(softcap(scale(scores))))    Add, Where; a mask may come before the scale
    output = MatMul(probabilities, value [B H T D])          NaN guard and casts in between
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ..probabilities import require_private, value_product
from ..proposal import Proposal
from ..score_chain import both_operands, raw_scores, score_chain, strip_scalars
from ..site import Mismatch, Operand, label
from ..values import is_op
from ..walk import cache_layout, find_append

NAME = "decomposed_sdpa"


def anchors(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every Softmax of the graph."""
    return (node for node in graph if is_op(node, "Softmax"))


def propose(softmax: ir.Node) -> Proposal:
    """Describes the attention around a Softmax.

    Raises:
        Mismatch: It is none that this pattern covers; the sentence says why.
    """
    product = value_product(softmax)
    end = softmax.inputs[0]
    raw_node = raw_scores(end, set()) if end is not None else None
    if end is None or raw_node is None:
        raise Mismatch(f"{label(softmax)} does not follow a MatMul of query and key", softmax)
    if product is None:
        users = ", ".join(label(user) for user in dict.fromkeys(softmax.outputs[0].consumers()))
        raise Mismatch(
            f"the attention probabilities go to {users or 'nothing'}; expected a MatMul with the value",
            softmax,
        )
    require_private(softmax, product)
    query_operand, key_operand = both_operands(raw_node)
    value_operand = both_operands(product)[1]
    key = find_append(key_operand, "key")
    value = find_append(value_operand, "value")
    if value.factors:
        raise Mismatch(
            f"the value is multiplied by {label(value.factors[0][0])} before it is averaged", product
        )
    query, query_factors = strip_scalars(query_operand)
    key_layout, value_layout = cache_layout(key), cache_layout(value)
    return Proposal(
        pattern=NAME,
        anchor=softmax,
        query=Operand(query, "BHSD"),
        key=key,
        value=value,
        key_cache=Operand(key.past, key_layout),
        value_cache=Operand(value.past, value_layout),
        new_key=Operand(key.new, key_layout),
        new_value=Operand(value.new, value_layout),
        key_operand=key_operand,
        value_operand=value_operand,
        output=Operand(product.outputs[0], "BHSD"),
        mask=score_chain(end, raw_node),
        factors=query_factors + key.factors,
    )
