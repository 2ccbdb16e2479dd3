"""Builds tiny seeded decoders in every attention spelling, in memory, for tests.

As a command: `python models/tiny_decoder.py --out tiny.onnx --spelling attention --sliding-window 5`.
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from kvfuse.errors import KVFuseError
from models.config import AttentionForm, BuildError, DecoderConfig
from models.decoder import build_decoder

DEFAULTS: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 4,
    "kv_num_heads": 2,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
}


def settings(spelling: str = "decomposed", **options: Any) -> tuple[DecoderConfig, AttentionForm]:
    """Sorts keyword options into the fields of `DecoderConfig` (over `DEFAULTS`) and `AttentionForm`.

    Raises:
        BuildError: an option is unknown, or a value is not allowed.
    """
    form_names = {field.name for field in fields(AttentionForm)}
    unknown = options.keys() - form_names - {field.name for field in fields(DecoderConfig)}
    if unknown:
        expected = "fields of DecoderConfig or AttentionForm"
        raise BuildError(f"[tiny_decoder] expected {expected}; found {sorted(unknown)}")
    form = {name: value for name, value in options.items() if name in form_names}
    config = {name: value for name, value in options.items() if name not in form_names}
    return DecoderConfig(**(DEFAULTS | config)), AttentionForm(spelling, **form)


def random_weights(config: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws f32 weights that keep activations near unit size; equal seeds and sizes give equal weights."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.weight_shapes().items():
        noise = rng.standard_normal(shape)
        weight = noise / np.sqrt(shape[-1]) if len(shape) == 2 else 1.0 + 0.1 * noise
        weights[name] = weight.astype(np.float32)
    return weights


def build(spelling: str = "decomposed", *, seed: int = 0, **options: Any) -> onnx.ModelProto:
    """Returns a tiny decoder with all its weights inside.

    Args:
        spelling: "decomposed", "attention" or "group_query_attention".
        seed: of the weights; the same for every spelling and variant of one size.
        **options: any field of `DecoderConfig` or `AttentionForm`, for example `num_layers=3`,
            `dtype="float16"`, `style="eager"`, `mask="causal"`, `sliding_window=5`, `softcap=3.0`.

    Raises:
        BuildError: an option is unknown, or a value is not allowed.
    """
    config, form = settings(spelling, **options)
    return ir.to_proto(build_decoder(config, form, random_weights(config, seed).__getitem__))


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and writes the file; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build a tiny seeded decoder.")
    parser.add_argument("--out", type=Path, required=True, help="the .onnx file to write")
    parser.add_argument("--seed", type=int, default=0)
    options = [field for kind in (DecoderConfig, AttentionForm) for field in fields(kind)]
    defaults = {field.name: DEFAULTS.get(field.name, field.default) for field in options}
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    parsed = vars(parser.parse_args(arguments))
    out = parsed.pop("out")
    try:
        model = build(**parsed)
    except KVFuseError as error:
        print(error, file=sys.stderr)
        return 1
    onnx.save(model, out)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
