"""The Metal back end's host code, scenario by scenario: over a fake Metal on Linux, on a Mac over Metal.

The scenarios are C++ (host_any.cc, host_fake.cc); each runs in a process of its own, over the fake under
every schedule of the queue, and must leave no object behind.
"""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("KVFUSE_METAL_TEST", ROOT / "build" / "fake-metal" / "kvfuse_metal_test"))
# What the fake, or Metal's own validation on a Mac, must not let pass, and the words it says.
ABORTS = {
    "unknown_method": "-[MTLDevice isLowPower]",
    "no_pool": "expected an autorelease pool around the call; found none",
    "released_object": "expected a live object for the message commandBuffer",
    "leaked_object": "expected every object released; found 1 left of MTLCommandQueue",
    "two_encoders": "expected one open encoder",
    "encoder_not_ended": "expected endEncoding before the encoder goes",
    "commit_with_open_encoder": "expected endEncoding before commit",
    "wait_without_commit": "expected a commit before the wait",
    "parts_of_words": "expected a copy of whole words",
    "overlapping_copy": "expected a copy between separate places",
    "unbound_argument": "expected kernel scale with argument 1 bound",
    "unaligned_argument": "expected argument 0 of kernel scale at a multiple of 4 bytes; found offset 2",
    "fast_math": "expected fast math off",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BINARY, *arguments], capture_output=True, text=True, timeout=120, check=False)


def scenarios() -> list[str]:
    return run("--list").stdout.split() if BINARY.is_file() else []


pytestmark = pytest.mark.skipif(not BINARY.is_file(), reason=f"needs {BINARY.name}: run tools/fake_metal.sh")
over_the_fake = pytest.mark.skipif(
    "no_device" not in scenarios(), reason="over Metal itself, which cannot be told to fail"
)


def test_there_are_scenarios():
    assert len(scenarios()) >= 14


@pytest.mark.parametrize("scenario", scenarios())
def test_scenario(scenario):
    result = run(scenario)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


@over_the_fake
@pytest.mark.parametrize("mistake", ABORTS)
def test_the_fake_lets_no_mistake_pass(mistake):
    result = run(mistake)
    assert result.returncode != 0
    assert ABORTS[mistake] in result.stderr


@over_the_fake
def test_the_api_in_use_is_the_one_written_down(update_goldens):
    """The fake has no method that nobody calls, so methods.txt is all that kvfuse wants of Metal."""
    result = run("--methods")
    assert result.returncode == 0, result.stderr
    golden = Path(__file__).with_name("methods.txt")
    if update_goldens:
        golden.write_text(result.stdout, encoding="utf-8")
    assert "never called" not in result.stdout
    assert result.stdout == golden.read_text(encoding="utf-8")
