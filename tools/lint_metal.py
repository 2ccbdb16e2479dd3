#!/usr/bin/env python3
"""Checks the address spaces of Metal kernels with clang: `tools/lint_metal.py [FILES.metal]`.

The emulated and the CUDA device know no address spaces, so a pointer into the wrong one would only be refused
by Apple's compiler. Here clang refuses it, through the package `libclang` of PyPI (a development tool).
Prints what clang says, at lines of the Metal source. Exit code 0: nothing; 1: errors; 77: no libclang.
"""

import re
import sys
import tempfile
from pathlib import Path

CUSTOM_OPS = Path(__file__).resolve().parents[1] / "custom_ops"
sys.path.append(str(CUSTOM_OPS / "metal"))

import translate  # noqa: E402 - found through the line above

FLAGS = ["-std=c++17", "-fsyntax-only", "-nostdinc", "-fsigned-char", f"-I{CUSTOM_OPS}"]
QUIET = ["-Wno-unknown-attributes", "-Wno-duplicate-decl-specifier", "-Wno-unused-function"]


def main(files: list[str]) -> int:
    """Lints files, all of ours when there are none; returns the exit code."""
    try:
        from clang import cindex
    except ImportError:
        print("no libclang: install the package 'libclang'")
        return 77
    paths = files or [str(path) for path in sorted((CUSTOM_OPS / "metal").glob("*.metal"))]
    with tempfile.TemporaryDirectory() as folder:
        translated = Path(folder) / "kernels.cc"
        if translate.main(["lint", "-", str(translated), *paths]) != 0:
            return 1
        unit = cindex.Index.create().parse(str(translated), args=[*FLAGS, *QUIET])
        lines = translated.read_text(encoding="utf-8").splitlines()
    for found in unit.diagnostics:
        print(f"{source_line(lines, found.location.line)}:{found.location.column}: {found.spelling}")
    return 1 if any(found.severity >= cindex.Diagnostic.Error for found in unit.diagnostics) else 0


def source_line(lines: list[str], number: int) -> str:
    """`file:line` of the Metal source, as the last `#line` before a line says."""
    file, first = "translated", 1
    for index, line in enumerate(lines[:number]):
        if directive := re.match(r'#line (\d+) "(.*)"', line):
            file, first = directive.group(2), int(directive.group(1)) - index - 1
    return f"{file}:{number + first - 1}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
