"""Writes Metal texts as one C++ function that returns them, with the project's own includes in place.

    embed_kernels.py FUNCTION TARGET.cc KERNELS.metal…

Metal compiles text at run time and finds no files then, so `#include "..."` is replaced by the file, once
each; includes of Metal's own headers, in angle brackets, stay. `#line` keeps the compiler's line numbers.
"""

import re
import sys
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")
PIECE = 2000  # bytes in one string literal: compilers promise no more than some thousands


def inline(path: Path, seen: set[Path]) -> list[str]:
    """Returns the lines of `path` with its includes in place; a file already in `seen` gives none."""
    if path.resolve() in seen:
        return []
    seen.add(path.resolve())
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        found = INCLUDE.match(line)
        if found:
            lines += inline(path.parent / found[1], seen)
            lines.append(f'#line {number + 1} "{path.name}"')
        else:
            lines.append("" if PRAGMA_ONCE.match(line) else line)
    return lines


def literal(text: str) -> str:
    """Returns `text` as the C++ literals of its UTF-8 bytes."""
    data = text.encode()
    pieces = []
    for start in range(0, len(data), PIECE):
        # Octal escapes end after three digits, whatever follows.
        escaped = "".join(
            chr(byte) if 32 <= byte < 127 and byte not in b'"\\?' else f"\\{byte:03o}"
            for byte in data[start : start + PIECE]
        )
        pieces.append(f'      "{escaped}",')
    return "\n".join(pieces)


def main(function: str, target: Path, sources: list[Path]) -> None:
    """Writes the C++ file."""
    seen: set[Path] = set()
    text = "\n".join(line for source in sources for line in inline(source, seen)) + "\n"
    target.write_text(
        f"""// Made by embed_kernels.py from {", ".join(source.name for source in sources)}.
#include <string>

namespace kvfuse {{

const std::string& {function}() {{
  static const char* const pieces[] = {{
{literal(text)}
  }};
  static const std::string text = [] {{
    std::string joined;
    for (const char* piece : pieces) joined += piece;
    return joined;
  }}();
  return text;
}}

}}  // namespace kvfuse
""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [Path(source) for source in sys.argv[3:]])
