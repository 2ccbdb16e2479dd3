"""Float caches in and out of a rewritten model's sequences, under the original graph's names.

Importing appends: the rows go through the same op, in a graph that has nothing but its appends, so the state
is the one that a run over the same keys and values leaves. All keys of that run are padding; nothing attends.

Dims: B batch_size, K kv_num_heads, P past_sequence_length, D head_dim.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from kvfuse.decoder import METADATA_KEY
from kvfuse.errors import ModelError, SequenceError
from kvfuse.library import native, register
from kvfuse.session import kernel_errors

DOMAIN = "kvfuse"
# The permutation from a cache's own layout to B, K, P, D; a packed "BSC" cache is split first.
_TO_BHSD = {"BHSD": (0, 1, 2, 3), "BSHD": (0, 2, 1, 3), "SBHD": (1, 2, 0, 3), "BHDS": (0, 1, 3, 2)}
# ONNX's names of the element types that a cache may have.
_DTYPES = {"float": np.float32, "float16": np.float16, "double": np.float64}


@dataclass(frozen=True)
class Cache:
    """One side of one layer's cache, as the original graph had it.

    Attributes:
        layer: The state key.
        name: The original graph input.
        layout: The order of its axes.
        dtype: Its element type.
        kv_num_heads, head_dim: Sizes.
        is_key: Keys or values.
        stacked_index: The place on a leading axis where keys and values are stacked in one input, or None.
    """

    layer: str
    name: str
    layout: str
    dtype: np.dtype[Any]
    kv_num_heads: int
    head_dim: int
    is_key: bool
    stacked_index: int | None = None

    def to_rows(self, array: NDArray[Any]) -> NDArray[np.float32]:
        """An array in the original layout as f32 [B, K, P, D].

        Raises:
            SequenceError: its shape does not fit.
        """
        rows = np.asarray(array)
        if self.stacked_index is not None and rows.ndim:
            rows = rows[self.stacked_index]
        if self.layout == "BSC" and rows.ndim == 3:
            rows = rows.reshape(*rows.shape[:2], self.kv_num_heads, -1)
        if rows.ndim == 4:
            rows = rows.transpose(_TO_BHSD["BSHD" if self.layout == "BSC" else self.layout])
        if rows.ndim != 4 or (rows.shape[1], rows.shape[3]) != (self.kv_num_heads, self.head_dim):
            raise SequenceError(
                f"[import_past] expected {self.name} to hold {self.kv_num_heads} heads of {self.head_dim} "
                f"channels in the layout {self.layout}; found shape {list(np.shape(array))}"
            )
        return np.ascontiguousarray(rows, np.float32)

    def from_rows(self, rows: NDArray[np.float32]) -> NDArray[Any]:
        """The inverse of `to_rows` for f32 [B, K, P, D], without the stacking."""
        layout = "BSHD" if self.layout == "BSC" else self.layout
        array = rows.transpose(np.argsort(_TO_BHSD[layout]))
        if self.layout == "BSC":
            array = array.reshape(*array.shape[:2], -1)
        return np.ascontiguousarray(array, self.dtype)


class PastIO:
    """Moves float caches in and out of sequences of one rewritten model.

    Args:
        model: The path or bytes of the rewritten model; weights are not read.

    Raises:
        ModelError: it is no rewritten model.
    """

    def __init__(self, model: str | bytes | Path) -> None:
        proto = _load(model)
        text = next((entry.value for entry in proto.metadata_props if entry.key == METADATA_KEY), None)
        nodes = {node.op_type: node for node in _nodes(proto.graph) if node.domain == DOMAIN}
        if text is None or "KvCacheBegin" not in nodes:
            raise ModelError("[past] expected a model that kvfuse has rewritten; found none of its ops")
        self.caches = [cache for entry in json.loads(text)["caches"] for cache in _caches(entry)]
        self._begin = _copy(nodes["KvCacheBegin"])
        self._ops = {
            _attribute(node, "layer").decode(): _copy(node)
            for node in _nodes(proto.graph)
            if node.domain == DOMAIN and node.op_type == "QuantizedKvSdpa"
        }

    def batch_size(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """The rows of the arrays that are caches of this model; the largest where they differ."""
        known = [cache for cache in self.caches if cache.name in arrays]
        return max((cache.to_rows(arrays[cache.name]).shape[0] for cache in known), default=0)

    def load(self, arrays: Mapping[str, NDArray[Any]], handles: Sequence[int]) -> None:
        """Replaces what the sequences hold, one per batch row, by float caches.

        Args:
            arrays: original past input name -> array, for every cache of the model.
            handles: the sequences.

        Raises:
            SequenceError: a cache is missing, unknown or of another shape; the sequences are as before.
        """
        rows = self._rows(arrays, len(handles))
        session = onnxruntime.InferenceSession(self._append_model(), _options(), ["CPUExecutionProvider"])
        feeds: dict[str, NDArray[Any]] = {
            f"{'key' if cache.is_key else 'value'}_{self._position(cache)}": array
            for cache, array in rows.items()
        }
        length = next(iter(rows.values())).shape[2]
        feeds["padding"] = np.zeros((len(handles), length), np.int64)
        feeds["kv_sequence"] = np.asarray(handles, np.int64)
        with kernel_errors():
            session.run(None, feeds)

    def save(self, handles: Sequence[int], length: int) -> dict[str, NDArray[Any]]:
        """Reads the first `length` tokens of sequences as the original graph's past inputs.

        Tokens in the exact windows come back as they went in, the others as what their codes stand for;
        tokens that a sliding window has freed are zeros.

        Returns:
            original past input name -> array in its own layout and dtype.
        """
        read = {
            layer: [native().read_layer(handle, layer, length) for handle in handles] for layer in self._ops
        }
        stacks: dict[str, dict[int, NDArray[Any]]] = {}
        result: dict[str, NDArray[Any]] = {}
        for cache in self.caches:
            rows = np.stack([pair[0 if cache.is_key else 1] for pair in read[cache.layer]])
            if cache.stacked_index is None:
                result[cache.name] = cache.from_rows(rows)
            else:
                stacks.setdefault(cache.name, {})[cache.stacked_index] = cache.from_rows(rows)
        return result | {name: np.stack([parts[0], parts[1]]) for name, parts in stacks.items()}

    def _rows(self, arrays: Mapping[str, NDArray[Any]], batch: int) -> dict[Cache, NDArray[np.float32]]:
        names = {cache.name for cache in self.caches}
        for name in sorted(names ^ arrays.keys()):
            problem = "found no such array" if name in names else f"found {name!r}, which is none of them"
            raise SequenceError(f"[import_past] expected one array for each of {sorted(names)}; {problem}")
        rows = {cache: cache.to_rows(arrays[cache.name]) for cache in self.caches}
        sizes = {(array.shape[0], array.shape[2]) for array in rows.values()}
        if len(sizes) != 1 or next(iter(sizes))[0] != batch:
            raise SequenceError(
                f"[import_past] expected {batch} rows of one length in every array; found (rows, length) "
                f"{sorted(sizes)}"
            )
        return rows

    def _position(self, cache: Cache) -> int:
        return list(self._ops).index(cache.layer)

    def _append_model(self) -> bytes:
        """A graph of the model's ops, each fed from inputs `key_i` and `value_i`; the query is the key."""
        begin = _copy(self._begin)
        del begin.input[:], begin.output[:]
        begin.input.extend(["kv_sequence", "kv_past_length", "padding"])
        # All of them: onnxruntime 1.24 aborts at a node that lacks the last outputs of its op.
        begin.output.extend(["slots", "past_length", "past_lengths"])
        nodes, inputs, outputs = [begin], [], []
        for position, op in enumerate(self._ops.values()):
            node = _copy(op)
            del node.input[:], node.output[:], node.attribute[:]
            node.attribute.extend(a for a in op.attribute if a.name not in ("axis", "layer"))
            node.attribute.extend([helper.make_attribute("axis", 2), _named(op, "layer")])
            node.input.extend([f"key_{position}", f"key_{position}", f"value_{position}", "slots", "padding"])
            node.output.append(f"output_{position}")
            nodes.append(node)
            inputs += [_tensor(f"{side}_{position}", TensorProto.FLOAT, 4) for side in ("key", "value")]
            outputs.append(_tensor(f"output_{position}", TensorProto.FLOAT, 4))
        inputs += [_tensor("padding", TensorProto.INT64, 2), _tensor("kv_sequence", TensorProto.INT64, 1)]
        start_again = helper.make_tensor("kv_past_length", TensorProto.INT64, [1], [0])
        graph = helper.make_graph(nodes, "append", inputs, outputs, [start_again])
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    register(options)
    return options


def _load(model: str | bytes | Path) -> onnx.ModelProto:
    if isinstance(model, bytes):
        return onnx.load_from_string(model)
    return onnx.load(str(model), load_external_data=False)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g)


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    """A node on its own: one that stays in its graph would keep all of the model in memory."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def _named(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    found: onnx.AttributeProto = next(a for a in node.attribute if a.name == name)
    return found


def _attribute(node: onnx.NodeProto, name: str) -> Any:
    return helper.get_attribute_value(_named(node, name))


def _tensor(name: str, kind: int, rank: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [f"{name}_{axis}" for axis in range(rank)])


def _caches(entry: Mapping[str, Any]) -> Iterator[Cache]:
    stacked = entry["past_key"] == entry["past_value"]
    for is_key, side, dim in ((True, "key", "head_dim"), (False, "value", "value_head_dim")):
        yield Cache(
            layer=entry["layer"],
            name=entry[f"past_{side}"],
            layout=entry[f"{side}_layout"],
            dtype=np.dtype(_DTYPES[entry["dtype"]]),
            kv_num_heads=entry["kv_num_heads"],
            head_dim=entry[dim],
            is_key=is_key,
            stacked_index=(0 if is_key else 1) if stacked else None,
        )
