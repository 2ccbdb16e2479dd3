"""Which present a caller feeds back into which past, as far as the names of inputs and outputs say.

A graph may append keys to what its caller passes in as values: nothing inside tells, only the names do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from .site import AttentionSite, Mismatch, label

# Words that tell a cache input from its output, or both from other values.
_SIDES = {"past", "present", "input", "output", "inputs", "outputs", "in", "out", "new", "updated", "cache"}


def crossed(
    sites: Sequence[AttentionSite], outputs: Mapping[ir.Value, Sequence[ir.Value]]
) -> list[tuple[AttentionSite, Mismatch]]:
    """The sites that append a cache to what, by its name, is fed back into another one.

    Args:
        sites: The sites to fuse.
        outputs: The graph outputs of each appended tensor.
    """
    belongs = {stem(output): output for found in outputs.values() for output in found}
    result = []
    for site in sites:
        for past, present in ((site.past_key, site.present_key), (site.past_value, site.present_value)):
            own, named = outputs.get(present, ()), belongs.get(stem(past))
            if named is not None and own and all(stem(output) != stem(past) for output in own):
                reason = (
                    f"{label(past)} grows into {label(own[0])}; expected {label(named)}, which has the same "
                    "name otherwise"
                )
                result.append((site, Mismatch(reason, site.anchor)))
                break
    return result


def stem(value: ir.Value) -> tuple[str, ...]:
    """The words and numbers of a name without those that tell past from present."""
    name = str(value.name).lower().replace("past_key_values", "")
    return tuple(word for word in re.findall(r"[a-z]+|\d+", name) if word not in _SIDES)
