"""Real exported graphs, rewritten: exact mode is the original, 4-bit mode does not depend on the chunks.

`tests/data/corpus` holds graphs of several exporters (random weights) and, for each, the logits that the
original gave in onnxruntime, in batches of one and of two rows, the second left-padded.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import kvfuse
from kvfuse import _native

CORPUS = Path(__file__).resolve().parents[1] / "data" / "corpus"
GRAPHS = {entry["file"]: entry for entry in json.loads((CORPUS / "manifest.json").read_text())["graphs"]}
FUSABLE = sorted(name for name, entry in GRAPHS.items() if entry["expected_fusable_sites"])
# Exact mode differs from the original only in the order of f32 sums; f16 graphs also round every tensor.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3}
BATCHES = ("b1", "b2")


def skip_where_too_new(entry):
    opset = entry["opset"]["ai.onnx"]
    newest = 23 if onnxruntime.__version__.startswith("1.24") else 25
    if opset > newest:
        pytest.skip(f"onnxruntime {onnxruntime.__version__} does not run opset {opset}")


def load_reference(entry, batch):
    with np.load(CORPUS / entry["reference"]) as arrays:
        return {key.split(".", 1)[1]: arrays[key] for key in arrays.files if key.startswith(batch + ".")}


def schedules(total):
    return {
        "one prefill": [total],
        "token by token": [1] * total,
        "ragged chunks": [3, 1, 2, *[1] * (total - 6)],
    }


def run(session, arrays, schedule):
    """Teacher-forced logits [B, total, V] and the states that the session's own sequences end in."""
    names = [value.name for value in session.get_inputs()]
    rows, start = [], 0
    for count in schedule:
        stop = start + count
        feeds = {}
        for name in names:
            cut = slice(0, stop) if name == "attention_mask" else slice(start, stop)
            feeds[name] = arrays[name][:, cut].astype(np.int64)
        rows.append(session.run(["logits"], feeds)[0].astype(np.float32))
        start = stop
    return np.concatenate(rows, axis=1)


def states(session, layers):
    return [_native.dump_layer(sequence.id, layer) for sequence in session.sequences for layer in layers]


def real_tokens(arrays):
    return arrays["attention_mask"].astype(bool) if "attention_mask" in arrays else slice(None)


@pytest.mark.parametrize("name", FUSABLE)
def test_exact_mode_is_the_original(name, tmp_path):
    entry = GRAPHS[name]
    skip_where_too_new(entry)
    target = tmp_path / name
    report = kvfuse.rewrite(str(CORPUS / name), str(target), n_recent=4096).to_dict()
    assert [site["outcome"] for site in report["sites"]] == ["fused"] * entry["expected_fusable_sites"]
    for batch in BATCHES:
        arrays = load_reference(entry, batch)
        expected = arrays["logits"].astype(np.float32)
        limit = TOLERANCE[entry["dtype"]] * max(1.0, float(np.abs(expected).max()))
        for label, schedule in schedules(expected.shape[1]).items():
            got = run(kvfuse.InferenceSession(str(target)), arrays, schedule)
            error = np.abs(got - expected)[real_tokens(arrays)].max()
            assert error <= limit, f"{batch}, {label}: {error} > {limit}"


@pytest.mark.parametrize(
    "options", [{"format": "int4"}, {"n_recent": 2, "block": 4, "n_sink": 1}], ids=["int4", "blocks"]
)
@pytest.mark.parametrize("name", FUSABLE)
def test_low_bit_mode_does_not_depend_on_the_chunks(name, options, tmp_path):
    entry = GRAPHS[name]
    skip_where_too_new(entry)
    target = tmp_path / name
    report = kvfuse.rewrite(str(CORPUS / name), str(target), **options).to_dict()
    layers = [site["layer"] for site in report["sites"]]
    arrays = load_reference(entry, "b2")
    outputs, dumps = [], []
    for schedule in schedules(arrays["input_ids"].shape[1]).values():
        session = kvfuse.InferenceSession(str(target))
        outputs.append(run(session, arrays, schedule)[real_tokens(arrays)])
        dumps.append(states(session, layers))
    differing = max(share_of_differing_codes(dumps[0], other) for other in dumps[1:])
    assert differing <= MAY_DIFFER[entry["dtype"]]
    original = arrays["logits"].astype(np.float32)[real_tokens(arrays)]
    scale = max(1.0, float(np.abs(original).max()))
    for output in outputs:
        if not differing:
            assert np.abs(output - outputs[0]).max() <= TOLERANCE[entry["dtype"]] * scale
        assert 0 < np.abs(output - original).max() <= 0.5 * scale


# The op itself is chunk-invariant to the bit (tests/ops); what feeds it here is not: onnxruntime's MatMul may
# round one row differently from the same row among many, by some 1e-6 (f16: 1e-3) of its size, and so move a
# code that lies that near to a tie: about that share of all codes times the 15 of the range. A dependence on
# chunks would change whole blocks.
MAY_DIFFER = {"float32": 2e-3, "float16": 5e-2}


def share_of_differing_codes(left, right):
    """The share of key and value codes that differ, none by more than one step."""
    count = different = 0
    for a, b in zip(left, right, strict=True):
        assert (a["length"], a["encoded_end"], a["exact_begin"]) == (
            b["length"],
            b["encoded_end"],
            b["exact_begin"],
        )
        for key in ("key_codes", "value_codes"):
            for shift in (0, 4):  # two codes in each byte
                one, other = ((codes.astype(int) >> shift) & 15 for codes in (a[key], b[key]))
                step = (one - other) % 16
                assert np.isin(step, (0, 1, 15)).all(), key
                different += np.count_nonzero(step)
                count += step.size
        assert a.keys() == b.keys()
    return different / max(count, 1)


@pytest.mark.parametrize("name", sorted(set(GRAPHS) - set(FUSABLE)))
def test_what_is_not_fusable_is_refused_and_untouched(name, tmp_path):
    target = tmp_path / name
    report = kvfuse.rewrite(str(CORPUS / name), str(target), n_recent=4096).to_dict()
    assert [site["outcome"] for site in report["sites"] if site["outcome"] == "fused"] == []
    assert all(site["reason"] for site in report["sites"])
