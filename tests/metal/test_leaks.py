"""Whole decoders on device "metal", in a process of their own: no object of Metal's outlives the caches."""

import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import kvfuse
from kvfuse import _native
from models.tiny_decoder import build

ROOT = Path(__file__).resolve().parents[2]
BUILT_OVER_THE_FAKE = "fake-metal" in str(Path(_native.__file__).parent)
SCRIPT = """
import sys

from kvfuse.decoder import open_decoder
from kvfuse.generate import Generation

model, device, rounds = sys.argv[1:]
for _ in range(int(rounds)):
    print(list(Generation(open_decoder(model, device=device), list(range(40)), 6)))
"""
# What the device keeps to the end of the process: itself, its pipelines, and buffers for steps.
KEPT = {
    "MTLBuffer",
    "MTLCommandQueue",
    "MTLComputePipelineState",
    "MTLDevice",
    "MTLFunction",
    "MTLLibrary",
}

pytestmark = pytest.mark.skipif(
    not BUILT_OVER_THE_FAKE, reason="needs the fake Metal: run tools/fake_metal.sh"
)


def run(model: Path, device: str, rounds: int) -> tuple[str, str]:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), device, str(rounds)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "KVFUSE_FAKE_METAL_LEAKS": "1"},
    )
    return result.stdout, result.stderr


def test_everything_is_released(tmp_path):
    onnx.save(build(), tmp_path / "tiny.onnx")
    model = tmp_path / "rewritten.onnx"
    kvfuse.rewrite(tmp_path / "tiny.onnx", model, n_recent=4, block=4, n_sink=2)
    left = {}
    for rounds in (1, 3):
        tokens, said = run(model, "metal", rounds)
        assert tokens == run(model, "cpu", rounds)[0]
        kernels, objects = re.search(r"\[fake metal\] (\d+) kernels ran; left:(.*)", said).groups()
        assert int(kernels) >= rounds * 36  # the prompt and five steps, two layers, three kernels each
        left[rounds] = objects
    assert left[1] == left[3]
    assert set(left[1].split()[1::2]) <= KEPT
