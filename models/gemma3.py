"""Builds Gemma-3-270M as ONNX, with its tokenizer, from the GGUF weights of Python packages.

`python models/gemma3.py --out DIR [--layers N]` writes `DIR/model.onnx`, `DIR/model.onnx.data` (1.07 GB, f32;
the weights were quantized to 4 to 8 bits) and `DIR/tokenizer.json`, or nothing when they are up to date. The
weights are under the Gemma Terms of Use.
"""

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

import onnx_ir as ir

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from kvfuse.errors import KVFuseError
from models import sources
from models.config import require
from models.folder import DATA, MODEL, TOKENIZER, fill, make_stamp
from models.gemma3_checkpoint import Gemma3Checkpoint
from models.gemma3_decoder import build_gemma3

SOURCE = "gemma3-270m"
# Edits of these do not make a build stale.
UNRELATED = {"demo.py", "tiny_decoder.py", "smollm2.py", "gguf_checkpoint.py", "bpe_tokenizer.py"}


def build(out: Path, layers: int | None = None, cache: Path = sources.DEFAULT_CACHE) -> Path:
    """Builds the model into the folder `out` unless it is there and up to date.

    Args:
        out: folder, made if need be.
        layers: keep only the first layers; default all 18.
        cache: where the downloaded checkpoint is kept.

    Returns:
        The path of model.onnx.

    Raises:
        BuildError: the checkpoint cannot be had or is not the pinned one, or `layers` is out of range.
    """
    source = sources.read_split_source(SOURCE)

    def write(fresh: Path) -> None:
        checkpoint = Gemma3Checkpoint(sources.fetch_split(source, cache))
        config = checkpoint.config
        if layers is not None:
            require(1 <= layers <= config.num_layers, "layers", f"1 to {config.num_layers}", layers)
            config = replace(config, num_layers=layers)
        ir.save(build_gemma3(config, checkpoint.weight), fresh / MODEL, external_data=DATA)
        checkpoint.tokenizer().save(str(fresh / TOKENIZER))

    return fill(out, make_stamp([asdict(source), layers], UNRELATED), write)


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and builds; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build Gemma-3-270M as ONNX.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--layers", type=int, help="keep only the first N of 18 layers")
    parser.add_argument("--cache", type=Path, default=sources.DEFAULT_CACHE, help="where downloads are kept")
    options = parser.parse_args(arguments)
    try:
        print(build(options.out, options.layers, options.cache))
    except KVFuseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
