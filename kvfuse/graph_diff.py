"""`kvfuse.diff`: what is different between two models, as text that a person reviews and a CI job can pin."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvfuse.diff_sections import (
    Section,
    function_sections,
    graph_sections,
    metadata_lines,
    plain_section,
    version_lines,
)
from kvfuse.modelfile import read

if TYPE_CHECKING:
    from rich.console import Console

    from kvfuse.pipeline import Model

COLOURS = {"-": "red", "+": "green", " ": "dim"}
EQUAL = "the graphs are equal"


@dataclasses.dataclass(frozen=True)
class GraphDiff:
    """What is different between two models.

    Attributes:
        sections: The differences, aspect by aspect; empty when the models are equal.
    """

    sections: tuple[Section, ...]

    @property
    def equal(self) -> bool:
        """Whether the models are equal but for the order of nodes and the names of inner values."""
        return not self.sections

    @property
    def text(self) -> str:
        """The differences as text that depends on nothing but them; what a golden file holds."""
        if self.equal:
            return f"{EQUAL}\n"
        return "".join(f"{sign} {text}\n" for section in self.sections for sign, text in section.lines())

    def to_dict(self) -> dict[str, Any]:
        """The differences as plain data (what `--json` prints)."""
        return {
            "equal": self.equal,
            "sections": [
                {
                    "title": section.title,
                    "note": section.note,
                    "hunks": [
                        {
                            "count": hunk.count,
                            "lines": [{"sign": sign, "text": text} for sign, text in hunk.lines],
                        }
                        for hunk in section.hunks
                    ],
                }
                for section in self.sections
            ],
        }

    def render(self, console: Console) -> None:
        """Prints the text, in colours where the console has them."""
        from rich.text import Text

        if self.equal:
            console.print(Text(EQUAL))
        for section in self.sections:
            for sign, text in section.lines():
                console.print(Text(f"{sign} {text}", style=COLOURS.get(sign, "bold cyan")), soft_wrap=True)


def diff(first: Model, second: Model) -> GraphDiff:
    """Compares two models: interface, initializers, nodes, subgraphs, functions, metadata and versions.

    The order of nodes, the names of inner values and of nodes, doc strings, the producer's name and the noted
    shapes of inner values are not compared. External data is taken as equal when file, offset and length are;
    otherwise tensors of one type and size are read, 8 MiB at a time, up to their first difference.

    Args:
        first: A path, an onnx.ModelProto or an onnx_ir.Model; not modified.
        second: The other one.

    Raises:
        ModelError: A model cannot be read.
    """
    a, b = read(first).model, read(second).model
    sections = [
        *plain_section("versions", version_lines(a), version_lines(b)),
        *plain_section("metadata", metadata_lines(a), metadata_lines(b)),
        *graph_sections(a.graph, b.graph),
        *function_sections(a, b),
    ]
    return GraphDiff(tuple(sections))
