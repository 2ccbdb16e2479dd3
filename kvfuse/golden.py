"""A difference pinned in a file: what a CI job compares with, and how the file is refreshed."""

from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfuse.errors import OptionError
from kvfuse.graph_diff import COLOURS, GraphDiff

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True)
class GoldenCheck:
    """How a difference compares with the one in a golden file.

    Attributes:
        path: The golden file.
        updated: The file was written now.
        changes: Lines of a unified diff from the file to the difference; empty when they are the same.
    """

    path: str
    updated: bool
    changes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the file holds the difference (now)."""
        return self.updated or not self.changes

    def to_dict(self) -> dict[str, Any]:
        """The check as plain data (what `--json` prints)."""
        return {
            "golden": self.path,
            "passed": self.passed,
            "updated": self.updated,
            "changes": list(self.changes),
        }

    def render(self, console: Console) -> None:
        """Prints one sentence, and what changed."""
        from rich.text import Text

        for line in () if self.updated else self.changes:
            console.print(Text(line, style=COLOURS.get(line[:1], "bold cyan")), soft_wrap=True)
        if self.updated:
            sentence = f"{self.path} was written"
        elif self.changes:
            sentence = (
                f"the difference is not the one in {self.path}; review it, then run again with --update"
            )
        else:
            sentence = f"the difference is the one in {self.path}"
        console.print(Text(sentence), soft_wrap=True)


def check_golden(found: GraphDiff, path: str | os.PathLike[str], *, update: bool = False) -> GoldenCheck:
    """Compares a difference with a golden file, or writes the file.

    Args:
        found: From `kvfuse.diff`.
        path: The golden file, UTF-8 text.
        update: Write the file (whole or not at all) instead of failing.

    Raises:
        OptionError: The file does not exist and `update` is not set, or it cannot be read or written.
    """
    file = Path(path)
    try:
        kept = file.read_text(encoding="utf-8") if file.exists() else None
        if kept is None and not update:
            raise OptionError(f"[golden] expected the file {file}, or --update to write it; found none")
        changes = tuple(
            difflib.unified_diff(
                (kept or "").splitlines(), found.text.splitlines(), "golden", "now", "", "", 3, ""
            )
        )
        if update and changes:
            _replace(file, found.text)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"[golden] expected a text file at {file}; found: {error}") from error
    return GoldenCheck(str(file), update and bool(changes), changes)


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
