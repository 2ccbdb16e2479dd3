"""Who runs which node: QuantizedKvSdpa on the provider, everything else on the CPU."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from op_graph import Graph, build_model
from op_harness import OpSession, feed, random_history
from reference import OpConfig
from tiny_feeds import IDS, feeds, logits

import kvfuse
from kvfuse.provider import PROVIDER, add_device


def assigned(session) -> dict[str, list[str]]:
    """Provider -> types of the nodes that onnxruntime gave to it."""
    found: dict[str, list[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        found.setdefault(part.ep_name, []).extend(node.op_type for node in part.get_nodes())
    return found


def recording() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.log_severity_level = 3
    return options


def test_the_provider_gets_every_attention_node_and_no_other(rewritten, device):
    session = kvfuse.InferenceSession(rewritten, recording(), device=device)
    nodes = assigned(session)
    assert nodes[PROVIDER] == ["QuantizedKvSdpa"] * 2
    assert nodes["CPUExecutionProvider"].count("KvCacheBegin") == 1
    assert "QuantizedKvSdpa" not in nodes["CPUExecutionProvider"]
    assert session.get_providers() == [PROVIDER, "CPUExecutionProvider"]


@pytest.mark.parametrize("choice", [None, "cpu"])
def test_a_session_without_a_device_stays_on_the_cpu(rewritten, device, choice):
    kvfuse.InferenceSession(rewritten, device=device)  # the provider is registered now
    session = kvfuse.InferenceSession(rewritten, recording(), device=choice)
    assert PROVIDER not in assigned(session)
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert logits(session, [IDS]).shape == (1, len(IDS), 64)


def test_a_profile_names_the_provider_of_each_run_node(rewritten, device, tmp_path):
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = kvfuse.InferenceSession(rewritten, options, device=device)
    logits(session, [IDS])
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = {(e["args"]["op_name"], e["args"]["provider"]) for e in events if "provider" in e.get("args", {})}
    assert ("QuantizedKvSdpa", PROVIDER) in ran
    assert ("QuantizedKvSdpa", "CPUExecutionProvider") not in ran
    assert ("KvCacheBegin", "CPUExecutionProvider") in ran


def test_a_model_without_kvfuse_ops_runs_beside_the_provider(original, device):
    session = kvfuse.InferenceSession(original, recording(), device=device)
    assert PROVIDER not in assigned(session)
    plain = onnxruntime.InferenceSession(original, providers=["CPUExecutionProvider"])
    empty = {i.name: np.zeros((1, 2, 0, 16), np.float32) for i in plain.get_inputs() if "past" in i.name}
    for found, expected in zip(
        session.run(None, feeds([IDS]) | empty), plain.run(None, feeds([IDS]) | empty), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("slots", [True, False])
def test_every_form_of_the_node_is_taken(device, dtype, slots):
    """Both element types, and the three-input form whose state is its own."""
    graph = Graph((OpConfig(n_recent=3),), dtype=dtype, slots=slots)
    options = recording()
    add_device(options, device)
    session = onnxruntime.InferenceSession(build_model(graph).SerializeToString(), options, enable_fallback=0)
    assert assigned(session)[PROVIDER] == ["QuantizedKvSdpa"]
    history = random_history(5, 9, dtype=dtype)
    on_device = OpSession(graph, device=device)
    found, expected = feed(on_device, history, (5, 1, 3)), feed(OpSession(graph, device="cpu"), history, (9,))
    # two paths of f32, each within 1e-5 of the formula, and a half's rounding
    np.testing.assert_allclose(found, expected, atol=2e-5 if dtype == "float32" else 2e-3)


def test_a_session_saves_and_reloads_its_optimized_model(rewritten, device, tmp_path):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    first = kvfuse.InferenceSession(rewritten, options, device=device)
    again = kvfuse.InferenceSession(tmp_path / "optimized.onnx", device=device)
    np.testing.assert_array_equal(logits(first, [IDS]), logits(again, [IDS]))
