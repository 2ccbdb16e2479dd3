"""Reads any GGUF file: metadata fields, and weights dequantized to f32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from models.config import BuildError, require


class GgufFile:
    """One opened file; weights are memory-mapped and dequantized to f32 one at a time.

    Args:
        path: the .gguf file.
        architecture: what it must be of.

    Raises:
        BuildError: the file is of another architecture, or lacks a field.
    """

    def __init__(self, path: Path, architecture: str) -> None:
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        found = self.field("general.architecture")
        require(found == architecture, path.name, f"architecture {architecture}", found)

    def field(self, key: str) -> Any:
        """Returns one metadata value."""
        field = self._reader.get_field(key)
        if field is None:
            raise BuildError(f"[{key}] expected a metadata field of that name; found none")
        return field.contents()

    def stored_weight(self, name: str) -> np.ndarray:
        """Returns one tensor, f32, under its GGUF name and in its GGUF row order.

        Raises:
            BuildError: the file has no such tensor.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise BuildError(f"[{name}] expected a tensor of that name; found none")
        weight: np.ndarray = dequantize(tensor.data, tensor.tensor_type)
        return weight


def stored_name(name: str, global_names: Mapping[str, str], layer_names: Mapping[str, str]) -> str:
    """Translates a weight's usual name into the GGUF one."""
    if name in global_names:
        return global_names[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{layer_names[part.removesuffix('.weight')]}.weight"
