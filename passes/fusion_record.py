"""What a rewriting notes down of the original under the metadata key "kvfuse", read back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ..errors import ModelError
from .lower import DOMAIN


@dataclasses.dataclass(frozen=True)
class CacheSide:
    """The keys or the values of one layer's original cache.

    Attributes:
        past: The graph input.
        presents: The graph outputs that carried the appended tensor.
        layout: The order of its axes, or "BSC" for packed heads.
        kv_num_heads, head_dim: Sizes.
        dtype: Its element type.
        stacked_index: The place where keys and values were stacked on a leading axis of one input, else None.
    """

    past: str
    presents: tuple[str, ...]
    layout: str
    kv_num_heads: int
    head_dim: int
    dtype: ir.DataType
    stacked_index: int | None

    @property
    def rows_axis(self) -> int:
        """The axis of the sequence without the stacking."""
        return 1 if self.layout == "BSC" else self.layout.index("S")

    @property
    def sequence_axis(self) -> int:
        """The axis of the sequence in the graph input."""
        return self.rows_axis + int(self.stacked_index is not None)

    def usual_shape(self, length: str) -> list[int | str]:
        """The declared shape when none was noted; `length` names the dim of the sequence."""
        sizes: dict[str, int | str] = {
            "B": "batch_size",
            "H": self.kv_num_heads,
            "S": length,
            "D": self.head_dim,
            "C": self.kv_num_heads * self.head_dim,
        }
        return [*([2] if self.stacked_index is not None else []), *(sizes[axis] for axis in self.layout)]


@dataclasses.dataclass(frozen=True)
class CacheRecord:
    """One layer's original cache.

    Attributes:
        num_heads: Of the query; None when it was not noted.
        op_dtype: The element type of the op's operands.
        key, value: Its two sides.
    """

    num_heads: int | None
    op_dtype: ir.DataType
    key: CacheSide
    value: CacheSide


@dataclasses.dataclass(frozen=True)
class Record:
    """What is known of the original.

    Attributes:
        layers: Layer key -> its cache.
        inputs, outputs: Names in the original order; empty when they were not noted.
        dropped: Name of an input or output that went -> its dtype and shape.
    """

    layers: Mapping[str, CacheRecord]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dropped: Mapping[str, Mapping[str, Any]]

    def declare(self, value: ir.Value, name: str, side: CacheSide, length: str) -> ir.Value:
        """Gives a value the type that a cache input or output of that name had."""
        known = self.dropped.get(name, {})
        value.type = ir.TensorType(self.dtype_of(name, side))
        shape = known.get("shape")
        value.shape = ir.Shape(side.usual_shape(length) if shape is None else shape)
        return value

    def dtype_of(self, name: str, side: CacheSide) -> ir.DataType:
        """The element type of a cache input or output."""
        noted = self.dropped.get(name, {}).get("dtype")
        return side.dtype if noted is None else _dtype(noted)


def read_record(model: ir.Model) -> Record:
    """The model's record.

    Raises:
        ModelError: There is none, or it is not what a rewriting writes.
    """
    text = model.metadata_props.get(DOMAIN)
    if text is None:
        raise ModelError("[unfuse] expected a model that kvfuse rewrote; found no metadata 'kvfuse' in it")
    try:
        found = json.loads(text)
        return Record(
            {str(entry["layer"]): _cache(entry) for entry in found["caches"]},
            tuple(found.get("inputs", ())),
            tuple(found.get("outputs", ())),
            dict(found.get("dropped", {})),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(
            f"[unfuse] expected metadata 'kvfuse' as a rewriting writes it; found: {error!r}"
        ) from error


def _cache(entry: Mapping[str, Any]) -> CacheRecord:
    dtype = _dtype(entry["dtype"])
    heads = entry.get("num_heads")
    return CacheRecord(
        None if heads is None else int(heads),
        _dtype(entry.get("op_dtype", entry["dtype"])),
        _side(entry, "key", entry["head_dim"], dtype),
        _side(entry, "value", entry["value_head_dim"], dtype),
    )


def _side(entry: Mapping[str, Any], side: str, head_dim: int, dtype: ir.DataType) -> CacheSide:
    layout = entry[f"{side}_layout"]
    if layout != "BSC" and sorted(layout) != sorted("BHSD"):
        raise ValueError(f"the layout {layout!r}")
    names = [entry[f"present_{side}"], *entry.get("present_copies", {}).get(side, ())]
    stacked = entry["past_key"] == entry["past_value"]
    return CacheSide(
        past=str(entry[f"past_{side}"]),
        presents=tuple(dict.fromkeys(name for name in names if name is not None)),
        layout=layout,
        kv_num_heads=int(entry["kv_num_heads"]),
        head_dim=int(head_dim),
        dtype=dtype,
        stacked_index=int(side == "value") if stacked else None,
    )


def _dtype(name: str) -> ir.DataType:
    return ir.DataType[name.upper()]
