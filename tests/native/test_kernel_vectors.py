"""Every kernel against the scalar reference: here, on older CPUs and on Arm, the latter two emulated.

What runs on x86-64 is the installed library, so that an instruction that has leaked out of a kernel, into a
function that all CPUs run, is met here. The Arm program, and AMX with emulated tiles, are compiled from the
same sources.
"""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvfuse
from kvfuse import _native

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "native" / "kernel_vectors.cc"
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers", "-Wno-psabi"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", f"-I{ROOT}/custom_ops/include", f"-I{ROOT}/custom_ops/cpu"]
ARM_COMPILER = "aarch64-linux-gnu-g++"
USABLE = {name for name, reason in _native.kernels() if not reason}

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux", reason="compiles and links as on Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


def emulated(program: str) -> pytest.MarkDecorator:
    found = shutil.which(program) is not None and "KVFUSE_SANITIZER" not in os.environ
    return pytest.mark.skipif(
        not found, reason=f"needs {program} (tools/get_emulators.sh), without a sanitizer"
    )


def run(*command: str | Path) -> str:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program, linked to the installed library."""
    built = tmp_path_factory.mktemp("native") / "kernel_vectors"
    library = Path(kvfuse.library_path())
    run("g++", *FLAGS, PROGRAM, library, f"-Wl,-rpath,{library.parent}", "-pthread", "-o", built)
    return built


def build_from_sources(compiler: str, folder: Path, *flags: str) -> Path:
    """The test program and the kernels in one file, without the library."""
    beside = {
        "file",
        "frozen",
        "key_guard",
        "warnings",
        "layer_cache",
        "layer_snapshot",
        "page",
        "safetensors",
        "sequence",
    }
    kernels = [file for file in (ROOT / "custom_ops" / "cpu").glob("*.cc") if file.stem not in beside]
    sources = [PROGRAM, *kernels]

    def compile_one(source: Path) -> Path:
        built = folder / f"{source.stem}.o"
        run(compiler, *FLAGS, "-O1", *flags, "-DKVFUSE_BUILDING_LIBRARY", "-c", source, "-o", built)
        return built

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    # Static: an emulator then needs no libraries of the other machine.
    run(compiler, "-static", *objects, "-pthread", "-o", folder / "kernel_vectors")
    return folder / "kernel_vectors"


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_from_sources(ARM_COMPILER, tmp_path_factory.mktemp("arm"))


def test_this_machine(program: Path) -> None:
    printed = run(program)
    passed = {line.split()[1].rstrip(":") for line in printed.splitlines() if line.startswith("ok ")}
    assert passed == USABLE - {"reference"}


@pytest.mark.skipif("avx512_vnni" not in USABLE, reason="AMX is emulated on top of AVX-512 VNNI")
def test_amx_with_emulated_tiles(tmp_path: Path) -> None:
    # GCC 12 finds its own AVX-512 headers at fault.
    flags = ["-DKVFUSE_AMX_EMULATED", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    printed = run(build_from_sources("g++", tmp_path, *flags), "--kernel", "amx")
    assert "ok amx: 1" in printed


@emulated("qemu-x86_64")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86-64")
def test_x86_without_avx512(program: Path) -> None:
    printed = run("qemu-x86_64", "-cpu", "Haswell", program, "--cases", "60")
    assert printed.startswith("in use: avx2\n")
    assert "not run avx512_vnni: this CPU lacks" in printed
    assert "not run avx_vnni: this CPU lacks" in printed
    assert "ok avx2: 1" in printed


@emulated("qemu-x86_64")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86-64")
def test_x86_without_avx(program: Path) -> None:
    # The reference against itself: what matters is that no instruction is illegal.
    printed = run("qemu-x86_64", "-cpu", "Nehalem", program, "--cases", "60", "--kernel", "reference")
    assert printed.startswith("in use: reference\n")
    assert "not run avx2: this CPU lacks" in printed
    assert "ok reference: 1" in printed


@emulated("qemu-aarch64")
@emulated(ARM_COMPILER)
@pytest.mark.parametrize(
    ("cpu", "kernels", "left_out"),
    [("max", ["neon_dotprod", "neon"], []), ("cortex-a57", ["neon"], ["neon_dotprod"])],
)
def test_arm(arm_program: Path, cpu: str, kernels: list[str], left_out: list[str]) -> None:
    printed = run("qemu-aarch64", "-cpu", cpu, arm_program, "--cases", "60")
    assert printed.startswith(f"in use: {kernels[0]}\n")
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("ok ")] == [
        f"{kernel}:" for kernel in kernels
    ]
    assert [line.split()[2] for line in printed.splitlines() if line.startswith("not run ")] == [
        f"{kernel}:" for kernel in left_out
    ]
