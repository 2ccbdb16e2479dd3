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
        text = "".join(t.out for t in source) if target == "flat" else WRITERS[target](Program(source), symbol, Path(out))
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


def arguments_function(kernel: Kernel) -> str:
    """A function that describes the arguments: of a template, as their types depend on its arguments."""
    rows = (
        f"{{{json.dumps(p.name)}, sizeof({p.pointee}), {str(p.reference).lower()}, {str(p.writable).lower()}}}"
        for p in kernel.arguments
    )
    return (
        f" {kernel.template_header} static std::vector<ArgumentShape> {kernel.name}_arguments()"
        f" {{ return {{{', '.join(rows)}}}; }}"
    )


def kernel_rows(program: Program, scope: str, address: str) -> str:
    """The rows of the table of kernels."""
    limits = {kernel.name: kernel.max_threads for kernel in program.kernels}
    rows = []
    for i in program.instances:
        angled = f"<{i.template_arguments}>" if i.template_arguments else ""
        function, arguments = f"{scope}{i.kernel}_run{angled}", f"{scope}{i.kernel}_arguments{angled}()"
        rows.append(f"{{{json.dumps(i.name)}, {address.format(function)}, {arguments}, {limits[i.kernel]}}}")
    return ",\n  ".join(rows)


def constant_rows(program: Program) -> str:
    return ", ".join(f"{{{c.index}, {json.dumps(c.name)}}}" for c in program.constants)


def call(kernel: Kernel, argument: Callable[[Parameter], str]) -> str:
    """The call of the kernel's body; `argument` says where an argument comes from."""
    parts = [f"metal::As<{p.type}>(at.{p.position}())" if p.position else argument(p) for p in kernel.parameters]
    names = f"<{', '.join(kernel.template_names)}>" if kernel.template_names else ""
    return f"{kernel.name}{names}({', '.join(parts)})"


def host_argument(p: Parameter) -> str:
    pointer = f"static_cast<{plain_type(p)}{' *' if p.reference else ''}>(arguments[{p.index}])"
    return f"*{pointer}" if p.reference else pointer


def emulated(program: Program, symbol: str, out: Path) -> str:
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
            f"emulated::Position& at) {{ (void)arguments; (void)at; {body}; }}{arguments_function(kernel)}"
        )
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
  {kernel_rows(program, "kernels::", "&{}")}}}, {{{constant_rows(program)}}}}};
  return program;
}}
}}
}}
"""


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


def cuda(program: Program, symbol: str, out: Path) -> str:
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
            f" {kernel.template_header} __global__ void __launch_bounds__({kernel.max_threads})"
            f" {kernel.name}_run({parameters}) {{ const cuda::Position at{{}}; (void)at;"
            f" {call(kernel, lambda p: f'argument_{p.index}')}; }}{arguments_function(kernel)}"
        )
    for constant in program.constants:
        if not constant.values:
            constant.first.fail("the values that are compiled for CUDA, '// values: 0, 1', behind a function constant")
    passes, rows = [], []
    for number, values in enumerate(itertools.product(*(c.values for c in program.constants))):
        chosen = list(zip(program.constants, values, strict=True))
        passes.append(
            "".join(f"#define KVFUSE_CONSTANT_{c.index} {value}\n" for c, value in chosen)
            + f'namespace combination_{number} {{\nusing namespace metal;\n#include "{out.name}"\n}}\n'
            + "".join(f"#undef KVFUSE_CONSTANT_{c.index}\n" for c, _ in chosen)
        )
        constants = ", ".join(f"{{{c.index}, {value}}}" for c, value in chosen)
        kernels = kernel_rows(program, f"combination_{number}::", "reinterpret_cast<const void*>(&{})")
        rows.append(f"{{{{{constants}}}, {{{kernels}}}}}")
    return f"""#if !defined(KVFUSE_KERNELS)
#define KVFUSE_KERNELS
#include "device/cuda/metal.cuh"
namespace kvfuse {{ namespace {{
{"".join(passes)}
}}
namespace cuda {{
const Program& {symbol}() {{
  static const Program program{{{{{constant_rows(program)}}}, {{
  {(","+chr(10)).join(rows)}}}}};
  return program;
}}
}}
}}
#else
{joined(program)}
#endif
"""


def lint(program: Program, symbol: str, out: Path) -> str:
    return joined(program)


WRITERS = {"emulated": emulated, "cuda": cuda, "lint": lint}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
