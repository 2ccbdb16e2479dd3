"""A whole decoder on a device: token for token what the CPU makes, in every execution of one prompt."""

import json

import numpy as np
import pytest
from tiny_feeds import IDS, logits
from typer.testing import CliRunner

import kvfuse
from kvfuse.cli import app
from kvfuse.decoder import open_decoder
from kvfuse.generate import Generation
from kvfuse.verify import Limits, verify

RUNNER = CliRunner()
PROMPT = list(IDS) * 10


def test_greedy_tokens_are_the_same(rewritten, device):
    on_cpu = list(Generation(open_decoder(rewritten), PROMPT, 24))
    on_device = list(Generation(open_decoder(rewritten, device=device), PROMPT, 24))
    assert on_device == on_cpu


def test_logits_are_the_same(rewritten, device):
    """Two f32 paths, each within 1e-5 a layer; two layers and a head of unit-sized weights keep that size."""
    on_cpu, on_device = (kvfuse.InferenceSession(rewritten, device=name) for name in ("cpu", device))
    past = 0
    for size in (70, 1, 1, 5):
        ids = [(past + i) % 60 for i in range(size)]
        found, expected = (logits(session, [ids], past=past) for session in (on_device, on_cpu))
        np.testing.assert_allclose(found, expected, atol=1e-4)
        past += size


def test_verify_runs_the_rewritten_model_on_the_device(original, rewritten, device):
    on_cpu = verify(original, rewritten, prompt_length=40, tokens=8, limits=Limits(max_error=10))
    on_device = verify(
        original, rewritten, prompt_length=40, tokens=8, limits=Limits(max_error=10), device=device
    )
    assert on_device.rewritten_ids == on_cpu.rewritten_ids
    assert on_device.decode.max_abs_error == pytest.approx(on_cpu.decode.max_abs_error, abs=1e-4)


def test_the_commands_take_a_device(original, rewritten, device):
    prompt = " ".join(str(i) for i in PROMPT)
    arguments = ["generate", str(rewritten), prompt, "--token-ids", "--max-new-tokens", "8", "--json"]
    tokens = []
    for choice in ("cpu", device):
        done = RUNNER.invoke(app, [*arguments, "--device", choice])
        assert done.exit_code == 0, done.output
        tokens.append(json.loads(done.stdout)["token_ids"])
    assert tokens[0] == tokens[1]
    arguments = ["verify", str(original), str(rewritten), "--max-error", "10", "--tokens", "4"]
    assert RUNNER.invoke(app, [*arguments, "--device", device]).exit_code == 0


@pytest.mark.parametrize("command", ["generate", "verify"])
def test_an_unknown_device_is_bad_input(original, rewritten, command):
    arguments = (
        [str(rewritten), "1 2", "--token-ids"] if command == "generate" else [str(original), str(rewritten)]
    )
    done = RUNNER.invoke(app, [command, *arguments, "--device", "gpu"])
    assert done.exit_code == 2
    assert "[device] expected one of" in done.output
