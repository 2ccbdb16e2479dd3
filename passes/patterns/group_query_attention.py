"""com.microsoft GroupQueryAttention: packed or separate operands, rotary embedding and append inside.

Emitted by: the model builder of onnxruntime-genai, onnxscript's and onnxruntime's fusions.
Dims: B batch_size, H num_heads, K kv_num_heads, S sequence_length, P past, T = P + S, D head_dim.

    output, present_key, present_value = GroupQueryAttention(query [B S H*D], key [B S K*D]?, value?,
        past_key [B K P D], past_value, seqlens_k [B], total_sequence_length, cos?, sin?, position_ids?,
        attention_bias?, head_sink?)

A row appends behind seqlens_k + 1 - S tokens, so that right padding of a prompt is overwritten by the next
tokens: the fused graph rolls each row back in the same way (see row_lengths.py).
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
from ..preamble import Preamble, Rotary
from ..probes import RAGGED
from ..proposal import AttentionMask, ProofProbe, Proposal, RowLengths
from ..site import Mismatch, Operand, label

NAME = "group_query_attention"
# With several tokens after a past, onnxruntime's CPU kernel takes one row only.
_PROBES: tuple[ProofProbe, ...] = (
    (5, 0, "left", None),
    (1, 6, "holes", None),
    (5, 0, RAGGED, 2),
    (1, 6, RAGGED, 2),
    (3, 4, "right", 1),
    (2, 9, "left", 1),
)
# A window that one more probe reaches the end of.
_MAX_WINDOW = 4096
_REFUSED_INPUTS = {
    12: "has a key scale (k_scale): its cache is quantized already",
    13: "has a value scale (v_scale): its cache is quantized already",
    14: "normalizes its query inside (q_norm_weight), which onnxruntime cannot evaluate on CPU to prove it",
    15: "normalizes its key inside (k_norm_weight), which onnxruntime cannot evaluate on CPU to prove it",
    16: "is told the padding of each new chunk (query_seqlens), which appends fewer tokens than it reads",
}


def anchors(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every GroupQueryAttention node."""
    return nodes(graph, "GroupQueryAttention")


def propose(node: ir.Node) -> Proposal:
    """Describes a GroupQueryAttention node.

    Raises:
        Mismatch: It is none that this pattern covers; the sentence says why.
    """
    _refuse(node)
    query = required(node, 0, "query")
    key, value = operand(node, 1), operand(node, 2)
    if (key is None) != (value is None):
        raise Mismatch(f"{label(node)} has a key or a value; expected both, or neither when packed", node)
    new_key, new_value = key or query, value or query
    key_append = own_append(node, required(node, 3, "past_key"), new_key, 1)
    value_append = own_append(node, required(node, 4, "past_value"), new_value, 2)
    for append in (key_append, value_append):
        refuse_fixed(append.past, 2, node)
    total = required(node, 6, "total_sequence_length")
    window = integer(node, "local_window_size", -1)
    return Proposal(
        pattern=NAME,
        anchor=node,
        query=Operand(query, "BSC"),
        key=key_append,
        value=value_append,
        key_cache=Operand(key_append.past, "BHSD"),
        value_cache=Operand(value_append.past, "BHSD"),
        new_key=Operand(new_key, "BSC"),
        new_value=Operand(new_value, "BSC"),
        key_operand=key_append.present,
        value_operand=value_append.present,
        output=Operand(node.outputs[0], "BSC"),
        mask=AttentionMask(operand(node, 10), causal=True, window_left=window - 1 if window > 0 else -1),
        scale=scale_of(node),
        softcap=number(node, "softcap", 0.0),
        heads=heads_of(node),
        kv_heads=heads_of(node, "kv_num_heads"),
        preamble=Preamble(query, key, value, rotary=_rotary(node, total)),
        head_sink=operand(node, 11),
        smooth_softmax=operand(node, 11) is None and integer(node, "smooth_softmax", 0) == 1,
        lengths=RowLengths(required(node, 5, "seqlens_k"), total),
        probes=(*_PROBES, (1, window, "none", 1)) if 0 < window <= _MAX_WINDOW else _PROBES,
    )


def _refuse(node: ir.Node) -> None:
    refuse_inputs(node, _REFUSED_INPUTS)
    refuse_scores(node)
    if integer(node, "sliding_window_cache", 0):
        raise Mismatch(
            f"the cache of {label(node)} is a ring that keeps the newest tokens only (sliding_window_cache); "
            "only a cache that grows can be fused",
            node,
        )
    if integer(node, "causal", 1) != 1:
        raise Mismatch(f"{label(node)} is not causal, so that its lengths would hide keys", node)


def _rotary(node: ir.Node, total: ir.Value) -> Rotary | None:
    if not integer(node, "do_rotary", 0):
        return None
    cos, sin = required(node, 7, "cos_cache"), required(node, 8, "sin_cache")
    interleaved, position_ids = bool(integer(node, "rotary_interleaved", 0)), operand(node, 9)
    if position_ids is None:
        return Rotary(cos, sin, interleaved)
    # A first prompt reads the first of position_ids only.
    return Rotary(cos, sin, interleaved, position_ids, total)
