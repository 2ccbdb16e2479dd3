"""Metal source as tokens that know their file and line, local includes put in place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<string>"(?:\\.|[^"\\\n])*")
    |(?P<char>'(?:\\.|[^'\\\n])+')
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<space>\n|[^\S\n]+)
    |(?P<punct>::|->|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_LOCAL_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
_METAL_INCLUDE = re.compile(r"\s*#\s*include\s+<metal_\w+>|\s*#\s*pragma\s+once")


class TranslationError(Exception):
    """One sentence that begins with file:line."""


@dataclass(eq=False)
class Token:
    """A piece of source; `out` is what takes its place, `before` and `after` are put around it."""

    kind: str
    text: str
    file: str
    line: int
    out: str = field(default="")
    before: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        self.out = self.text

    @property
    def blank(self) -> bool:
        """Whether the token means nothing to the grammar."""
        return self.kind in ("space", "comment", "directive")

    def error(self, expected: str) -> TranslationError:
        """The sentence that something else was expected here."""
        return TranslationError(f"{self.file}:{self.line}: [metal] expected {expected}; found '{self.text}'")

    def fail(self, expected: str) -> NoReturn:
        """Raises that sentence."""
        raise self.error(expected)


def tokens(text: str, file: str) -> Iterator[Token]:
    """All tokens of a text; joined they are the text."""
    line = 1
    for match in _TOKEN.finditer(text):
        yield Token(str(match.lastgroup), match.group(), file, line)
        line += match.group().count("\n")


def read(path: Path, name: str, seen: set[Path]) -> list[Token]:
    """The tokens of a file with every local include in place, each file once, `#line` at the seams."""
    if path.resolve() in seen:
        return []
    seen.add(path.resolve())
    result = [Token("directive", f'#line 1 "{name}"', name, 0), Token("space", "\n", name, 0)]
    for token in tokens(path.read_text(encoding="utf-8"), name):
        include = _LOCAL_INCLUDE.match(token.text) if token.kind == "directive" else None
        if include:
            inner = (path.parent / include.group(1)).resolve()
            if not inner.is_file():
                token.fail(f"the included file {inner.name} beside it")
            result += read(inner, inner.name, seen)
            resume = f'\n#line {token.line + 1} "{name}"'
            result.append(Token("directive", resume, name, token.line))
        elif token.kind == "directive" and _METAL_INCLUDE.match(token.text):
            token.out = ""
            result.append(token)
        else:
            result.append(token)
    return result
