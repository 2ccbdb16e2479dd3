"""The decoders that mutants come from, and how to run one: tokens in, logits out, its caches fed back."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64,
          "tensor(int32)": np.int32, "tensor(bool)": np.bool_}  # fmt: skip
TOTAL = 9
BATCH = 2
HIDDEN = 7  # encoder tokens


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model and how to run it.

    Attributes:
        presents: cache input -> the output that feeds it, None for a cache that never changes.
        arrays: values of the inputs that are neither tokens nor lengths, and of caches that start full.
        batch: rows of all inputs.
        start: tokens that the caches start with.
        head_dim: the size of a cache's last axis where its input does not say it.
        growing: the axis of the tokens in a cache.
    """

    name: str
    model: onnx.ModelProto
    presents: Mapping[str, str | None]
    tolerance: float = 2e-5
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    batch: int = 2
    start: int = 0
    head_dim: int = 8
    growing: int = 2


def load(folder: Path) -> list[Decoder]:
    """The graphs of a corpus: manifest.json says which output feeds which input."""
    entries = json.loads((folder / "manifest.json").read_text())["graphs"]
    return [decoder_of(folder, entry) for entry in entries if (folder / entry["file"]).is_file()]


def decoder_of(folder: Path, entry: Mapping[str, Any]) -> Decoder:
    model = onnx.load(folder / entry["file"])
    stored = dict(np.load(folder / entry["reference"])) if entry.get("reference") else {}
    # GroupQueryAttention takes several tokens after the first run for one row only.
    alone = any(node.op_type == "GroupQueryAttention" for node in model.graph.node)
    batch = 1 if alone or not any(key.startswith("b2.") for key in stored) else 2
    layout = [word.strip() for word in entry["cache_layout"].split("]")[0].strip("[ ").split(",")]
    rows = {key.split(".", 1)[1]: array for key, array in stored.items() if key.startswith(f"b{batch}.")}
    kept = {key.removeprefix("prefill_state."): array for key, array in rows.items()}
    full = any(key.startswith("prefill_state.") for key in rows)
    return Decoder(
        name=entry["file"],
        model=model,
        presents=entry.get("past_to_present", {}),
        tolerance=5e-3 if entry["dtype"] == "float16" else 2e-5,
        arrays={key: array for key, array in kept.items() if key.startswith(("encoder_", "past_"))},
        batch=batch,
        start=int(rows["schedule"][0]) if full else 0,
        head_dim=entry["head_dim"],
        growing=layout.index("seq") if "seq" in layout else 2,
    )


def sequence_input(graph: onnx.GraphProto) -> Any:
    """The dims of `input_ids`."""
    for value in graph.input:
        if value.name == "input_ids" and len(value.type.tensor_type.shape.dim) == 2:
            return value.type.tensor_type.shape.dim
    return None


def run(session: Any, source: Decoder, schedule: Sequence[int]) -> list[np.ndarray]:
    """The logits of every run [B, S, V].

    Raises:
        ArithmeticError: a cache is not finite. The op makes such a token poison whoever sees it; a graph may
            turn the NaN into a zero.
        Exception: whatever onnxruntime raises.
    """
    ids = np.random.default_rng(0).integers(0, 32, (source.batch, source.start + sum(schedule)))
    outputs = [value.name for value in session.get_outputs()]
    inputs = {value.name: value for value in session.get_inputs()}
    caches = {name: first_cache(inputs[name], source) for name in source.presents if name in inputs}
    hidden = {n: a for n, a in source.arrays.items() if n in source.presents and n not in inputs}
    if hidden:
        session.import_past(hidden)
    start, rows = source.start, []
    for count in schedule:
        stop = start + count
        feeds = dict(caches)
        for name, value in inputs.items():
            if name not in caches:
                array = np.asarray(feed(name, source, ids, start, stop), DTYPES[value.type])
                feeds[name] = array.reshape([1] * len(value.shape)) if array.ndim == 0 else array
        got = dict(zip(outputs, session.run(None, feeds), strict=True))
        for past in caches:
            present = caches[past] if source.presents[past] is None else got[source.presents[past]]
            if present.size or not caches[past].size:
                caches[past] = present
            if not np.isfinite(present).all():
                raise ArithmeticError(f"{past} holds NaN or infinity")
        rows.append(np.asarray(got["logits"], np.float32))
        start = stop
    return rows


def feed(name: str, source: Decoder, ids: np.ndarray, start: int, stop: int) -> Any:
    """The value of one input that is no cache, for tokens start to stop."""
    batch = source.batch
    known = {
        "input_ids": ids[:, start:stop],
        "attention_mask": np.ones((batch, stop)),
        "position_ids": np.tile(np.arange(start, stop), (batch, 1)),
        "past_sequence_length": start,
        "write_indices": np.full(batch, start),
        "nonpad_kv_seqlen": np.full(batch, stop),
        "use_cache_branch": [start > 0],
        "cache_position": np.arange(start, stop),
    }
    return known[name] if name in known else source.arrays[name]


def first_cache(value: Any, source: Decoder) -> np.ndarray:
    """What a cache input holds before the first run: the source's array, else no tokens (zeros if static)."""
    if value.name in source.arrays:
        return source.arrays[value.name]
    shape = []
    for axis, dim in enumerate(value.shape):
        if isinstance(dim, int):
            shape.append(dim)
        elif axis == source.growing or (dim is not None and ("past" in dim or "encoder" in dim)):
            shape.append(0)
        else:
            shape.append(source.head_dim if axis == len(value.shape) - 1 else source.batch)
    return np.zeros(shape, DTYPES[value.type])
