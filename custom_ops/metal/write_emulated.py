"""Metal as C++ for the emulated device."""

from __future__ import annotations

import json
from pathlib import Path

from msl_kernels import Parameter
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


def emulated(program: Program, symbol: str, _out: Path) -> str:
    """C++ for device/emulated: defines `const emulated::Program& SYMBOL()`."""
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
    _share(program)
    for kernel in program.kernels:
        kernel.token.out = "static"
        body = call(kernel, _argument)
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


def _argument(p: Parameter) -> str:
    pointer = f"static_cast<{plain_type(p)}{' *' if p.reference else ''}>(arguments[{p.index}])"
    return f"*{pointer}" if p.reference else pointer


def _share(program: Program) -> None:
    """`threadgroup T x[N]` becomes a reference to memory of the threadgroup."""
    for words in program.shared:
        end = next((i for i, t in enumerate(words) if t.text == "["), len(words))
        name = words[end - 1].text
        words[0].out = "typedef"
        words[end - 1].out = f"{name}_shared"
        words[-1].after = f"; {name}_shared& {name} = emulated::Shared<{name}_shared>({json.dumps(name)})"
