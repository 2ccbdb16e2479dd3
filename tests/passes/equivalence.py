"""Runs a model and its rewritten form side by side: in exact mode they must give the same numbers."""

import numpy as np
import onnx
import onnxruntime

import kvfuse

EXACT = 4096
SCHEDULES = ((9,), (1,) * 9, (4, 1, 3, 1))
TOLERANCE = 2e-5


def assert_same(model, folder, *, sites, batch=2, schedules=SCHEDULES, values=None, tolerance=TOLERANCE):
    """Rewrites a model in exact mode and compares all outputs that stay, in several schedules.

    Args:
        model: A ModelProto with inputs `past.…` (their dim "past" grows) and outputs `present.…`.
        folder: Where the two files go.
        sites: How many sites must be fused.
        values: Arrays of other inputs, or functions (start, stop) -> array.

    Returns:
        The report.
    """
    source, target = folder / "source.onnx", folder / "fused.onnx"
    onnx.save(model, source)
    report = kvfuse.rewrite(source, target, n_recent=EXACT)
    assert len(report.fused) == sites, [site.reason for site in report.sites]
    original = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    for schedule in schedules:
        expected = run(original, schedule, batch, values)
        found = run(kvfuse.InferenceSession(target), schedule, batch, values)
        for step, (one, other) in enumerate(zip(expected, found, strict=True)):
            for name, array in other.items():
                largest = max(1.0, float(np.abs(one[name]).max(initial=0.0)))
                np.testing.assert_allclose(
                    array, one[name], rtol=0, atol=tolerance * largest, err_msg=f"{name}, {schedule}, {step}"
                )
    return report


def run(session, schedule, batch, values=None):
    """The outputs of each run, the original's caches fed back; tokens are the same for every session."""
    ids = np.random.default_rng(1).integers(0, 32, (batch, sum(schedule)))
    pasts = {
        value.name: empty(value, batch) for value in session.get_inputs() if value.name.startswith("past.")
    }
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()} - {"kv_sequence", "kv_past_length"} - set(pasts)
    start, rows = 0, []
    for count in schedule:
        stop = start + count
        feeds = {"input_ids": ids[:, start:stop], "attention_mask": np.ones((batch, stop), np.int64)}
        for name, given in (values or {}).items():
            feeds[name] = given(start, stop) if callable(given) else given
        got = session.run(None, {name: feeds[name] for name in wanted} | pasts)
        outputs = dict(zip(names, got, strict=True))
        pasts = {name: outputs.get(name.replace("past", "present", 1), pasts[name]) for name in pasts}
        rows.append({name: array for name, array in outputs.items() if not name.startswith("present.")})
        start = stop
    return rows


def empty(value, batch):
    sizes = {"batch": batch, "past": 0}
    shape = [dim if isinstance(dim, int) else sizes[dim] for dim in value.shape]
    return np.zeros(shape, np.float16 if "float16" in value.type else np.float32)
