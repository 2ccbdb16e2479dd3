"""com.microsoft MultiHeadAttention: with its own past, or behind a Concat.

Emitted by: onnxruntime-genai (encoder-decoder models), onnxruntime's and onnxscript's fusions.
Dims: B batch_size, H num_heads, S sequence_length, P past, T = P + S, D head_dim.

    output, present_key, present_value = MultiHeadAttention(query [B S H*D], key, value, bias [3*H*D]?,
        key_padding_mask?, attention_bias?, past_key [B H P D], past_value)
    output = MultiHeadAttention(query, repeat_kv(Concat(past_key, key)) [B T H*D], …, attention_bias?)

The bias is added inside, to the new tokens only. DecoderMaskedMultiHeadAttention, the form for one token, is
named and refused: onnxruntime's CPU kernel of it knows fixed buffers only, so that nothing could be proven.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ..attention_node import operand
from ..contrib_node import (
    heads_of,
    integer,
    nodes,
    number,
    own_append,
    refuse_fixed,
    refuse_inputs,
    refuse_scores,
    required,
    scale_of,
)
from ..padding_mask import PaddedMask
from ..preamble import Preamble
from ..proposal import Proposal
from ..site import Mismatch, Operand, label
from ..walk import cache_layout, find_append

NAME = "multi_head_attention"
_ONE_TOKEN = "DecoderMaskedMultiHeadAttention"
_FILTER = -1e4  # the default of mask_filter_value


def anchors(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every node of the two ops."""
    return nodes(graph, "MultiHeadAttention", _ONE_TOKEN)


def propose(node: ir.Node) -> Proposal:
    """Describes a MultiHeadAttention node.

    Raises:
        Mismatch: It is none that this pattern covers; the sentence says why.
    """
    if node.op_type == _ONE_TOKEN:
        raise Mismatch(
            f"{label(node)} writes into a fixed buffer, or else onnxruntime on CPU cannot evaluate it",
            node,
        )
    refuse_scores(node)
    refuse_inputs(
        node,
        {
            8: "has a past_sequence_length, the length of a fixed cache buffer",
            9: "reads its cache through cache_indirection",
        },
    )
    query = required(node, 0, "query")
    key, value = (required(node, i, side) for i, side in ((1, "key (packed operands)"), (2, "value")))
    mask = PaddedMask(
        operand(node, 5),
        causal=integer(node, "unidirectional", 0) == 1,
        padding=operand(node, 4),
        hidden=number(node, "mask_filter_value", _FILTER),
    )
    if operand(node, 6) is None:
        return _behind_concat(node, query, key, value, mask)
    key_append = own_append(node, required(node, 6, "past_key"), key, 1)
    value_append = own_append(node, required(node, 7, "past_value"), value, 2)
    for append in (key_append, value_append):
        refuse_fixed(append.past, 2, node)
    bias = operand(node, 3)
    heads = heads_of(node)
    return Proposal(
        pattern=NAME,
        anchor=node,
        query=Operand(query, "BSC"),
        key=key_append,
        value=value_append,
        key_cache=Operand(key_append.past, "BHSD"),
        value_cache=Operand(value_append.past, "BHSD"),
        new_key=Operand(key, "BSC"),
        new_value=Operand(value, "BSC"),
        key_operand=key_append.present,
        value_operand=value_append.present,
        output=Operand(node.outputs[0], "BSC"),
        mask=mask,
        scale=scale_of(node),
        heads=heads,
        kv_heads=heads,
        preamble=None if bias is None else Preamble(query, key, value, bias=bias),
    )


def _behind_concat(
    node: ir.Node, query: ir.Value, key: ir.Value, value: ir.Value, mask: PaddedMask
) -> Proposal:
    """The op reads keys and values that were joined with the cache outside of it."""
    key_append, value_append = find_append(key, "key"), find_append(value, "value")
    if value_append.factors:
        factor = label(value_append.factors[0][0])
        raise Mismatch(f"the value is multiplied by {factor} before it is averaged", node)
    if mask.causal:
        raise Mismatch(
            f"{label(node)} aligns unidirectional to the first key because the cache is joined outside of "
            "it; queries after the first run would not see the cache as a decoder means it",
            node,
        )
    refuse_inputs(node, {3: "adds a bias to the keys and values that are cached already"})
    key_layout, value_layout = cache_layout(key_append), cache_layout(value_append)
    return Proposal(
        pattern=NAME,
        anchor=node,
        query=Operand(query, "BSC"),
        key=key_append,
        value=value_append,
        key_cache=Operand(key_append.past, key_layout),
        value_cache=Operand(value_append.past, value_layout),
        new_key=Operand(key_append.new, key_layout),
        new_value=Operand(value_append.new, value_layout),
        key_operand=key,
        value_operand=value,
        output=Operand(node.outputs[0], "BSC"),
        mask=mask,
        factors=key_append.factors,
        scale=scale_of(node),
        heads=heads_of(node),
    )
