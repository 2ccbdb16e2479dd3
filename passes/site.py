"""The canonical description of one attention with its growing cache, and the reason when there is none.

Dims: B batch_size, H num_heads, K kv_num_heads, S sequence_length, P past_sequence_length, T = P + S, D
head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import onnx_ir as ir

if TYPE_CHECKING:
    from .preamble import Preamble

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
    """The name a person finds in a graph viewer: `Op 'node name'` or the value's name, always in one line."""
    if thing is None:
        return ""
    name = str(thing.name)
    if isinstance(thing, ir.Node):
        name = f"{thing.op_type} '{thing.name or (thing.outputs[0].name if thing.outputs else '')}'"
    return name if name.isprintable() else name.encode("unicode_escape").decode()


@dataclasses.dataclass(frozen=True)
class Operand:
    """A value and the order of its axes (a key of LAYOUTS, or "BSC" for packed heads).

    Attributes:
        value: The value.
        layout: The order of its axes.
        stacked_index: The place on a leading axis where keys and values are stacked in one value, else None.
    """

    value: ir.Value
    layout: str
    stacked_index: int | None = None

    @property
    def leading(self) -> int:
        """How many axes come before those of the layout."""
        return 0 if self.stacked_index is None else 1

    @property
    def sequence_axis(self) -> int:
        """The axis of the sequence in the value as it is."""
        return self.leading + (1 if self.layout == "BSC" else self.layout.index("S"))

    @property
    def batch_axis(self) -> int:
        """The axis of the batch in the value as it is."""
        return self.leading + self.layout.index("B")

    def shape(self, batch: int, heads: int, sequence: int, head_dim: int) -> tuple[int, ...]:
        """The value's shape for the given sizes."""
        if self.layout == "BSC":
            return batch, sequence, heads * head_dim
        sizes = {"B": batch, "H": heads, "S": sequence, "D": head_dim}
        return (2,) * self.leading + tuple(sizes[axis] for axis in self.layout)


class Heads(NamedTuple):
    """num_heads, kv_num_heads, head_dim and the value head size."""

    query: int
    kv: int
    head_dim: int
    value_head_dim: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """H·D, K·D and K·V: query, key and value with their heads side by side."""
        return self.query * self.head_dim, self.kv * self.head_dim, self.kv * self.value_head_dim


@dataclasses.dataclass(frozen=True)
class BiasTerm:
    """One summand of the attention bias that is passed through.

    Attributes:
        value: The operand of the original graph: a number added to the scores, or a condition.
        fill: None for an added number, else what a hidden score becomes (the condition is then a bool).
        visible_when: The truth value of the condition that lets the score through.
        factor: What the original multiplies the sum by after adding (1.0 almost always).
        fold: How the heads lie in its axes: "" on one of their own; "batch": [B*H, S, T]; "groups": [B, K, G,
            S, T].
    """

    value: ir.Value
    fill: float | None = None
    visible_when: bool = True
    factor: float = 1.0
    fold: str = ""


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
        preamble: What the original op does to its operands first; `query`, `key` and `value` are then its
            inputs (all the same one where they are packed).
        head_sink: One more logit per head [H] in the denominator of the softmax.
        smooth_softmax: One more logit of 0 there.
        seqlens: int32 [B], the index of each row's last token; a row appends behind seqlens + 1 - S tokens.
        stacked: Keys and values are stacked on a leading axis of one cache, keys first.
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
    preamble: Preamble | None = None
    head_sink: ir.Value | None = None
    smooth_softmax: bool = False
    seqlens: ir.Value | None = None
    stacked: bool = False
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
        if self.past_key is self.past_value and not self.stacked:
            raise Mismatch(
                f"key and value share one cache input, {label(self.past_key)} (a latent or stacked cache)",
                self.anchor,
            )

    @property
    def heads(self) -> Heads:
        """The sizes."""
        return Heads(self.num_heads, self.kv_num_heads, self.head_dim, self.value_head_dim)

    @property
    def caches(self) -> tuple[ir.Value, ...]:
        """The two cache inputs, or the one that stacks both."""
        return (self.past_key,) if self.stacked else (self.past_key, self.past_value)

    @property
    def cache_operands(self) -> tuple[Operand, Operand]:
        """The key's and the value's cache input with their layouts."""
        indices = (0, 1) if self.stacked else (None, None)
        return (
            Operand(self.past_key, self.cache_layout[0], indices[0]),
            Operand(self.past_value, self.cache_layout[1], indices[1]),
        )


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
