"""`kvfuse doctor --selftest`: one line per device, and it fails when a kernel is wrong."""

import copy
import functools
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import kvfuse
from kvfuse import device_selftest, provider
from kvfuse.cli import app
from kvfuse.doctor import diagnose, diagnose_devices

RUNNER = CliRunner()
RUN = device_selftest._run


def test_one_line_per_device():
    done = RUNNER.invoke(app, ["doctor", "--selftest"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    for line, device in zip(lines, kvfuse.devices(), strict=True):
        expected = "ok" if device.usable else f"not available: {device.reason}"
        assert line == f"{device.name}: {expected}"


def test_json_says_the_same(monkeypatch):
    monkeypatch.setattr(device_selftest, "check_device", lambda name: None)
    done = RUNNER.invoke(app, ["doctor", "--selftest", "--json"])
    found = json.loads(done.stdout)
    assert found["healthy"]
    passed = {device["name"]: device["passed"] for device in found["devices"]}
    assert passed == {device.name: True if device.usable else None for device in kvfuse.devices()}


def test_the_doctor_lists_devices():
    listed = {device["name"]: device["usable"] for device in diagnose().devices}
    assert listed == {device.name: device.usable for device in kvfuse.devices()}


@functools.cache
def _plain(device, case):
    """A true run of one case: (state, output)."""
    return RUN(device, device_selftest.CASES[case], device_selftest._tokens())


def _changed(case, change):
    """A _run whose results on any device but the CPU are changed in one case."""

    def run(device, attributes, tokens, variant=None):
        name = next(n for n, a in device_selftest.CASES.items() if a == attributes)
        state, output = copy.deepcopy(_plain(device, name))
        if device != "cpu" and name == case:
            change(state, output)
        return state, output

    return run


@pytest.mark.parametrize("case", device_selftest.CASES)
@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("key_codes", "expected the key_codes of the CPU, bit by bit"),
        ("value_scales", "expected the value_scales of the CPU, bit by bit"),
        ("output", "expected outputs within 1e-05 of the formula"),
    ],
)
def test_one_wrong_number_fails(monkeypatch, device, case, part, sentence):
    def change(state, output):
        array = output if part == "output" else state[part]
        if array.dtype == np.uint8:
            array.flat[-1] ^= 1
        else:
            array.flat[-1] += np.float32(2e-5)

    monkeypatch.setattr(device_selftest, "_run", _changed(case, change))
    found = device_selftest.check_device(device)
    assert found is not None
    assert found.startswith(sentence)
    assert case in found
    monkeypatch.setattr(device_selftest, "_run", _changed(case, lambda state, output: None))
    assert device_selftest.check_device(device) is None


def test_a_failing_device_is_a_problem_and_exit_code_1(monkeypatch, device):
    monkeypatch.setattr(device_selftest, "check_device", lambda name: None if name == "cpu" else "expected x")
    done = RUNNER.invoke(app, ["doctor", "--selftest"])
    assert done.exit_code == 1
    assert f"{device}: FAILED: expected x" in done.stdout.splitlines()
    assert "Traceback" not in done.output


def test_a_device_that_breaks_is_reported(monkeypatch, device):
    def broken(name):
        raise RuntimeError("no queue")

    monkeypatch.setattr(device_selftest, "check_device", broken)
    found = diagnose_devices()
    assert f"[self-test, {device}] could not run: no queue" in found.problems


def test_a_missing_library_is_reported(monkeypatch):
    def missing():
        raise kvfuse.LibraryError("[library] expected a library; found none")

    monkeypatch.setattr(provider, "native", missing)
    found = diagnose_devices()
    assert found.problems == ["[library] expected a library; found none"]
    assert found.devices == []
