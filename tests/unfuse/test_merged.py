"""Merged decoders (an If with a branch that starts again) get their caches back in both branches."""

import numpy as np
import onnxruntime
import pytest
from decoder_graphs import HEAD_DIM, HEADS, WIDTH
from float_decoder import signature
from merged_graphs import merged

import kvfuse


def conversation(session, cached):
    """Logits of a prompt in the fresh branch, with `cached` meaningless rows in its caches, then steps."""
    rng = np.random.default_rng(0)
    ids, encoder = rng.integers(0, 32, (2, 9)), rng.standard_normal((2, 6, WIDTH)).astype(np.float32)
    names = [value.name for value in session.get_inputs()]
    lengths = {name: cached if "decoder" in name else 6 for name in names if name.startswith("past.")}
    pasts = {name: np.full((2, HEADS, rows, HEAD_DIM), 7, np.float32) for name, rows in lengths.items()}
    outputs = [value.name for value in session.get_outputs()]
    rows, start = [], 0
    for count in (5, 1, 3):
        feeds = {
            "input_ids": ids[:, start : start + count],
            "encoder": encoder,
            "use_cache": np.array([start > 0]),
            **pasts,
        }
        got = dict(zip(outputs, session.run(None, {name: feeds[name] for name in names}), strict=True))
        pasts = {name: got[name.replace("past", "present", 1)] for name in pasts}
        rows.append(got["logits"])
        start += count
    return np.concatenate(rows, axis=1), pasts


def open_session(model):
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("past_branch", ["then_branch", "else_branch"])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("cached", [0, 1])
def test_both_branches_come_back(cached, cross, past_branch):
    model = merged(cross=cross, past_branch=past_branch)
    report = kvfuse.rewrite(model)
    assert len(report.fused) == 2
    restored = kvfuse.unfuse(report.model)
    original, session = open_session(model), open_session(restored.model)
    assert signature(session) == signature(original)
    expected, caches = conversation(original, cached)
    logits, restored_caches = conversation(session, cached)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)
    for name, cache in caches.items():
        np.testing.assert_allclose(restored_caches[name], cache, rtol=0, atol=2e-5, err_msg=name)
