"""Translates Metal kernels to C++ for the emulated device and to CUDA; run by CMake, needs only Python.

    translate.py emulated SYMBOL OUT IN.metal…   C++ that defines `const Program& SYMBOL()`
    translate.py cuda SYMBOL OUT IN.metal…       the same as CUDA, once for each combination of function constants
    translate.py lint SYMBOL OUT IN.metal…       C++ for `clang -fsyntax-only`, address spaces kept
    translate.py flat SYMBOL OUT IN.metal…       one Metal text, local includes put in place

Line numbers are kept by `#line`, so that compilers and sanitizers speak of the Metal source. What the shims
(device/shim) do not know is refused with file:line. A function constant names the values that are compiled for
CUDA in a comment behind it, on its line: `constant int kDot [[function_constant(0)]];  // values: 0, 1`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

from msl_program import Kernel, Parameter, Program
from msl_tokens import Token, TranslationError, read


def main(arguments: list[str]) -> int:
    target, symbol, out, *inputs = arguments
    seen: set[Path] = set()
    source: list[Token] = []
    try:
        for path in inputs:
            source += [*read(Path(path), Path(path).name, seen), Token("space", "\n", path, 0)]
        text = "".join(t.out for t in source) if target == "flat" else WRITERS[target](Program(source), symbol)
    except TranslationError as error:
        print(error, file=sys.stderr)
        return 1
    Path(out).write_text(text, encoding="utf-8")
    return 0


def joined(program: Program) -> str:
    return "".join(t.before + t.out + t.after for t in program.all)


def plain_type(parameter: Parameter) -> str:
    """The type of an argument without address space: `const float *`, `Args` for a reference."""
    const = "" if parameter.writable else "const "
    return f"{const}{parameter.pointee}{'' if parameter.reference else ' *'}"


def strip_spaces(program: Program) -> None:
    """Address spaces mean nothing to a host compiler; `constant` means const."""
    for i, token in enumerate(program.code):
        if token.text in ("device", "thread", "threadgroup"):
            token.out = ""
        elif token.text == "constant":
            beside = {program.code[i - 1].text, program.code[i + 1].text}
            token.out = "" if "const" in beside else "const"


def argument_list(kernel: Kernel) -> str:
    rows = (
        f"{{{json.dumps(p.name)}, sizeof({p.pointee}), {str(p.reference).lower()}, {str(p.writable).lower()}}}"
        for p in kernel.arguments
    )
    return f"{{{', '.join(rows)}}}" if kernel.arguments else "{}"


def call(kernel: Kernel, argument: Callable[[Parameter], str]) -> str:
    """The call of the kernel's body; `argument` says where an argument comes from."""
    parts = [f"metal::As<{p.type}>(at.{p.position}())" if p.position else argument(p) for p in kernel.parameters]
    names = f"<{', '.join(kernel.template_names)}>" if kernel.template_names else ""
    return f"{kernel.name}{names}({', '.join(parts)})"


def host_argument(p: Parameter) -> str:
    pointer = f"static_cast<{plain_type(p)}{' *' if p.reference else ''}>(arguments[{p.index}])"
    return f"*{pointer}" if p.reference else pointer


def emulated(program: Program, symbol: str) -> str:
    strip_spaces(program)
    for constant in program.constants:
        blank(program, constant.first, constant.last)
        constant.first.out = (
            f"static const emulated::FunctionConstant<{constant.type}> {constant.name}{{{constant.index}, "
            f"{json.dumps(constant.name)}}};"
        )
    for space, others in program.globals:
        space.out = "static constexpr"
        for other in others:
            other.out = ""
    share(program, "emulated::Shared<{type}>({name})")
    for kernel in program.kernels:
        kernel.token.out = "static"
        body = call(kernel, host_argument)
        kernel.end.after = (
            f" {kernel.template_header} static void {kernel.name}_run(void* const* arguments, const "
            f"emulated::Position& at) {{ (void)arguments; (void)at; {body}; }}"
            f" {kernel.template_header} static std::vector<emulated::Argument> {kernel.name}_arguments()"
            f" {{ return {argument_list(kernel)}; }}"
        )
    rows = "".join(
        f"  {{{json.dumps(i.name)}, &kernels::{i.kernel}_run{angled(i.template_arguments)}, "
        f"kernels::{i.kernel}_arguments{angled(i.template_arguments)}()}},\n"
        for i in program.instances
    )
    constants = ", ".join(f'{{{c.index}, "{c.name}"}}' for c in program.constants)
    return f"""#include "device/emulated/metal.h"
namespace kvfuse {{ namespace {{ namespace kernels {{
using namespace metal;
{joined(program)}
}} }}
#line 1 "{symbol}"
namespace emulated {{
const Program& {symbol}();
const Program& {symbol}() {{
  static const Program program{{{{
{rows}  }}, {{{constants}}}}};
  return program;
}}
}}
}}
"""


def angled(template_arguments: str) -> str:
    return f"<{template_arguments}>" if template_arguments else ""


def blank(program: Program, first: Token, last: Token) -> None:
    begin, end = program.code.index(first), program.code.index(last)
    for token in program.code[begin : end + 1]:
        token.out = ""


def share(program: Program, place: str) -> None:
    """`threadgroup T x[N]` becomes a reference to memory of the threadgroup."""
    for words in program.shared:
        end = next((i for i, t in enumerate(words) if t.text == "["), len(words))
        name = words[end - 1].text
        words[0].out = "typedef"
        words[end - 1].out = f"{name}_shared"
        words[-1].after = f"; {name}_shared& {name} = " + place.format(
            type=f"{name}_shared", name=json.dumps(name)
        )


def cuda(program: Program, symbol: str) -> str:
    strip_spaces(program)
    for words in program.shared:
        words[0].out = "__shared__"
    for function in program.functions:
        function.before = "__device__ "
    for constant in program.constants:
        blank(program, constant.first, constant.last)
        value = f"KVFUSE_CONSTANT_{constant.index}"
        constant.first.out = f"static constexpr {constant.type} {constant.name} = {value};"
    for space, others in program.globals:
        space.out = "static __constant__ constexpr"
        for other in others:
            other.out = ""
    for kernel in program.kernels:
        kernel.token.out = "static __device__ __forceinline__"
        parameters = ", ".join(f"{plain_type(p)} argument_{p.index}" for p in kernel.arguments)
        kernel.end.after = (
            f" {kernel.template_header} __global__ void __launch_bounds__(1024) {kernel.name}_run({parameters})"
            f" {{ const cuda::Position at{{}}; (void)at; {call(kernel, lambda p: f'argument_{p.index}')}; }}"
            f" {kernel.template_header} static std::vector<cuda::Argument> {kernel.name}_arguments()"
            f" {{ return {argument_list(kernel)}; }}"
        )
    return joined(program)


def lint(program: Program, symbol: str) -> str:
    return joined(program)


WRITERS = {"emulated": emulated, "cuda": cuda, "lint": lint}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
