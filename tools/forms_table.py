"""README's table of source forms: from the passes' docstrings, the text cases and the tests' exported graphs.

python tools/forms_table.py            # prints it
python tools/forms_table.py --write    # puts it into README.md
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
CASES = Path("tests/passes/cases")
CORPUS = ROOT / "tests" / "data" / "corpus"
BEGIN, END = "<!-- forms: tools/forms_table.py -->\n", "<!-- end of forms -->\n"
# Forms around an attention, whatever its pattern: the pass that brings each into the plain form.
AROUND = ("inline_functions", "merged_decoder")


def patterns() -> list[str]:
    """The names of the source patterns."""
    found = {path.stem for path in (ROOT / "passes" / "patterns").glob("*.py")}
    return sorted(found - {"__init__", "unsupported"})


def forms() -> list[str]:
    """The names of all source forms; each has a folder of cases."""
    return [*patterns(), *AROUND]


def table() -> str:
    """The table as Markdown."""
    corpus = _fused_corpus()
    lines = [
        "| form | what it is | emitted by | cases: fused / refused | exported graphs in `tests/data` |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for form in forms():
        what, source = _described(form)
        texts = [path.read_text() for path in sorted((ROOT / CASES / form).glob("*.onnxtxt"))]
        fused = sum("\n# AFTER\n" in text for text in texts)
        graphs = corpus[form] if form in patterns() else "–"
        cases = f"[{fused} / {len(texts) - fused}]({CASES.as_posix()}/{form})"
        lines.append(f"| `{form}` | {what} | {source} | {cases} | {graphs} |")
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """The table that stands between the two marks.

    Raises:
        ValueError: The marks are not there.
    """
    return text[slice(*_span(text))]


def write(text: str) -> str:
    """The text with the table of today."""
    start, stop = _span(text)
    return text[:start] + table() + text[stop:]


def _span(text: str) -> tuple[int, int]:
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(
            f"[README.md] expected one {BEGIN.strip()} and one {END.strip()}; found another number"
        )
    return text.index(BEGIN) + len(BEGIN), text.index(END)


def _described(form: str) -> tuple[str, str]:
    """The first sentence of a module's docstring, and who emits the form."""
    folder = ROOT / "passes" / "patterns" if form in patterns() else ROOT / "passes"
    text = ast.get_docstring(ast.parse((folder / f"{form}.py").read_text())) or ""
    source = re.search(r"^Emitted by: (.*?)\.$", text, re.MULTILINE | re.DOTALL)
    what = text.splitlines()[0].rstrip(".")
    return what.replace("|", "\\|"), "–" if source is None else " ".join(source[1].split())


@cache
def _fused_corpus() -> Counter[str]:
    """How many of the exported graphs under tests/data have a fused site of each pattern."""
    import kvfuse

    count: Counter[str] = Counter()
    for path in sorted(CORPUS.glob("*.onnx")):
        count.update({site.pattern for site in kvfuse.inspect(path).fused})
    return count


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(write(README.read_text()))
    else:
        print(table(), end="")
