"""The translator keeps lines, and refuses by file and line what the shims (or Metal) do not know."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "custom_ops" / "metal"))

import translate as translator

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
PARAMETERS = "device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]"


@pytest.fixture
def translate(tmp_path, capsys):
    """Translates one Metal text: (exit code, translated text, what was printed)."""

    def run(target, text):
        source, out = tmp_path / "test.metal", tmp_path / "out.txt"
        source.write_text(text, encoding="utf-8")
        code = translator.main([target, "TestProgram", str(out), str(source)])
        return code, out.read_text(encoding="utf-8") if out.exists() else "", capsys.readouterr().err

    return run


def kernel(body, parameters=PARAMETERS):
    return f"{HEAD}kernel void test({parameters}) {{\n{body}\n}}\n"


REFUSED = {
    "unknown_builtin": (kernel("out[i] = simd_shuffle_rotate_up(1.0f, 2);"), 4, "simd_shuffle_rotate_up"),
    "function_of_the_host": (kernel("out[i] = ::sqrtf(out[i]);"), 4, "sqrtf"),
    "standard_library": (kernel("out[i] = std::max(out[i], 1.0f);"), 4, "std"),
    "double": (kernel("double x = out[i];\nout[i] = float(x);"), 4, "double"),
    "lambda": (kernel("auto f = [](float x) { return x; };\nout[i] = f(1.0f);"), 4, "["),
    "cuda_word": (kernel("__shared__ float x[4];"), 4, "__shared__"),
    "attribute_of_a_parameter": (
        kernel("", "device float* out [[buffer(0)]], uint i [[thread_position_in_pigeonhole]]"),
        3,
        "thread_position_in_pigeonhole",
    ),
    "parameter_without_attribute": (kernel("", "device float* out"), 3, "device"),
    "index_twice": (kernel("", "device int* a [[buffer(0)]], device int* b [[buffer(0)]]"), 3, "test"),
    "index_missing": (kernel("", "device int* a [[buffer(1)]]"), 3, "test"),
    "reference_to_device_memory": (kernel("", "device int& a [[buffer(0)]]"), 3, "device"),
    "pointer_without_address_space": (kernel("", "float* a [[buffer(0)]]"), 3, "float"),
    "threadgroup_memory_with_a_value": (kernel("threadgroup float x = 1.0f;"), 4, "="),
    "two_threadgroup_variables_at_once": (kernel("threadgroup float x[4], y[4];"), 4, ","),
    "threadgroup_memory_in_a_block": (kernel("if (i == 0) {\nthreadgroup float x[4];\n}"), 5, "threadgroup"),
    "threadgroup_memory_in_a_function": (
        HEAD + "inline float f() {\n  threadgroup float x[4];\n  return x[0];\n}\n",
        4,
        "threadgroup",
    ),
    "variable_without_address_space": (HEAD + "int counter = 0;\n", 3, "int"),
    "function_constant_of_another_type": (HEAD + "constant float k [[function_constant(0)]];\n", 3, "float"),
    "function_constant_with_a_value": (HEAD + "constant int k [[function_constant(0)]] = 3;\n", 3, "int"),
    "written_swizzle": (kernel("float4 v = float4(0.0f);\nv.xy = float2(1.0f);"), 5, "xy"),
    "template_instance_without_a_name": (HEAD + "template kernel void f<4>(device int*);\n", 3, "template"),
    "unclosed_bracket": (HEAD + "kernel void test() {\n", 3, "{"),
    "missing_include": ('#include "nowhere.h"\n', 1, "nowhere.h"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("target", ["emulated", "cuda"])
def test_refused(translate, target, name):
    text, line, found = REFUSED[name]
    code, out, printed = translate(target, text)
    assert code == 1
    assert out == ""
    pattern = rf"test\.metal:{line}: \[metal\] expected .*; found '.*{re.escape(found)}.*'\n"
    assert re.fullmatch(pattern, printed), printed


def test_a_combination_for_cuda_names_function_constants(translate):
    text = HEAD + "// cuda: kNothing 0 1\nconstant int k [[function_constant(0)]];\n"
    code, _, printed = translate("cuda", text)
    assert code == 1
    assert printed.startswith("test.metal:3: [metal] expected names of function constants")


@pytest.mark.parametrize("target", ["emulated", "cuda", "lint"])
def test_lines_are_kept(translate, tmp_path, target):
    (tmp_path / "shared.h").write_text("#pragma once\n/* two\n   lines */\nenum Sizes { kMark1 = 4 };\n")
    text = (
        f'{HEAD}#include "shared.h"\n'
        '#include "shared.h"\n'  # once is enough
        "constant float kMark2[2] = {1.0, 2.0};\n\n"
        "#define TWICE(x) \\\n  ((x) + (x))\n"
        f"kernel void mark3({PARAMETERS}) {{\n"
        "  threadgroup float mark4[2 * kMark1];\n"
        "  /* more\n  lines */\n  out[i] = mark4[0] + TWICE(kMark2[1]);\n"
        "}\nkernel void mark5(device int* out [[buffer(0)]]) { out[0] = 1; }\n"
    )
    code, out, printed = translate(target, text)
    assert code == 0, printed
    # Where each mark is first declared, by the last #line before it.
    places, file, line = {}, "", 0
    for row in out.splitlines():
        if directive := re.fullmatch(r'#line (\d+) "(.*)"', row):
            file, line = directive.group(2), int(directive.group(1))
            continue
        for mark in re.findall(r"\b[mk]M?ark\d", row) if file else ():
            places.setdefault(mark, (file, line))
        line += 1
    expected_lines = {"kMark2": 5, "mark3": 9, "mark4": 10, "mark5": 15}
    assert places == {"kMark1": ("shared.h", 4)} | {m: ("test.metal", n) for m, n in expected_lines.items()}
    assert out.count("kMark1 = 4") == 1


def test_literals_are_float_or_half(translate):
    body = "out[i] = 1.0 + .5 + 2. + 1e3 + 1.5e-3 + 0x1F + 7 + 2.5f + float(1.5h) + float(2h);"
    _, out, _ = translate("emulated", kernel(body))
    assert (
        "1.0f + .5f + 2.f + 1e3f + 1.5e-3f + 0x1F + 7 + 2.5f + float(half(1.5f)) + float(half(2.0f))" in out
    )


@pytest.mark.parametrize("size", ["8", "2 * 4", "kSize", "(kSize & 12)", "4][2"])
def test_every_array_in_threadgroup_memory_is_shared(translate, size):
    text = kernel(f"threadgroup float x[{size}];\nthreadgroup float* p = &x[0];\nout[i] = *p;")
    text = text.replace("kernel", "enum { kSize = 8 };\nkernel", 1)
    assert "emulated::Shared<x_shared>" in translate("emulated", text)[1]
    assert "__shared__ float x[" in translate("cuda", text)[1]


def test_indices_by_name(translate):
    text = HEAD + "enum Arguments { kOut, kIn = 1 };\n" + "kernel void f(device int* in [[buffer(kIn)]], "
    text += "device int* out [[buffer(kOut)]]) { out[0] = in[0]; }\n"
    code, out, printed = translate("emulated", text)
    assert code == 0, printed
    assert out.index('{"out", sizeof(int)') < out.index('{"in", sizeof(int)')


def test_flat_text_has_its_includes_in_place(translate, tmp_path):
    (tmp_path / "shared.h").write_text("#pragma once\nenum { kShared = 4 };\n")
    code, out, _ = translate("flat", f'{HEAD}#include "shared.h"\n// after\n')
    assert code == 0
    assert "enum { kShared = 4 };" in out
    assert '"shared.h"\n' not in out.replace('#line 1 "shared.h"\n', "")
    assert out.index('#line 4 "test.metal"') < out.index("// after")
