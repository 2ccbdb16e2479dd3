"""com.microsoft Attention: projection inside, keys and values stacked in one cache.

Emitted by: onnxruntime's fusions of GPT-2 style models, and converters from before the ONNX op.
Dims: B batch_size, H num_heads, S sequence_length, P past, T = P + S, C width, D head_dim.

    output, present = Attention(input [B S C], weights [C 3*H*D], bias [3*H*D], mask_index?,
        past [2 B H P D])
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
    required,
    scale_of,
)
from ..padding_mask import PaddedMask
from ..preamble import Preamble
from ..proposal import Proposal
from ..site import Mismatch, Operand, label

NAME = "contrib_attention"
_FILTER = -1e4  # the default of mask_filter_value


def anchors(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every com.microsoft Attention node."""
    return nodes(graph, "Attention")


def propose(node: ir.Node) -> Proposal:
    """Describes a com.microsoft Attention node.

    Raises:
        Mismatch: It is none that this pattern covers; the sentence says why.
    """
    if integer(node, "past_present_share_buffer", 0):
        raise Mismatch(f"{label(node)} writes into a fixed buffer (past_present_share_buffer)", node)
    if integer(node, "do_rotary", 0):
        raise Mismatch(
            f"{label(node)} rotates inside (do_rotary), which onnxruntime cannot evaluate on CPU to prove it",
            node,
        )
    refuse_inputs(node, {6: "has a past_sequence_length, the length of a fixed cache buffer"})
    tokens = required(node, 0, "input")
    append = own_append(node, required(node, 4, "past"), tokens, 1)
    if append.past.shape is None or len(append.past.shape) != 5:
        raise Mismatch(f"the cache input {label(append.past)} is not declared as [2, B, H, P, D]", node)
    refuse_fixed(append.past, 3, node)
    heads = heads_of(node)
    return Proposal(
        pattern=NAME,
        anchor=node,
        query=Operand(tokens, "BSC"),
        key=append,
        value=append,
        key_cache=Operand(append.past, "BHSD", 0),
        value_cache=Operand(append.past, "BHSD", 1),
        new_key=Operand(tokens, "BSC"),
        new_value=Operand(tokens, "BSC"),
        key_operand=append.present,
        value_operand=append.present,
        output=Operand(node.outputs[0], "BSC"),
        mask=PaddedMask(
            operand(node, 5),
            causal=integer(node, "unidirectional", 0) == 1,
            padding=operand(node, 3),
            hidden=number(node, "mask_filter_value", _FILTER),
        ),
        scale=scale_of(node),
        heads=heads,
        kv_heads=heads,
        # Without a bias, which the schema allows, the oldest supported onnxruntime crashes on evaluation.
        preamble=Preamble(tokens, weight=required(node, 1, "weights"), bias=required(node, 2, "bias")),
    )
