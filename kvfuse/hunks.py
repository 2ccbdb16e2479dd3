"""Lines, the hunks in which two lists of them differ, and hunks that are alike told once."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import defaultdict
from collections.abc import Sequence

from kvfuse.text import Name, Parts, Value, show

_CONTEXT = 2
_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of canonical text.

    Attributes:
        parts: What is compared.
        note: What is only shown, behind the line.
    """

    parts: Parts
    note: str = ""


SignedLine = tuple[str, Line]  # "-" only in the first, "+" only in the second, " " in both


@dataclasses.dataclass(frozen=True)
class Hunk:
    """Lines that differ, with some around them; and how many hunks are alike but for numbers in names."""

    lines: tuple[tuple[str, str], ...]
    count: int = 1


def compare(first: Sequence[Line], second: Sequence[Line], context: int = _CONTEXT) -> list[list[SignedLine]]:
    """The hunks in which two lists differ."""
    matcher = difflib.SequenceMatcher(
        None, [line.parts for line in first], [line.parts for line in second], autojunk=False
    )
    hunks = []
    for group in matcher.get_grouped_opcodes(context):
        lines: list[SignedLine] = []
        for tag, start, end, other_start, other_end in group:
            if tag == "equal":
                lines += [(" ", line) for line in second[other_start:other_end]]
            else:
                lines += [("-", line) for line in first[start:end]]
                lines += [("+", line) for line in second[other_start:other_end]]
        hunks.append(lines)
    return hunks


def fold(hunks: Sequence[Sequence[SignedLine]]) -> list[Hunk]:
    """Each kind of hunk once, as its first one reads, in the order in which they appear."""
    groups: dict[tuple[tuple[str, ...], ...], list[Sequence[SignedLine]]] = defaultdict(list)
    for hunk in hunks:
        changed = [(sign, line) for sign, line in hunk if sign != " "]
        groups[_pattern(changed)].append(hunk)
    return [Hunk(_render(alike[0]), len(alike)) for alike in groups.values()]


def single_lines(first: Sequence[Line], second: Sequence[Line]) -> list[list[SignedLine]]:
    """The lines in which two lists differ, each a hunk of its own, for lists whose order says nothing."""
    known, other = {line.parts for line in first}, {line.parts for line in second}
    removed = [("-", line) for line in first if line.parts not in other]
    return [[entry] for entry in [*removed, *(("+", line) for line in second if line.parts not in known)]]


class _Renumbered:
    """Names for a hunk that depend on nothing outside it."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._counts: dict[str, int] = defaultdict(int)
        self._numbers: dict[str, str] = {}

    def value(self, part: Value) -> Value:
        """The inner value's name, counted from 1 in this hunk."""
        if part not in self._values:
            op = part.rsplit(".", 1)[0]
            self._counts[op] += 1
            self._values[part] = f"{op}.{self._counts[op]}"
        return Value(self._values[part])

    def name(self, part: str) -> str:
        """The name with each number replaced by which of the hunk's numbers it is."""
        return _NUMBER.sub(
            lambda found: f"#{self._numbers.setdefault(found.group(), str(len(self._numbers)))}", part
        )


def _pattern(lines: Sequence[SignedLine]) -> tuple[tuple[str, ...], ...]:
    names = _Renumbered()

    def part_pattern(part: str) -> str:
        if isinstance(part, Value):
            return names.value(part)
        return names.name(part) if isinstance(part, Name) else part

    return tuple((sign, *(part_pattern(part) for part in line.parts)) for sign, line in lines)


def _render(lines: Sequence[SignedLine]) -> tuple[tuple[str, str], ...]:
    names = _Renumbered()
    rendered = []
    for sign, line in lines:
        parts = (names.value(part) if isinstance(part, Value) else part for part in line.parts)
        text = "".join(show(part) for part in parts)
        rendered.append((sign, f"{text}  # {line.note}" if line.note else text))
    return tuple(rendered)
