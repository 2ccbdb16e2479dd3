"""`--format auto`: chooses every layer's cache format from the model itself and, better, from a short run.

    weights.py   without a probe: what the key projection's bias does to 4-bit keys
    probe.py     with a probe: the operands of every attention, and what a choice costs in the logits
    attention.py one attention by itself: the error of its output for a format
    allocate.py  the cheapest formats whose predicted damage stays within a budget
    choose.py    how they come together
    choice.py    the outcome, for people and machines
    rewritten.py the model between rewriting and writing: its ops, their formats, sessions of it

Nothing here runs when the rewritten model does: the choice is written into the nodes' attributes.
"""

from __future__ import annotations

from .choice import AutoChoice, LayerChoice
from .choose import DEFAULT_TARGET, choose_formats
from .probe import Probe, ProbeLike, Progress, read_probe
from .rewritten import set_formats

__all__ = [
    "DEFAULT_TARGET",
    "AutoChoice",
    "LayerChoice",
    "Probe",
    "ProbeLike",
    "Progress",
    "choose_formats",
    "read_probe",
    "set_formats",
]
