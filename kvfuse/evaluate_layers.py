"""What each layer's format does to its attention's output, on the very queries, keys and values of a text.

The rewritten model runs once with every layer exact, and what each op read and gave is kept. Each op then
runs alone on the same operands with its stored format, with only its keys low-bit, and with only its values
low-bit (the other side is kept in f16). Layers do not see each other's errors: a figure is the layer's own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import helper

from kvfuse.decoder import METADATA_KEY, Decoder
from kvfuse.errors import ModelError
from kvfuse.formats import PRESETS, KvFormat
from kvfuse.session import PAST_LENGTH_INPUT, InferenceSession

OP, BEGIN, DOMAIN = "QuantizedKvSdpa", "KvCacheBegin", "kvfuse"
_SLOTS = 3  # the op's input that names the sequences
_FORMAT_FIELDS = tuple(field.name for field in dataclasses.fields(KvFormat))


@dataclasses.dataclass(frozen=True)
class FusedLayer:
    """One op of a rewritten model: its key, stored format, sizes, the original cache's bits, and its node."""

    layer: str
    format: KvFormat
    num_heads: int | None
    kv_num_heads: int
    head_dim: int
    value_head_dim: int
    original_bits: int
    node: onnx.NodeProto = dataclasses.field(repr=False, compare=False)

    @property
    def window_left(self) -> int:
        """The sliding window as the op has it, -1 for none."""
        return int(_attributes(self.node).get("window_left", -1))

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one low-bit token."""
        return self.format.bytes_per_token(self.kv_num_heads, self.head_dim, self.value_head_dim)

    @property
    def elements_per_token(self) -> int:
        """Key and value elements of one token."""
        return self.kv_num_heads * (self.head_dim + self.value_head_dim)


@dataclasses.dataclass(frozen=True)
class CapturedLayer:
    """What one op read and gave in an exact run, chunk by chunk.

    Attributes:
        layer: The op.
        chunks: For each run its operands by position in the node's inputs (the slots left out).
        outputs: For each run the exact output, the sequence on `axis`.
        axis: The axis of the sequence.
    """

    layer: FusedLayer
    chunks: tuple[Mapping[int, NDArray[Any]], ...]
    outputs: tuple[NDArray[Any], ...]
    axis: int

    def output_error(self, chosen: KvFormat) -> float:
        """Runs the op alone with another format: ||output - exact|| / ||exact||.

        Over the second half of the tokens; in the first, exact tokens are much of what a query sees.
        """
        session = _one_op(self, chosen)
        gaps, sizes, past = [], [], 0
        for operands, exact in zip(self.chunks, self.outputs, strict=True):
            feeds = {_name(position): array for position, array in operands.items()}
            (found,) = session.run(None, feeds | {PAST_LENGTH_INPUT: np.array([past])})
            gap = np.asarray(found, np.float64) - exact
            other_axes = tuple(axis for axis in range(exact.ndim) if axis != self.axis)
            gaps.append(np.square(gap).sum(axis=other_axes))
            sizes.append(np.square(exact.astype(np.float64)).sum(axis=other_axes))
            past += exact.shape[self.axis]
        half = past // 2
        size = float(np.concatenate(sizes)[half:].sum())
        return float(np.sqrt(np.concatenate(gaps)[half:].sum() / size)) if size else 0.0


@dataclasses.dataclass(frozen=True)
class LayerErrors:
    """The relative error of one layer's attention output, by what is low-bit."""

    layer: str
    window_left: int
    bits_per_element: float
    keys: float
    values: float
    both: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures."""
        return dataclasses.asdict(self)


def measure_layers(path: str | Path, token_ids: Sequence[int], chunk: int = 256) -> Iterator[LayerErrors]:
    """Measures every fused layer of a rewritten model, in the order of the graph.

    Args:
        path: the rewritten model.
        token_ids: the text; its second half is measured.
        chunk: tokens of one run.

    Raises:
        ModelError: the file is no rewritten model that can be run.
    """
    for captured in capture(path, token_ids, chunk):
        layer, chosen = captured.layer, captured.layer.format
        keys_only = dataclasses.replace(chosen, value_bits=16)
        values_only = dataclasses.replace(chosen, key_bits=16, key_center="none")
        yield LayerErrors(
            layer.layer,
            layer.window_left,
            8 * layer.bytes_per_token / layer.elements_per_token,
            captured.output_error(keys_only),
            captured.output_error(values_only),
            captured.output_error(chosen),
        )


def capture(path: str | Path, token_ids: Sequence[int], chunk: int = 256) -> list[CapturedLayer]:
    """Runs a rewritten model with every layer exact and keeps what its ops read and gave.

    The operands and outputs of all layers and tokens are in memory at once, as floats.

    Raises:
        ModelError: the file is no rewritten model that can be run.
    """
    model = _load(path)
    layers = fused_layers(model, path)
    known = {output.name for output in model.graph.output}
    wanted: dict[str, None] = {}
    for layer in layers:
        _set_format(layer.node, PRESETS["exact"])
        for name in (*_operands(layer.node).values(), layer.node.output[0]):
            wanted[name] = None
    inputs = {value.name for value in model.graph.input}
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer
                 if tensor.name in wanted}  # fmt: skip
    observed = [name for name in wanted if name not in inputs and name not in constants]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in observed if name not in known)
    decoder = Decoder(_session(model.SerializeToString(), Path(path).parent))
    runs: list[Mapping[str, NDArray[Any]]] = []
    for start in range(0, len(token_ids), chunk):
        ids = np.asarray(token_ids[start : start + chunk], np.int64)
        fed = {name: decoder.plain_input(name, ids) for name in wanted if name in inputs}
        _, values = decoder.observe(ids, observed)
        runs.append({**constants, **fed, **dict(zip(observed, values, strict=True))})
    return [_captured(layer, runs) for layer in layers]


def read_layers(path: str | Path) -> list[FusedLayer]:
    """The fused layers of a rewritten model, in the order of the graph; reads no weights.

    Raises:
        ModelError: the file is no rewritten model.
    """
    return fused_layers(_load(path), path)


def fused_layers(model: onnx.ModelProto, path: str | Path) -> list[FusedLayer]:
    """The fused layers of a loaded rewritten model, whose nodes they hold."""
    noted = {entry.key: entry.value for entry in model.metadata_props}.get(METADATA_KEY)
    caches = {str(cache["layer"]): cache for cache in json.loads(noted)["caches"]} if noted else {}
    layers = []
    for node in model.graph.node:
        if node.op_type != OP or node.domain != DOMAIN:
            continue
        attributes = _attributes(node)
        cache = caches.get(str(attributes.get("layer", "")))
        if cache is None:
            continue
        chosen = KvFormat(**{name: attributes[name] for name in _FORMAT_FIELDS if name in attributes})
        sizes = (cache.get("num_heads"), cache["kv_num_heads"], cache["head_dim"], cache["value_head_dim"])
        bits = ir.DataType[str(cache["dtype"]).upper()].bitwidth
        layers.append(FusedLayer(str(cache["layer"]), chosen, *sizes, int(bits), node))
    if not layers:
        raise ModelError(f"[{path}] expected a model that kvfuse rewrote; found none of its ops")
    return layers


def _load(path: str | Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ModelError(f"[{path}] expected an ONNX model; found: {error}") from error


def _session(model: bytes, folder: Path) -> InferenceSession:
    """A session of a model in memory whose weights lie in `folder`."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return InferenceSession(model, options)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def _set_format(node: onnx.NodeProto, chosen: KvFormat) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name not in _FORMAT_FIELDS]
    fresh = [helper.make_attribute(name, value) for name, value in chosen.attributes().items()]
    del node.attribute[:]
    node.attribute.extend([*kept, *fresh])


def _operands(node: onnx.NodeProto) -> dict[int, str]:
    """Position -> name of what the op reads, the slots left out."""
    return {position: name for position, name in enumerate(node.input) if name and position != _SLOTS}


def _captured(layer: FusedLayer, runs: Sequence[Mapping[str, NDArray[Any]]]) -> CapturedLayer:
    operands = _operands(layer.node)
    chunks = tuple({position: run[name] for position, name in operands.items()} for run in runs)
    outputs = tuple(run[layer.node.output[0]] for run in runs)
    return CapturedLayer(layer, chunks, outputs, int(_attributes(layer.node).get("axis", 2)))


def _name(position: int) -> str:
    return f"operand_{position}"


def _one_op(captured: CapturedLayer, chosen: KvFormat) -> InferenceSession:
    """A session of nothing but the captured op, with another format."""
    operands = captured.chunks[0]
    node = onnx.NodeProto()
    node.CopyFrom(captured.layer.node)
    _set_format(node, chosen)
    del node.input[:], node.output[:]
    last = max(operands, default=0)
    names = [_name(position) if position in operands else "" for position in range(last + 1)]
    names[_SLOTS:] = ["slots", *names[_SLOTS + 1 :]]
    node.input.extend(names)
    node.output.append("output")
    begin = helper.make_node(
        BEGIN,
        ["kv_sequence", PAST_LENGTH_INPUT, _name(0)],
        ["slots", "", ""],
        domain=DOMAIN,
        layers=captured.layer.layer,
    )
    inputs = [
        helper.make_tensor_value_info(
            _name(position), helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim
        )
        for position, array in operands.items()
    ]
    output = helper.make_tensor_value_info("output", inputs[0].type.tensor_type.elem_type, None)
    states = [
        helper.make_tensor("kv_sequence", 7, [1], [0]),
        helper.make_tensor(PAST_LENGTH_INPUT, 7, [1], [-1]),
    ]
    declared = [helper.make_tensor_value_info(state.name, 7, [1]) for state in states]
    graph = helper.make_graph([begin, node], "one_op", [*inputs, *declared], [output], states)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return InferenceSession(model.SerializeToString())
