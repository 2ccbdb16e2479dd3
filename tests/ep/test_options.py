"""What a user can get wrong: devices, variants, options, and orders; each answer is one sentence."""

import json
import os
import subprocess
import sys

import onnxruntime
import pytest
from op_graph import Graph, build_model
from op_harness import OpSession, feed, random_history
from reference import OpConfig
from tiny_feeds import IDS, logits

import kvfuse
from kvfuse import provider
from kvfuse.provider import PROVIDER, VARIANTS, add_device

MODEL = build_model(Graph((OpConfig(),))).SerializeToString()


def plain_session(choices: dict[str, str]) -> onnxruntime.InferenceSession:
    """A session of onnxruntime alone, with these provider options."""
    add_device(onnxruntime.SessionOptions(), "emulated")  # registers the library
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    found = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    options.add_provider_for_devices(found[:1], choices)
    return onnxruntime.InferenceSession(MODEL, options, enable_fallback=0)


def test_devices_are_listed_with_reasons(device):
    found = {info.name: info for info in kvfuse.devices()}
    assert list(found) == ["cpu", "metal", "cuda", "emulated"]
    assert found["cpu"].usable
    for info in found.values():
        assert info.usable == (info.reason is None)
    if sys.platform == "linux":
        assert found["emulated"].usable
        # over the fake, for tests; the sanitizers' build has it beside the emulator
        assert found["metal"].usable == (device == "metal" or "KVFUSE_SANITIZER" in os.environ)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_runs(device, variant):
    history = random_history(3, 8)
    session = OpSession(OpConfig(), device=device, variant=variant)
    assert feed(session, history, (7, 1)).shape == (1, 4, 8, 16)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"device": "gpu"}, r"\[device\] expected one of \['cpu', .*; found 'gpu'"),
        ({"device": "emulated", "variant": "fast"}, r"\[variant\] expected one of \['scalar', 'simd'\]; f"),
        ({"device": "cpu", "variant": "simd"}, r"\[variant\] expected none for the cpu; found 'simd'"),
        ({"variant": "simd"}, r"\[variant\] expected a device beside a variant; found 'simd' alone"),
        (
            {"device": "emulated", "providers": ["CPUExecutionProvider"]},
            r"\[device\] expected no providers beside a device .*; found \['CPUExecutionProvider'\]",
        ),
    ],
)
def test_wrong_arguments_are_refused(rewritten, arguments, sentence):
    with pytest.raises(kvfuse.OptionError, match=sentence):
        kvfuse.InferenceSession(rewritten, **arguments)


def test_a_device_that_is_not_here_is_refused_with_its_reason(rewritten, monkeypatch):
    class Native:
        def device_choices(self):
            return [("metal", "no GPU"), ("emulated", "")]

    monkeypatch.setattr(provider, "native", Native)
    with pytest.raises(
        kvfuse.DeviceError, match=r"^\[device\] expected .* usable here; found metal: no GPU$"
    ):
        kvfuse.InferenceSession(rewritten, device="metal")


def test_options_serve_several_sessions_of_one_device_only(rewritten, device):
    options = onnxruntime.SessionOptions()
    first, second = (kvfuse.InferenceSession(rewritten, options, device=device) for _ in range(2))
    logits(first, [IDS])
    logits(second, [IDS[:3]])
    assert (first.past_length, second.past_length) == (len(IDS), 3)
    with pytest.raises(kvfuse.OptionError, match=r"\[device\] expected new SessionOptions for .*scalar"):
        kvfuse.InferenceSession(rewritten, options, device=device, variant="scalar")


def test_options_with_the_ops_registered_take_a_device_as_well(rewritten, device):
    options = onnxruntime.SessionOptions()
    kvfuse.register(options)
    session = kvfuse.InferenceSession(rewritten, options, device=device)
    logits(session, [IDS])
    assert session.past_length == len(IDS)
    assert PROVIDER in session.get_providers()


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"device": "gpu"}, "expected device to be one of 'metal', 'cuda', 'emulated'; found 'gpu'"),
        (
            {"device": "emulated", "variant": "fast"},
            "expected variant to be 'scalar' or 'simd'; found 'fast'",
        ),
        ({"devise": "emulated"}, "expected the options 'device' and 'variant'; found 'devise'"),
    ],
)
def test_the_provider_itself_refuses_wrong_options(choices, sentence):
    with pytest.raises(Exception, match=rf"\[{PROVIDER}\] {sentence}"):
        plain_session(choices)


def test_the_provider_says_why_a_device_is_not_usable():
    unusable = [device for device in kvfuse.devices() if not device.usable]
    assert unusable
    for device in unusable:
        with pytest.raises(Exception, match=rf"\[{PROVIDER}\] .*found {device.name}: "):
            plain_session({"device": device.name})


def test_without_a_gpu_the_provider_does_not_emulate_unasked():
    if any(device.usable for device in kvfuse.devices() if device.name in ("metal", "cuda")):
        assert plain_session({})
        return
    with pytest.raises(Exception, match=r"expected a GPU .*metal: .*cuda: .*device 'emulated'"):
        plain_session({})


def test_a_virtual_registration_needs_no_hardware_and_emulates_by_default():
    """In a process of its own, since a registration is for good."""
    code = f"""
import json, sys
import onnxruntime, kvfuse
onnxruntime.register_execution_provider_library("kvfuse.virtual", kvfuse.library_path())
(device,) = [d for d in onnxruntime.get_ep_devices() if d.ep_name == "{PROVIDER}"]
options = onnxruntime.SessionOptions()
options.add_provider_for_devices([device], {{}})
session = onnxruntime.InferenceSession(sys.stdin.buffer.read(), options, enable_fallback=0)
print(json.dumps([str(device.device.type), dict(device.device.metadata), session.get_providers()]))
"""
    done = subprocess.run([sys.executable, "-c", code], input=MODEL, capture_output=True, check=True)
    kind, metadata, providers = json.loads(done.stdout)
    assert kind.endswith("GPU")
    assert metadata["is_virtual"] == "1"
    assert providers[0] == PROVIDER


def test_plain_onnxruntime_needs_nothing_of_kvfuse_but_the_library(rewritten):
    """The documented lines for users who do not import kvfuse."""
    code = f"""
import sys
import numpy as np, onnxruntime
onnxruntime.register_execution_provider_library("kvfuse", {kvfuse.library_path()!r})
devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == "{PROVIDER}"]
options = onnxruntime.SessionOptions()
options.add_provider_for_devices(devices, {{"device": "emulated", "variant": "scalar"}})
session = onnxruntime.InferenceSession({str(rewritten)!r}, options)
ids = np.array([[1, 2, 3]])
feeds = {{"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.array([[0, 1, 2]])}}
print(session.run(["logits"], feeds)[0].shape, session.get_providers()[0], "kvfuse" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"(1, 3, 64) {PROVIDER} False"
