import math

import numpy as np
import pytest

import kvfuse
from kvfuse import doctor, library, selftest


def test_a_sound_installation_is_healthy():
    found = doctor.diagnose().to_dict()
    assert found["problems"] == []
    assert found["healthy"]
    assert found["library"] == kvfuse.library_path()
    assert found["packages"]["kvfuse"] == kvfuse.__version__
    assert found["kernel"] in [kernel["name"] for kernel in found["kernels"] if kernel["available"]]
    assert [case["passed"] for case in found["selftest"]] == [True, True]


def test_the_self_test_fails_when_the_op_computes_something_else(monkeypatch):
    plain = selftest.attention
    monkeypatch.setattr(selftest, "attention", lambda *qkv: plain(*qkv) + 1e-3)
    found = doctor.diagnose()
    assert [case["passed"] for case in found.selftest] == [False, False]
    assert len(found.problems) == 2
    assert "[self-test, 4-bit cache] expected an error of at most" in found.problems[1]


def test_the_self_test_tells_four_bits_from_exact(monkeypatch):
    monkeypatch.setattr(selftest, "dequantize", lambda rows, limit=7: rows)
    assert [case.passed for case in selftest.run_selftest()] == [True, False]


def test_nan_never_passes():
    assert not selftest.CaseResult("case", math.nan, 1.0).passed


def test_a_broken_self_test_is_reported(monkeypatch):
    monkeypatch.setattr(selftest, "one_node_model", lambda attributes: b"no model")
    found = doctor.diagnose()
    assert len(found.problems) == 1
    assert found.problems[0].startswith("the self-test could not run: ")


def test_a_missing_library_is_reported(monkeypatch):
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    found = doctor.diagnose()
    assert (found.library, found.kernels, found.selftest) == (None, [], [])
    assert "expected the compiled module" in found.problems[0]


def test_the_hadamard_matrix_is_its_own_inverse():
    matrix = selftest.hadamard(16)
    np.testing.assert_allclose(matrix @ matrix, np.eye(16), atol=1e-15)
    assert selftest.hadamard(2) * math.sqrt(2) == pytest.approx(np.array([[1, 1], [1, -1]]))


def test_an_unknown_kernel_is_a_problem_in_one_sentence():
    import os
    import subprocess
    import sys

    result = subprocess.run(
        [sys.executable, "-c", "from kvfuse.cli import main; main()", "doctor"],
        env=os.environ | {"KVFUSE_KERNEL": "none-such"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "[KVFUSE_KERNEL] expected one of" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
