"""Translates Metal kernels to C++ for the emulated device and to CUDA; run by CMake, needs only Python.

    translate.py emulated SYMBOL OUT IN.metal…   C++ that defines `const Program& SYMBOL()`
    translate.py cuda SYMBOL OUT IN.metal…       the same as CUDA
    translate.py lint - OUT IN.metal…            C++ for tools/lint_metal.py, address spaces kept
    translate.py flat - OUT IN.metal…            one Metal text, local includes put in place

Line numbers are kept by `#line`, so that compilers and sanitizers speak of the Metal source. What the shims
(device/shim) do not know is refused with file:line. A function constant may name its values in a comment
behind it, on its line: `constant int kDot [[function_constant(0)]]; // values: 0, 1`; a dispatch with
another is an error.

Metal compiles a kernel for the function constants of a dispatch when it is first needed. For CUDA that
happens at build time, for the combinations that the source asks for in comments, each a product of the
values it names: `// cuda: kDot 1, kBits 4 8`. A combination that is not there is run by a kernel that reads
its constants from memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from msl_program import Program
from msl_text import joined
from msl_tokens import Token, TranslationError, read
from msl_words import SWIZZLES, VECTORS
from write_cuda import cuda
from write_emulated import emulated


def main(arguments: list[str]) -> int:
    """Runs the command line above: 0, or 1 after a sentence on stderr."""
    target, symbol, out, *inputs = arguments
    seen: set[Path] = set()
    source: list[Token] = []
    try:
        for path in inputs:
            source += [*read(Path(path), Path(path).name, seen), Token("space", "\n", path, 0)]
        if target == "flat":
            text = "".join(t.out for t in source)
        else:
            text = WRITERS[target](Program(source), symbol, Path(out))
    except TranslationError as error:
        print(error, file=sys.stderr)
        return 1
    Path(out).write_text(text, encoding="utf-8")
    return 0


def lint(program: Program, _symbol: str, _out: Path) -> str:
    """C++ with the address spaces of device/lint/metal.h: its vectors have swizzles, no constructors."""
    for i, token in enumerate(program.code):
        following = "".join(t.text for t in program.code[i + 1 : i + 3])
        if token.text in SWIZZLES:
            token.out = token.text
        elif token.text in VECTORS and following[:1] == "(" and following not in ("(&", "(*"):
            token.out = f"make_{token.text}"
    for words in program.shared:
        words[0].out = "static threadgroup"
    for constant in program.constants:
        constant.first.before = "extern "
    return f'#include "device/lint/metal.h"\nusing namespace metal;\n{joined(program)}'


WRITERS = {"emulated": emulated, "cuda": cuda, "lint": lint}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
