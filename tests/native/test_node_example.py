"""The Node example runs with onnxruntime-node as it comes from npm, pinned by the lock file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "build" / "onnxruntime-headers"
MISSING = [tool for tool in ("make", "cc", "node", "npm") if shutil.which(tool) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
@pytest.mark.skipif(sys.platform != "linux", reason="the example has been run on Linux only")
@pytest.mark.skipif(not HEADERS.is_dir(), reason="needs build/onnxruntime-headers")
@pytest.mark.skipif("KVFUSE_SANITIZER" in os.environ, reason="node brings a memory allocator of its own")
def test_node_example():
    build = ROOT / "build" / "examples" / "node"  # the packages are fetched once
    for made in ("kvfuse.node", "tiny.onnx"):
        (build / made).unlink(missing_ok=True)
    result = subprocess.run(
        ["make", "-C", str(ROOT / "examples" / "node"), "run", f"PYTHON={sys.executable}", f"BUILD={build}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len([line for line in result.stdout.splitlines() if line.startswith("ok: ")]) == 6
