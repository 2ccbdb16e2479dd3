"""The canonical description of one attention with its growing cache, and the reason when there is none.

Dims: B batch_size, H num_heads, K kv_num_heads, S sequence_length, P past_sequence_length, T = P + S, D
head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

# The order of the axes of a 4-D operand, or "BSC" for a packed 3-D one (C = heads * head_dim).
LAYOUTS: Mapping[str, tuple[int, int, int, int]] = {
    # Permutation that brings the layout to B, heads, sequence, head_dim.
    "BHSD": (0, 1, 2, 3),
    "BSHD": (0, 2, 1, 3),
    "SBHD": (1, 2, 0, 3),
    "BHDS": (0, 1, 3, 2),
}


class Mismatch(Exception):  # noqa: N818 (a finding about a graph, not an error)
    """Why a group cannot be fused: one sentence, and the node or value where it shows.

    Args:
        reason: A sentence that names the value, what was expected and what was found.
        node: The node (or value) the sentence is about; only its name is kept.
    """

    def __init__(self, reason: str, node: ir.Node | ir.Value | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = label(node)


class TooLarge(Mismatch):
    """A probe needs more memory than an analysis may take."""


def label(thing: ir.Node | ir.Value | None) -> str:
    """The name a person finds in a graph viewer: `Op 'node name'` or the value's name."""
    if thing is None:
        return ""
    if isinstance(thing, ir.Node):
        return f"{thing.op_type} '{thing.name or (thing.outputs[0].name if thing.outputs else '')}'"
    return str(thing.name)


@dataclasses.dataclass(frozen=True)
class Operand:
    """A value and the order of its axes (a key of LAYOUTS, or "BSC" for packed heads)."""

    value: ir.Value
    layout: str

    @property
    def sequence_axis(self) -> int:
        """The axis of the sequence in the value as it is."""
        return 1 if self.layout == "BSC" else self.layout.index("S")

    @property
    def batch_axis(self) -> int:
        """The axis of the batch in the value as it is."""
        return self.layout.index("B")

    def shape(self, batch: int, heads: int, sequence: int, head_dim: int) -> tuple[int, ...]:
        """The value's shape for the given sizes."""
        if self.layout == "BSC":
            return batch, sequence, heads * head_dim
        sizes = {"B": batch, "H": heads, "S": sequence, "D": head_dim}
        return tuple(sizes[axis] for axis in self.layout)


@dataclasses.dataclass(frozen=True)
class BiasTerm:
    """One summand of the attention bias that is passed through.

    Attributes:
        value: The operand of the original graph: a number added to the scores, or a condition.
        fill: None for an added number, else what a hidden score becomes (the condition is then a bool).
        visible_when: The truth value of the condition that lets the score through.
        factor: What the original multiplies the sum by after adding (1.0 almost always).
    """

    value: ir.Value
    fill: float | None = None
    visible_when: bool = True
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Mask:
    """What the mask of a site means, found by evaluating it.

    Attributes:
        kind: "none", "causal", "window", each with "+padding", "padding", or "other" (passed through as a
            bias).
        causal: The query at position p sees keys 0..p.
        window_left: The query at p sees keys p - window_left..p; -1 without a window.
        padding: The graph input [B, T] that hides keys where it is 0.
        bias: The summands that are passed through when the kind is "other".
        proof: The probes and the keys that each query saw, as plain data for the report.
    """

    kind: str
    causal: bool = False
    window_left: int = -1
    padding: ir.Value | None = None
    bias: tuple[BiasTerm, ...] = ()
    proof: tuple[Mapping[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """One attention with its growing cache, whatever graph pattern it came from.

    Attributes:
        pattern: The name of the pattern that found it.
        anchor: The node that the report names (the Softmax or the Attention node).
        query, key, value: The tokens of this run only.
        output: The value that the op's output replaces.
        output_layout: The order of its axes.
        past_key, past_value: The cache inputs of the graph.
        present_key, present_value: The appended tensors.
        cache_layout: Layouts of the key's and the value's cache input.
        num_heads, kv_num_heads, head_dim, value_head_dim: Sizes.
        dtype: Element type of the cache inputs.
        scale, softcap: As the op's attributes.
        mask: What the mask means.
        evidence: The probes of the numerical proof and the errors they gave, as plain data for the report.
        roles: What the symbolic dims of the graph's inputs were proven to mean.
        layer: The state key; filled in when the sites of a graph are known.
    """

    pattern: str
    anchor: ir.Node
    query: Operand
    key: Operand
    value: Operand
    output: ir.Value
    output_layout: str
    past_key: ir.Value
    past_value: ir.Value
    present_key: ir.Value
    present_value: ir.Value
    cache_layout: tuple[str, str]
    num_heads: int
    kv_num_heads: int
    head_dim: int
    value_head_dim: int
    dtype: ir.DataType
    scale: float
    softcap: float = 0.0
    mask: Mask = Mask("none")
    evidence: tuple[Mapping[str, Any], ...] = ()
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer: str = ""

    def __post_init__(self) -> None:
        if self.kv_num_heads < 1 or self.num_heads % self.kv_num_heads:
            raise Mismatch(
                f"expected num_heads to be a multiple of kv_num_heads; found {self.num_heads} and "
                f"{self.kv_num_heads}",
                self.anchor,
            )
        if not self.scale > 0.0 or self.scale == float("inf"):
            raise Mismatch(f"expected a positive scale; found {self.scale}", self.anchor)
        if self.past_key is self.past_value:
            raise Mismatch(
                f"key and value share one cache input, {label(self.past_key)} (a latent or stacked cache)",
                self.anchor,
            )

    @property
    def caches(self) -> tuple[ir.Value, ir.Value]:
        """The two cache inputs."""
        return self.past_key, self.past_value


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An attention that stays as it is.

    Attributes:
        pattern: The pattern that saw it ("" when none claims it).
        node: The node's name, as a person finds it.
        reason: One sentence.
        cached: It reads a cache input; without, it is listed as seen only.
        anchor: The node itself.
    """

    pattern: str
    node: str
    reason: str
    cached: bool
    anchor: ir.Node
