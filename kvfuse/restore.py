"""`kvfuse.unfuse`: a rewritten model back in its original form, with float caches as inputs and outputs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from .errors import ModelError
from .modelfile import read, serialize, write
from .passes.unfuse import unfuse as unfuse_graph
from .pipeline import Model, require_order

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True)
class UnfuseReport:
    """What `unfuse` did.

    Attributes:
        source, destination: Paths; None for a model in memory or when nothing was written.
        layers: The state keys of the layers that have float caches again.
        inputs, outputs: The names of the restored cache inputs and outputs.
        model: The restored model when the source was one in memory.
    """

    source: str | None
    destination: str | None
    layers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    model: onnx.ModelProto | ir.Model | None = dataclasses.field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data (what `--json` prints)."""
        return {
            "source": self.source,
            "destination": self.destination,
            "layers": list(self.layers),
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
        }

    def render(self, console: Console) -> None:
        """Prints one sentence."""
        found = f"{len(self.inputs)} inputs, {len(self.outputs)} outputs"
        console.print(f"{len(self.layers)} layers have float caches again: {found}", highlight=False)


def unfuse(src: Model, dst: str | os.PathLike[str] | None = None) -> UnfuseReport:
    """Gives a rewritten model the inputs and outputs of its original back.

    The result computes what the original did, in floats, with attention in plain ONNX ops; it needs no
    library.

    Args:
        src: A path, an onnx.ModelProto or an onnx_ir.Model; never modified (unless `dst` is the same path).
        dst: Where to write; may be left out for a model in memory, whose result is `report.model`.

    Returns:
        The names of what came back.

    Raises:
        ModelError: The model cannot be read or written, or was not rewritten by kvfuse.
    """
    if dst is None and isinstance(src, (str, os.PathLike)):
        raise ModelError(
            f"[{os.fspath(src)}] expected a destination path for a model read from a file; found none"
        )
    source = read(src)
    before = _interface(source.model.graph)
    record = unfuse_graph(source.model)
    require_order(source.model.graph)
    inputs, outputs = _interface(source.model.graph)
    if dst is not None:
        write(source, changed=True, destination=Path(dst))
    model: onnx.ModelProto | ir.Model | None = None
    if isinstance(src, onnx.ModelProto):
        model = serialize(source.model)
    elif isinstance(src, ir.Model):
        model = source.model
    return UnfuseReport(
        source=None if source.path is None else str(source.path),
        destination=None if dst is None else str(dst),
        layers=tuple(record.layers),
        inputs=tuple(name for name in inputs if name not in before[0]),
        outputs=tuple(name for name in outputs if name not in before[1]),
        model=model,
    )


def _interface(graph: ir.Graph) -> tuple[list[str], list[str]]:
    return [str(value.name) for value in graph.inputs], [str(value.name) for value in graph.outputs]
