"""A real model whose keys carry strong constant offsets, as the QKV bias of some model families makes them.

`python benchmarks/offset_model.py MODEL --out FILE [--where bias-slow|bias-mid|bias-fast|rotated]
[--multiple 30]` adds, in every layer and kv head, `multiple` times the head's rms to two channels of the
key: before the rotary embedding as a projection bias would, in its slowest, middle or fastest pairs, or
behind it, where a constant leaves the float model's function as it is. The new file shares the original's
external data, so it must lie in the same folder. The float model that results is the baseline of its own
comparisons.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from kvfuse.passes.rewriting import plan_rewriting

from kvfuse.auto.probe import Probe, ProbeRun
from kvfuse.auto.rewritten import Rewritten
from kvfuse.formats import PRESETS
from kvfuse.modelfile import read

PLACES = ("bias-slow", "bias-mid", "bias-fast", "rotated")


def key_rms(path: Path) -> dict[str, NDArray[np.float64]]:
    """The rms of every layer's keys by kv head, on 256 pseudo-random tokens."""
    source = read(path)
    model = plan_rewriting(source.model).apply(
        PRESETS["default"].attributes(), source.fingerprint, {"options": {}}
    )
    ids = np.random.default_rng(0).integers(0, 1000, 256)
    found = {}
    for layer, attention in ProbeRun(Rewritten(model), Probe("random", token_ids=ids)).attentions():
        key = attention.operands["key"].astype(np.float64)
        key = key.swapaxes(1, 2) if attention.attributes["axis"] == 1 else key
        found[layer] = np.sqrt((key**2).mean((0, 2, 3)))
    return found


def offsets(rms: NDArray[np.float64], size: int, where: str, multiple: float, rng: np.random.Generator):
    """Offsets f32 [K, D] of one layer; channels i and i + D/2 make a rotary pair, slow for large i."""
    result = np.zeros((len(rms), size), np.float32)
    for head in range(len(rms)):
        base = {"bias-slow": size // 2 - 2, "bias-mid": size // 4, "bias-fast": 2}.get(where)
        channels = rng.permutation(size)[:2] if base is None else np.array([base, base + 1 + size // 2])
        result[head, channels] = multiple * rms[head] * rng.choice([-1.0, 1.0], 2)
    return result


def add_offsets(path: Path, out: Path, where: str, multiple: float, seed: int = 7) -> Path:
    """Writes the model with offsets; returns `out`."""
    rms, rng = key_rms(path), np.random.default_rng(seed)
    model = onnx.load(path, load_external_data=False)
    products = {
        node.input[1].split(".self_attn.")[0].rsplit(".", 1)[-1]: node
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1].endswith("self_attn.k_proj.weight")
    }
    for layer, values in rms.items():
        product = products[layer]
        width = next(t for t in model.graph.initializer if t.name == product.input[1]).dims[1]
        offset = offsets(values, width // len(values), where, multiple, rng)
        target, shape = product, (width,)
        if where == "rotated":
            target, shape = _rotated(model, layer), (len(values), 1, width // len(values))
        insert_add(model, target, offset.reshape(shape), f"key_offset.{layer}")
    onnx.save(model, out)
    return out


def _rotated(model: onnx.ModelProto, layer: str) -> onnx.NodeProto:
    """The node that makes the rotated keys: what the Concat with the cache reads second."""
    concat = next(
        n for n in model.graph.node if n.op_type == "Concat" and n.input[0] == f"past_key_values.{layer}.key"
    )
    return next(n for n in model.graph.node if concat.input[1] in n.output)


def insert_add(model: onnx.ModelProto, node: onnx.NodeProto, array: NDArray[np.float32], name: str) -> None:
    """Adds a constant to the first output of a node, for all who read it."""
    before = f"{name}.before"
    added = onnx.helper.make_node("Add", [before, name], [node.output[0]], name=name)
    node.output[0] = before
    model.graph.initializer.append(numpy_helper.from_array(array, name))
    model.graph.node.insert(list(model.graph.node).index(node) + 1, added)


def main() -> None:
    """Parses the command line and writes the file."""
    parser = argparse.ArgumentParser(description="Give a model strong constant key offsets.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--where", choices=PLACES, default=PLACES[0])
    parser.add_argument("--multiple", type=float, default=30)
    options = parser.parse_args()
    if options.out.resolve().parent != options.model.resolve().parent:
        parser.error("--out must lie in the model's folder, whose external data both share")
    print(add_offsets(options.model, options.out, options.where, options.multiple))


if __name__ == "__main__":
    main()
