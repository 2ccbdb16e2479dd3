"""From a model to what will be done to it: special source forms are brought into the plain one first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from .find import find_sites
from .fuse import Decision, apply, decide
from .inline_functions import inline_functions
from .merged_decoder import MergedRewriting, plan_merged


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
    inlined = inline_functions(model)
    merged = plan_merged(inlined)
    return Rewriting(inlined, decide(inlined.graph, find_sites(inlined))) if merged is None else merged
