"""What a pattern proposes from the structure of a graph, before anything is evaluated."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import onnx_ir as ir

from .evaluate import Evaluation
from .plan import Array
from .preamble import Preamble
from .probes import Probe
from .site import BiasTerm, Operand
from .values import dtype_of
from .walk import Append, values_read

# Scores at or below this never reach a softmax next to a real score: exp() of the difference is 0 in float.
HIDDEN = -1e4


class MaskSource(Protocol):
    """Where the mask of a proposed site comes from."""

    @property
    def terms(self) -> tuple[BiasTerm, ...]:
        """The operands that could be passed through as a bias."""

    @property
    def causal(self) -> bool:
        """The attention op itself hides keys after the query (bottom-right aligned)."""

    @property
    def window_left(self) -> int:
        """The attention op's own window; -1 without one."""

    @property
    def cut(self) -> ir.Value | None:
        """The value to bind to zeros of the scores' shape before evaluating; None when there is none."""

    def reads(self) -> set[ir.Value]:
        """The graph inputs whose data the mask depends on."""

    def bias(self, evaluation: Evaluation, probe: Probe) -> Array:
        """What is added to the scores: float64, broadcastable to [B, H, S, T]."""


@dataclasses.dataclass(frozen=True)
class ScoreChain:
    """The ops between Q·K and the Softmax of a decomposed attention.

    Attributes:
        raw: The product Q·K.
        end: What the Softmax reads.
        factors: Scalars on the scores, each with its power; with a soft cap, those after its Tanh.
        inner: With a soft cap, the scalars before its Tanh; else None.
        terms: The mask operands.
        fold: How the heads of the product Q·K are folded, as in BiasTerm.
    """

    raw: ir.Value
    end: ir.Value
    factors: tuple[tuple[ir.Value, int], ...]
    inner: tuple[tuple[ir.Value, int], ...] | None
    terms: tuple[BiasTerm, ...]
    fold: str = ""
    causal: bool = False
    window_left: int = -1

    @property
    def cut(self) -> ir.Value | None:
        """The raw scores."""
        return self.raw

    def reads(self) -> set[ir.Value]:
        """The graph inputs whose data the mask depends on."""
        return values_read([self.end], {self.raw}) - {self.raw}

    def bias(self, evaluation: Evaluation, probe: Probe) -> Array:
        """The scores that the chain makes of raw scores of zero: exactly what its masks add."""
        scores = evaluation.array(self.end).astype(np.float64)
        if scores.ndim in (3, 5) and scores.shape[-2:] == (probe.sequence, probe.total):
            scores = scores.reshape(probe.batch, -1, probe.sequence, probe.total)
        return scores


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """The mask operand and attributes of an Attention node."""

    mask: ir.Value | None
    causal: bool = False
    window_left: int = -1

    @property
    def cut(self) -> ir.Value | None:
        """Nothing to cut: the mask is an operand of its own."""
        return None

    @property
    def terms(self) -> tuple[BiasTerm, ...]:
        """The mask operand."""
        if self.mask is None:
            return ()
        is_bool = dtype_of(self.mask) == ir.DataType.BOOL
        return (BiasTerm(self.mask, fill=-np.inf if is_bool else None),)

    def reads(self) -> set[ir.Value]:
        """The graph inputs whose data the mask depends on."""
        return set() if self.mask is None else values_read([self.mask], set())

    def bias(self, evaluation: Evaluation, probe: Probe) -> Array:
        """The operand as numbers, hidden keys up to T, under the node's own causal rule and window."""
        result = np.zeros((1, 1, probe.sequence, probe.total))
        if self.mask is not None:
            mask = evaluation.array(self.mask)
            added = np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask.astype(np.float64)
            missing = probe.total - added.shape[-1] if added.shape[-1] != 1 else 0
            if missing > 0:
                pads = [(0, 0)] * (added.ndim - 1) + [(0, missing)]
                added = np.pad(added, pads, constant_values=-np.inf)
            result = result + added
        return result + positions_bias(probe, self.causal, self.window_left)[:, None]


def positions_bias(probe: Probe, causal: bool, window_left: int) -> Array:
    """float64 [B, S, T]: 0 where the query at position P + s of a row sees key j, else -inf."""
    position = (probe.pasts()[:, None] + np.arange(probe.sequence))[..., None]
    key = np.arange(probe.total)
    visible = np.ones((probe.batch, probe.sequence, probe.total), bool)
    if causal:
        visible &= key <= position
    if window_left >= 0:
        visible &= key >= position - window_left
    return np.where(visible, 0.0, -np.inf)


ProofProbe = tuple[int, int, str, int | None]
PROBES: tuple[ProofProbe, ...] = (
    (5, 0, "none", None),
    (1, 6, "none", None),
    (3, 4, "left", None),
    (2, 5, "holes", None),
    (4, 3, "right", None),
)


@dataclasses.dataclass(frozen=True)
class RowLengths:
    """How GroupQueryAttention is told its lengths.

    Attributes:
        seqlens: int32 [B], the index of each row's last token.
        total: int32, the tokens of the longest row.
    """

    seqlens: ir.Value
    total: ir.Value

    def arrays(self, probe: Probe) -> dict[ir.Value, Array]:
        """Probe arrays for both."""
        last = (probe.lengths() - 1).astype(dtype_of(self.seqlens).numpy())
        rank = 0 if self.total.shape is None else len(self.total.shape)
        total = np.full((1,) * rank, probe.total, dtype_of(self.total).numpy())
        return {self.seqlens: last, self.total: total}


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A site as its structure suggests it.

    Attributes:
        pattern: The pattern's name.
        anchor: The node that stands for the site.
        query: The query of this run before any scalar factor.
        key, value: How the caches grow.
        key_cache, value_cache: The cache inputs with their layouts.
        new_key, new_value: The new tokens with their layouts.
        key_operand: The key as the scores read it (its heads are the query's heads unless it has one).
        value_operand: The value as the output reads it.
        output: The value to replace, and the order of its axes.
        mask: Where the mask comes from.
        factors: Scalars on query and key, each with its power.
        scale: The attention op's own scale (1.0 when the factors say it all).
        softcap: The attention op's own soft cap.
        heads: num_heads when the op says it, else None.
        kv_heads: kv_num_heads when the op says it, else None.
        preamble: What the op does to its operands first; `query`, `new_key` and `new_value` are then its
            inputs (all the same one where they are packed).
        head_sink, smooth_softmax: As in AttentionSite.
        lengths: How the op is told the length of each row, when it is.
        probes: (new tokens, cached tokens, padding, batch size or None for the graph's) of the proof.
    """

    pattern: str
    anchor: ir.Node
    query: Operand
    key: Append
    value: Append
    key_cache: Operand
    value_cache: Operand
    new_key: Operand
    new_value: Operand
    key_operand: ir.Value
    value_operand: ir.Value
    output: Operand
    mask: ScoreChain | AttentionMask
    factors: tuple[tuple[ir.Value, int], ...] = ()
    scale: float | None = 1.0
    softcap: float = 0.0
    heads: int | None = None
    kv_heads: int | None = None
    preamble: Preamble | None = None
    head_sink: ir.Value | None = None
    smooth_softmax: bool = False
    lengths: RowLengths | None = None
    probes: tuple[ProofProbe, ...] = PROBES

    def reads(self) -> list[ir.Value]:
        """What the op reads beside query, new tokens, mask and caches; bound on every probe."""
        values = [] if self.preamble is None else self.preamble.reads()
        values += [] if self.lengths is None else [self.lengths.seqlens, self.lengths.total]
        return values if self.head_sink is None else [*values, self.head_sink]
