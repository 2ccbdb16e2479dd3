"""Concat(past, new) -> repeat KV -> MatMul -> scale, mask -> Softmax -> MatMul: attention written out.

Emitted by: optimum (sdpa and eager), torch.onnx.export(dynamo=True), transformers' OnnxExporter.
Dims: B batch_size, H num_heads, K kv_num_heads, S sequence_length, P past, T = P + S, D head_dim.

    scores = MatMul(query [B H S D], key^T [B H D T])        scalars on either side, in any spelling
    probabilities = Softmax(mask(softcap(scale(scores))))    Add, Where; a mask may come before the scale
    output = MatMul(probabilities, value [B H T D])          NaN guard and casts in between

Either product may be an Einsum, have the heads folded into the batch ([B*H S D], bloom) or in groups ([B K
G S D]). A column of sinks behind the scores, cut off after the Softmax (gpt-oss), becomes the op's head_sink.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ..probabilities import follow, require_private
from ..products import packed_heads, score_product, value_operand_and_output
from ..proposal import Proposal
from ..score_chain import raw_scores, score_chain, without_sink
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
    path = follow(softmax)
    if path.product is None:
        users = ", ".join(label(user) for user in dict.fromkeys(path.operand.consumers()))
        raise Mismatch(
            f"the attention probabilities go to {users or 'nothing'}; expected a MatMul with the value",
            softmax,
        )
    scores, sink = _scores(softmax)
    raw_node = raw_scores(scores, set())
    if raw_node is None:
        raise Mismatch(f"{label(softmax)} does not follow a MatMul of query and key", softmax)
    require_private(softmax, path)
    if (sink is None) != (path.sliced is None):
        raise Mismatch(
            f"a column is added to the scores of {label(softmax)} or cut off, but not both", softmax
        )
    product = score_product(raw_node)
    value_operand, output = value_operand_and_output(path.product, path.operand)
    key = find_append(product.key, "key")
    value = find_append(value_operand, "value")
    if value.factors:
        raise Mismatch(
            f"the value is multiplied by {label(value.factors[0][0])} before it is averaged", path.product
        )
    key_layout, value_layout = cache_layout(key), cache_layout(value)
    return Proposal(
        pattern=NAME,
        anchor=softmax,
        query=product.query,
        key=key,
        value=value,
        key_cache=Operand(key.past, key_layout),
        value_cache=Operand(value.past, value_layout),
        new_key=Operand(key.new, key_layout),
        new_value=Operand(value.new, value_layout),
        key_operand=product.key,
        value_operand=value_operand,
        output=output,
        mask=score_chain(scores, raw_node),
        factors=product.factors + key.factors,
        kv_heads=packed_heads(key) if key_layout == "BSC" else None,
        head_sink=sink,
    )


def _scores(softmax: ir.Node) -> tuple[ir.Value, ir.Value | None]:
    """What the Softmax reads, without sinks; and the sinks."""
    end = softmax.inputs[0]
    if end is None:
        raise Mismatch(f"{label(softmax)} lacks its input", softmax)
    return without_sink(end)
