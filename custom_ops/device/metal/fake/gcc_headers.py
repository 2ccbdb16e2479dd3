"""Copies metal-cpp for g++, which has no blocks (Apple's closures for C) and is stricter here and there.

    gcc_headers.py METAL_CPP TARGET

Block types become function pointers, block literals empty functions. Nothing that kvfuse calls takes a block,
so what is compiled of metal-cpp here is what a Mac compiles. Lines keep their numbers.
"""

import re
import sys
from pathlib import Path

CHANGES = (
    # ^(Device* device) { ... } and ^void(...){ ... }; no body in metal-cpp has braces of its own.
    (
        re.compile(r"\^(?:void)?(\([^()]*\))\s*\{[^{}]*\}"),
        lambda block: "+[]" + block[1] + " {" + "\n" * block[0].count("\n") + "}",
    ),
    (re.compile(r"\(\^"), lambda _: "(*"),
    (re.compile(r"\b__block\b"), lambda _: ""),
    # g++ wants attributes on declarations, not on definitions.
    (re.compile(r' __attribute__\(\(no_sanitize\("undefined"\)\)\)(?=\n\{)'), lambda _: ""),
    # g++ binds no reference to an element of a packed struct.
    (re.compile(r"return elements\[idx\];"), lambda _: "return *(elements + idx);"),
)


def for_gcc(text: str) -> str:
    """Returns C++ `text` with the same lines and none of what g++ refuses."""
    for pattern, change in CHANGES:
        text = pattern.sub(change, text)
    return text


def main(source: Path, target: Path) -> None:
    """Writes the copy, touching only files that change, so that nothing is compiled again for nothing."""
    for folder in ("Foundation", "Metal"):
        for header in sorted((source / folder).glob("*.hpp")):
            copy = target / folder / header.name
            text = for_gcc(header.read_text(encoding="utf-8"))
            if not copy.is_file() or copy.read_text(encoding="utf-8") != text:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
