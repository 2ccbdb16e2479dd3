"""Runs a decoder with float caches as graph inputs and outputs, in stock onnxruntime, in chunks of tokens."""

from pathlib import Path

import numpy as np
import onnxruntime

NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
# The order of f32 sums differs; f16 graphs also round every tensor.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3}
FED_BY_POSITION = ("input_ids", "position_ids")


def open_session(model):
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])


def signature(session):
    """Names, types and declared shapes of the inputs and the outputs, in order."""
    return [
        [(value.name, value.type, value.shape) for value in values]
        for values in (session.get_inputs(), session.get_outputs())
    ]


def empty_caches(session, presents, batch):
    """A zero-length array for each past input: dims named after a past are 0, other names are the batch."""
    caches = {}
    for value in session.get_inputs():
        if value.name in presents:
            shape = [dim if isinstance(dim, int) else 0 if "past" in dim else batch for dim in value.shape]
            caches[value.name] = np.zeros(shape, NUMPY[value.type])
    return caches


def run(session, presents, arrays, schedule):
    """All outputs of each chunk: the logits joined to [B, total, V], and the caches at the end.

    Args:
        session: The decoder.
        presents: past input -> present output.
        arrays: whole input_ids, attention_mask, position_ids, [B, total] each, and constant inputs.
        schedule: tokens per chunk.
    """
    names = [value.name for value in session.get_outputs()]
    batch = arrays["input_ids"].shape[0]
    caches, rows, start = empty_caches(session, presents, batch), [], 0
    for count in schedule:
        feeds = dict(caches)
        for value in session.get_inputs():
            if value.name in presents:
                continue
            if value.name == "attention_mask":
                feeds[value.name] = arrays[value.name][:, : start + count].astype(np.int64)
            elif value.name in FED_BY_POSITION:
                feeds[value.name] = arrays[value.name][:, start : start + count].astype(np.int64)
            else:
                feeds[value.name] = arrays[value.name]
        got = dict(zip(names, session.run(None, feeds), strict=True))
        caches = {past: got[present] for past, present in presents.items()}
        rows.append(got["logits"].astype(np.float32))
        start += count
    return np.concatenate(rows, axis=1), caches


def presents_of(report):
    """past input -> present output of an unfused model; both come in the original's order."""
    assert len(report.inputs) == len(report.outputs)
    return dict(zip(report.inputs, report.outputs, strict=True))
