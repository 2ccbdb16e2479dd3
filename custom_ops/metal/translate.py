"""Translates Metal kernels to C++ for the emulated device and to CUDA; run by CMake, needs only Python.

    translate.py emulated SYMBOL OUT IN.metal…   C++ that defines `const Program& SYMBOL()`
    translate.py cuda SYMBOL OUT IN.metal…       the same as CUDA, once for each combination of function constants
    translate.py lint SYMBOL OUT IN.metal…       C++ for `clang -fsyntax-only`, address spaces kept
    translate.py flat SYMBOL OUT IN.metal…       one Metal text, local includes put in place

Line numbers are kept by `#line`, so that compilers and sanitizers speak of the Metal source. What the shims
(device/shim) do not know is refused with file:line. A function constant may name its values in a comment behind it,
on its line: `constant int kDot [[function_constant(0)]];  // values: 0, 1`; a dispatch with another is an error.

Metal compiles a kernel for the function constants of a dispatch when it is first needed. For CUDA that happens at
build time, for the combinations that the source asks for in comments, each a product of the values it names:
`// cuda: kDot 1, kBits 4 8`. A combination that is not there is run by a kernel that reads its constants from memory.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

from msl_program import Instance, Kernel, Parameter, Program
from msl_tokens import Token, TranslationError, read
from msl_words import SWIZZLES, VECTORS


def main(arguments: list[str]) -> int:
    target, symbol, out, *inputs = arguments
    seen: set[Path] = set()
    source: list[Token] = []
    try:
        for path in inputs:
            source += [*read(Path(path), Path(path).name, seen), Token("space", "\n", path, 0)]
        text = (
            "".join(t.out for t in source)
            if target == "flat"
            else WRITERS[target](Program(source), symbol, Path(out))
        )
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


def instance_row(program: Program, instance: Instance, address: str, scope: str) -> str:
    """What the table of kernels says of one: its name, where it is, its arguments, threads at most."""
    angled = f"<{instance.template_arguments}>" if instance.template_arguments else ""
    limit = next(k.max_threads for k in program.kernels if k.name == instance.kernel) or 1024
    return (
        f"{json.dumps(instance.name)}, {address.format(f'{scope}::{instance.kernel}_run{angled}')}, "
        f"{scope}::{instance.kernel}_arguments{angled}(), {limit}"
    )


def constant_rows(program: Program) -> str:
    return ", ".join(
        f"{{{c.index}, {json.dumps(c.name)}, {{{', '.join(map(str, c.values))}}}}}" for c in program.constants
    )


def call(kernel: Kernel, argument: Callable[[Parameter], str]) -> str:
    """The call of the kernel's body; `argument` says where an argument comes from."""
    parts = [
        f"metal::As<{p.type}>(at.{p.position}())" if p.position else argument(p) for p in kernel.parameters
    ]
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
    rows = ",\n  ".join(f"{{{instance_row(program, i, '&{}', 'kernels')}}}" for i in program.instances)
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
  {rows}}}, {{{constant_rows(program)}}}}};
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
    names = {constant.name for constant in program.constants}
    for token in program.code:
        if token.text in names:
            token.out += "()"
    for constant in program.constants:
        blank(program, constant.first, constant.last)
        constant.first.out = (
            f"static __device__ __forceinline__ {constant.type} {constant.name}() "
            f"{{ return KVFUSE_CONSTANT_{constant.index}; }}"
        )
    for space, others in program.globals:
        space.out = "static __constant__ constexpr"
        for other in others:
            other.out = ""
    for kernel in program.kernels:
        kernel.token.out = "static __device__ __forceinline__"
    passes, rows = [], []
    done = set()
    for number, values in enumerate([*combinations(program), {}]):
        emitted = []
        for kernel in program.kernels:
            reads = program.constants_of(kernel.name)
            used = tuple((c.index, values[c.name]) for c in reads if c.name in values)
            if values and (len(used) < len(reads) or not used or (kernel.name, used) in done):
                continue  # left to the last, general pass, or done before
            done.add((kernel.name, used))
            emitted.append(kernel.name)
            pairs = ", ".join(f"{{{index}, {value}}}" for index, value in used)
            for instance in program.instances:
                if instance.kernel == kernel.name:
                    row = instance_row(
                        program, instance, "reinterpret_cast<const void*>(&{})", f"pass_{number}"
                    )
                    rows.append(f"{{{row}, {{{pairs}}}}}")
        if emitted:
            passes.append(cuda_pass(program, number, values, emitted, out.name))
    needed = ", ".join(
        f"{{{json.dumps(i.name)}, {{{', '.join(str(c.index) for c in program.constants_of(i.kernel))}}}}}"
        for i in program.instances
    )
    wrappers = "".join(cuda_wrapper(kernel) for kernel in program.kernels)
    return f"""#if !defined(KVFUSE_KERNELS)
#define KVFUSE_KERNELS
#include "device/cuda/metal.cuh"
namespace kvfuse {{ namespace {{
__constant__ int function_constants[cuda::kMaxConstants];
{"".join(passes)}
}}
namespace cuda {{
const Program& {symbol}() {{
  static const Program program{{{{{constant_rows(program)}}}, {{
  {("," + chr(10) + "  ").join(rows)}}}, {{{needed}}}, &function_constants}};
  return program;
}}
}}
}}
#else
{joined(program)}
{wrappers}
#endif
"""


def combinations(program: Program) -> list[dict[str, int]]:
    """The combinations of function constants that the source asks CUDA to compile."""
    result: list[dict[str, int]] = []
    for token in program.all:
        if token.kind != "comment" or not token.text.startswith("// cuda:"):
            continue
        words = [part.split() for part in token.text[len("// cuda:") :].split(",")]
        if not {part[0] for part in words} <= {c.name for c in program.constants} | {"blocks"}:
            token.fail("names of function constants with values, '// cuda: kName 0 1, kOther 4', or 'blocks'")
        names = [part[0] for part in words]
        for values in itertools.product(*([int(value) for value in part[1:]] for part in words)):
            result.append(dict(zip(names, values, strict=True)))
    return result


def cuda_pass(program: Program, number: int, values: dict[str, int], kernels: list[str], file: str) -> str:
    """One reading of the kernels with certain values, or with none: then they come from memory."""
    defines = [
        (f"KVFUSE_CONSTANT_{c.index}", str(values.get(c.name, f"function_constants[{c.index}]")))
        for c in program.constants
    ] + [(f"KVFUSE_KERNEL_{name}", "1") for name in kernels]
    defines.append(("KVFUSE_BLOCKS", str(values.get("blocks", 1))))
    return (
        "".join(f"#define {name} {value}\n" for name, value in defines)
        + f'namespace pass_{number} {{\nusing namespace metal;\n#include "{file}"\n}}\n'
        + "".join(f"#undef {name}\n" for name, _ in defines)
    )


def cuda_wrapper(kernel: Kernel) -> str:
    """The entry of a kernel: its arguments are the kernel's, positions are filled in."""
    # In the grid's constant memory, a struct may be referred to without copying it to each thread.
    parameters = ", ".join(
        f"{'const __grid_constant__ ' + p.pointee if p.reference else plain_type(p)} argument_{p.index}"
        for p in kernel.arguments
    )
    bounds = f"__launch_bounds__({kernel.max_threads}, KVFUSE_BLOCKS)" if kernel.max_threads else ""
    body = call(kernel, lambda p: f"argument_{p.index}")
    return (
        f"#if defined(KVFUSE_KERNEL_{kernel.name})\n{kernel.template_header} __global__ void {bounds} "
        f"{kernel.name}_run({parameters}) {{ const cuda::Position at{{}}; (void)at; {body}; }}\n"
        f"{arguments_function(kernel)}\n#endif\n"
    )


def lint(program: Program, symbol: str, out: Path) -> str:
    for i, token in enumerate(program.code):
        if token.text in SWIZZLES:
            token.out = token.text  # clang's vectors have them
        elif token.text in VECTORS and [t.text for t in program.code[i + 1 : i + 3]] not in (
            ["(", "&"],
            ["(", "*"],
        ):
            if program.code[i + 1].text == "(":
                token.out = f"make_{token.text}"
    for words in program.shared:
        words[0].out = "static threadgroup"
    for constant in program.constants:
        constant.first.before = "extern "
    return f'#include "device/lint/metal.h"\nusing namespace metal;\n{joined(program)}'


WRITERS = {"emulated": emulated, "cuda": cuda, "lint": lint}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
