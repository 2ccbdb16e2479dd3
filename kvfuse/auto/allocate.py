"""The cheapest formats, one for each layer, whose predicted damage stays within a budget.

The prediction is a sum over layers of squared relative errors of their attention outputs, times one factor
for the whole model that is measured: independent small errors add up in the mean square, and the divergence
of the logits grows with the square of what disturbs them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from kvfuse.formats import KvFormat


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A format that a layer could have.

    Attributes:
        format: The format.
        bytes_per_token: What a low-bit token of the layer takes.
        key_error, value_error: Relative errors of the layer's attention output with only that side in it.
    """

    format: KvFormat
    bytes_per_token: float
    key_error: float
    value_error: float

    @property
    def square(self) -> float:
        """The squared error of both sides together; the two are independent."""
        return self.key_error**2 + self.value_error**2


def allocate(layers: Mapping[str, Sequence[Candidate]], budget: float) -> dict[str, Candidate]:
    """Picks one candidate for each layer so that the sum of squares is within `budget` if that can be.

    Every layer begins with its cheapest candidate; the step that takes away the most error for a byte is
    taken first, along the lower convex hull of each layer's candidates. That is the exact optimum for every
    budget that one of these steps ends at.
    """
    hulls = {layer: _hull(candidates) for layer, candidates in layers.items()}
    steps = [
        (_slope(first, second), layer, position + 1)
        for layer, hull in hulls.items()
        for position, (first, second) in enumerate(itertools.pairwise(hull))
    ]
    chosen = {layer: hull[0] for layer, hull in hulls.items()}
    total = sum(candidate.square for candidate in chosen.values())
    # Ties go to the layer that comes first in the graph: the choice is the same every time.
    order = {layer: position for position, layer in enumerate(layers)}
    for _, layer, position in sorted(steps, key=lambda step: (-step[0], order[step[1]], step[2])):
        if total <= budget:
            break
        total += hulls[layer][position].square - chosen[layer].square
        chosen[layer] = hulls[layer][position]
    return chosen


def _slope(first: Candidate, second: Candidate) -> float:
    return (first.square - second.square) / (second.bytes_per_token - first.bytes_per_token)


def _hull(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates on the lower convex hull of (bytes, square), from the cheapest to the best."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.bytes_per_token, c.square)):
        if best and candidate.square >= best[-1].square:
            continue
        while len(best) > 1 and _slope(best[-2], best[-1]) <= _slope(best[-1], candidate):
            best.pop()
        best.append(candidate)
    return best
