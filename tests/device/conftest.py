"""Builds run_broken.cc, the kernels of broken.metal on the emulated device, in several kinds."""

import functools
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CUSTOM_OPS = HERE.parents[1] / "custom_ops"
DEVICE = CUSTOM_OPS / "device"


@dataclass(frozen=True)
class Kind:
    """How a program is built and run; flags of the runtime are those of fiber.cc and what uses it."""

    compiler: str = "g++"
    runtime: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # of the kernels and all the rest
    runner: tuple[str, ...] = ()


KINDS = {
    "plain": Kind(),
    # The sanitizers are to see the kernels, not the emulator.
    "address": Kind(flags=("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")),
    "thread": Kind(flags=("-fsanitize=thread",)),
    # The other two ways to switch stacks.
    "ucontext": Kind(runtime=("-DKVFUSE_UCONTEXT",)),
    "aarch64": Kind("aarch64-linux-gnu-g++", flags=("-static",), runner=("qemu-aarch64",)),
}


def run(folder: Path, *command) -> None:
    result = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def works(kind: Kind, folder: Path) -> bool:
    """Whether an empty program can be built and run that way."""
    (folder / "empty.cc").write_text("int main() { return 0; }")
    steps = ([kind.compiler, *kind.flags, "empty.cc", "-o", "empty"], [*kind.runner, "./empty"])
    tools = (kind.compiler, *kind.runner)
    return all(shutil.which(tool) for tool in tools) and all(
        subprocess.run(step, cwd=folder, capture_output=True, check=False).returncode == 0 for step in steps
    )


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """The command that runs the program of a kind; skips where that cannot be built or run."""
    folder = tmp_path_factory.mktemp("emulator")
    common = ["-std=c++17", "-g", f"-I{CUSTOM_OPS}", f"-I{CUSTOM_OPS / 'include'}"]
    runtime = [DEVICE / "emulated" / name for name in ("fiber.cc", "group.cc", "problem.cc")]
    rest = [DEVICE / "emulated" / "device.cc", DEVICE / "emulated" / "grid.cc", DEVICE / "check.cc"]

    @functools.cache
    def kernels():
        translate = CUSTOM_OPS / "metal" / "translate.py"
        run(
            folder, sys.executable, translate, "emulated", "BrokenProgram", "broken.cc", HERE / "broken.metal"
        )
        return "broken.cc"

    @functools.cache
    def objects(compiler, flags):
        place = folder / "_".join([compiler, *flags]).replace("/", "_")
        place.mkdir()
        run(place, compiler, *common, *flags, "-O2", "-Wall", "-Wextra", "-Werror", "-c", *runtime)
        return [place / path.with_suffix(".o").name for path in runtime]

    @functools.cache
    def program(name):
        kind = KINDS[name]
        if not works(kind, folder):
            pytest.skip(f"no {kind.compiler} {' '.join((*kind.flags, *kind.runner))} that works")
        sources = [*rest, HERE / "run_broken.cc", "-ffp-contract=off", "-fsigned-char", kernels()]
        linked = [*objects(kind.compiler, kind.runtime), "-pthread", "-o", name]
        run(folder, kind.compiler, *common, "-O1", *kind.flags, *sources, *linked)
        return [*kind.runner, str(folder / name)]

    return program
