"""What the writers of C++ and of CUDA share: types, calls and table rows of kernels."""

from __future__ import annotations

import json
from collections.abc import Callable

from msl_kernels import Instance, Kernel, Parameter
from msl_program import Program
from msl_tokens import Token


def joined(program: Program) -> str:
    """The text of the edited program."""
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


def blank(program: Program, first: Token, last: Token) -> None:
    """Empties the tokens from one to another."""
    begin, end = program.code.index(first), program.code.index(last)
    for token in program.code[begin : end + 1]:
        token.out = ""


def arguments_function(kernel: Kernel) -> str:
    """A function that describes the arguments: of a template, as their types depend on its arguments."""
    rows = (
        f"{{{json.dumps(p.name)}, sizeof({p.pointee}), {p.reference:d}, {p.writable:d}}}"
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
    """The rows of the table of function constants: index, name, values."""
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
