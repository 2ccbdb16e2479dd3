"""From a model to what will be done to it: special source forms are brought into the plain one first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import onnx_ir as ir

from .find import find_sites, guarded
from .fuse import Decision, apply, decide
from .inline_functions import inline_functions
from .merged_decoder import MergedRewriting, plan_merged
from .site import Mismatch

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Rewriting:
    """A decision and its model: the given one, or a copy without the functions that hide a site."""

    model: ir.Model
    decision: Decision

    def apply(
        self, options: Mapping[str, int | float | str], fingerprint: str, metadata: Mapping[str, Any]
    ) -> ir.Model:
        """Edits the model as decided and returns it; see `fuse.apply`."""
        apply(self.model, self.decision, options, fingerprint, metadata)
        return self.model


def plan_rewriting(model: ir.Model) -> Rewriting | MergedRewriting:
    """Decides what will be done; changes nothing."""
    inlined = _attempt(inline_functions, model) or model
    merged = _attempt(plan_merged, inlined)
    return Rewriting(inlined, decide(inlined.graph, find_sites(inlined))) if merged is None else merged


def _attempt(step: Callable[[ir.Model], Result | None], model: ir.Model) -> Result | None:
    """What a step makes of a model; None when an odd graph trips it, and the model is then read as it is."""
    try:
        return guarded(step, model)
    except Mismatch:
        return None
