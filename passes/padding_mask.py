"""The masks of com.microsoft's attentions: an additive bias, and a padding mask beside it."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from .evaluate import Evaluation
from .plan import Array
from .probes import Probe
from .proposal import AttentionMask
from .site import BiasTerm, Mismatch, label
from .walk import values_read


@dataclasses.dataclass(frozen=True)
class PaddedMask(AttentionMask):
    """An additive bias, the op's causal rule, and a [B, T] mask of which zeros hide keys.

    Attributes:
        padding: The padding mask, or None.
        hidden: What a hidden key's score gets.
    """

    padding: ir.Value | None = None
    hidden: float = -1e4

    @property
    def terms(self) -> tuple[BiasTerm, ...]:
        """The bias; none when a padding mask stands beside it, which is no operand of the op's."""
        return () if self.padding is not None else super().terms

    def reads(self) -> set[ir.Value]:
        """The graph inputs whose data the mask depends on."""
        padding = set() if self.padding is None else values_read([self.padding], set())
        return super().reads() | padding

    def bias(self, evaluation: Evaluation, probe: Probe) -> Array:
        """The bias and what the padding mask hides.

        Raises:
            Mismatch: The padding mask is not [B, T]: it counts tokens, or masks queries too.
        """
        result = super().bias(evaluation, probe)
        if self.padding is None:
            return result
        attend = evaluation.array(self.padding)
        if attend.shape != (probe.batch, probe.total):
            raise Mismatch(
                f"the padding mask {label(self.padding)} has shape {list(attend.shape)}; expected "
                "[batch, all tokens]",
                self.padding,
            )
        return result + np.where(attend.astype(bool), 0.0, self.hidden)[:, None, None]
