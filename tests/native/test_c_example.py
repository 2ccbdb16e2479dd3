"""The C example builds with the system's compiler, warnings being errors, and every line of it holds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "build" / "onnxruntime-headers"


@pytest.mark.skipif(shutil.which("make") is None or shutil.which("cc") is None, reason="needs make and cc")
@pytest.mark.skipif(sys.platform != "linux", reason="the example's Makefile knows the names of Linux")
@pytest.mark.skipif(not HEADERS.is_dir(), reason="needs build/onnxruntime-headers")
@pytest.mark.parametrize("device", ["", "emulated"])
def test_c_example(tmp_path, device):
    result = subprocess.run(
        [
            *("make", "-C", str(ROOT / "examples" / "c"), "run"),
            *(f"PYTHON={sys.executable}", f"BUILD={tmp_path}", f"DEVICE={device}"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    promises = [line for line in result.stdout.splitlines() if line.startswith("ok: ")]
    assert len(promises) == 8
    assert "[state] expected" in result.stdout
