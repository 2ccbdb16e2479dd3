"""The address-space lint finds nothing in our kernels, and does find a pointer into the wrong space."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import lint_metal

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("clang") is None, reason="needs the package libclang"
)
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


@pytest.fixture
def lint(capsys):
    """Lints files, all of ours without any: (exit code, what was printed)."""

    def run(*files):
        code = lint_metal.main([str(file) for file in files])
        return code, capsys.readouterr().out

    return run


def test_our_kernels_are_clean(lint):
    assert lint() == (0, "")


def test_the_kernels_of_the_other_tests_are_clean(lint):
    assert lint(Path(__file__).with_name("broken.metal")) == (0, "")


KERNEL = "kernel void test(device float* out [[buffer(0)]], constant float& x [[buffer(1)]]) {{\n{}\n}}\n"
WRONG = {
    "threadgroup_for_device": (
        "inline float first(device const float* row) { return row[0]; }\n"
        + KERNEL.format("threadgroup float line[4];\nout[0] = first(line);"),
        6,
    ),
    "pointer_without_space": (KERNEL.format("float* p = out;\n*p = x;"), 4),
    "private_for_threadgroup": (
        "inline float first(threadgroup const float* row) { return row[0]; }\n"
        + KERNEL.format("float line[4] = {};\nout[0] = first(line);"),
        6,
    ),
    "write_to_constant": (KERNEL.format("x = out[0];"), 4),
    "cast_between_spaces": (
        KERNEL.format("threadgroup float* p = static_cast<threadgroup float*>(out);\n*p = x;"),
        4,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_address_space_is_found(lint, tmp_path, name):
    text, line = WRONG[name]
    source = tmp_path / "wrong.metal"
    source.write_text(HEAD + text)
    code, printed = lint(source)
    assert code == 1
    assert printed.startswith(f"wrong.metal:{line}:"), printed
