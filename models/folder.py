"""Writes a built model's folder in one step, and knows when it is up to date."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

MODEL, DATA, TOKENIZER, STAMP = "model.onnx", "model.onnx.data", "tokenizer.json", "build.json"
_FILES = (DATA, MODEL, TOKENIZER)


def make_stamp(options: object, unrelated: Iterable[str]) -> str:
    """Returns a hash of everything a result depends on: options (plain data), and the code beside this file.

    Args:
        options: source, sizes and form.
        unrelated: names of files here whose edits do not make a build stale.
    """
    digest = hashlib.sha256(json.dumps(options).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in unrelated:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def fill(out: Path, stamp: str, write: Callable[[Path], None]) -> Path:
    """Makes the folder `out` hold MODEL, DATA and TOKENIZER as `write` writes them, unless it does already.

    Files appear whole or not at all; an interrupted build is done again.

    Args:
        out: folder, made if need be.
        stamp: of what `write` would write.
        write: writes the three files into a folder.

    Returns:
        The path of MODEL.
    """
    if _up_to_date(out, stamp):
        return out / MODEL
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        fresh = Path(folder)
        write(fresh)
        sizes = {name: (fresh / name).stat().st_size for name in _FILES}
        (fresh / STAMP).write_text(json.dumps({"stamp": stamp, "sizes": sizes}, indent=1), encoding="utf-8")
        (out / STAMP).unlink(missing_ok=True)  # without a stamp, a half-replaced folder counts as stale
        for name in (*_FILES, STAMP):
            os.replace(fresh / name, out / name)
    return out / MODEL


def _up_to_date(out: Path, stamp: str) -> bool:
    """Tells whether `out` holds a finished build with that stamp and files of the sizes it wrote."""
    try:
        written = json.loads((out / STAMP).read_text(encoding="utf-8"))
        sizes = {name: (out / name).stat().st_size for name in _FILES}
    except (OSError, ValueError):
        return False
    return bool(written == {"stamp": stamp, "sizes": sizes})
