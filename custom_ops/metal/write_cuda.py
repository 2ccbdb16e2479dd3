"""Metal as CUDA."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from msl_kernels import Kernel
from msl_program import Program
from msl_text import (
    arguments_function,
    blank,
    call,
    constant_rows,
    instance_row,
    joined,
    plain_type,
    strip_spaces,
)


def cuda(program: Program, symbol: str, out: Path) -> str:
    """CUDA for device/cuda: a file that includes itself, once for each combination of function constants."""
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
    for number, values in enumerate([*_combinations(program), {}]):
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
            passes.append(_pass(program, number, values, emitted, out.name))
    needed = ", ".join(
        f"{{{json.dumps(i.name)}, {{{', '.join(str(c.index) for c in program.constants_of(i.kernel))}}}}}"
        for i in program.instances
    )
    wrappers = "".join(_wrapper(kernel) for kernel in program.kernels)
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


def _combinations(program: Program) -> list[dict[str, int]]:
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


def _pass(program: Program, number: int, values: dict[str, int], kernels: list[str], file: str) -> str:
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


def _wrapper(kernel: Kernel) -> str:
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
