"""The model between rewriting and writing: its ops, their formats, and sessions of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime

from kvfuse.errors import ModelError
from kvfuse.formats import KvFormat
from kvfuse.modelfile import serialize
from kvfuse.passes.lower import DOMAIN, OP
from kvfuse.session import InferenceSession

METADATA_KEY = "kvfuse"
# More tokens than any run has: every key and value is used as the float that came in.
EXACT = KvFormat(n_recent=2**30)
# Where a model in memory finds its external data; onnxruntime reads it in place.
_DATA_FOLDER = "session.model_external_initializers_file_folder_path"


def op_nodes(model: ir.Model) -> dict[str, ir.Node]:
    """The attention ops of a rewritten model by layer, in the order of the graph."""
    nodes = (node for node in model.graph if node.domain == DOMAIN and node.op_type == OP)
    return {node.attributes["layer"].as_string(): node for node in nodes}


def attributes_of(node: ir.Node) -> dict[str, int | float | str]:
    """All attributes of an op as plain values."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


def set_formats(model: ir.Model, formats: Mapping[str, KvFormat]) -> None:
    """Writes formats into the ops' attributes, and what differs from the model's own into its metadata.

    Args:
        model: A rewritten model; it is edited.
        formats: One for each layer that changes.
    """
    nodes = op_nodes(model)
    for layer, chosen in formats.items():
        for name, value in chosen.attributes().items():
            nodes[layer].attributes[name] = (
                ir.AttrString(name, value) if isinstance(value, str) else ir.AttrInt64(name, int(value))
            )
    record = json.loads(model.metadata_props[METADATA_KEY])
    common = record["options"]
    record["layer_options"] = {
        layer: differing
        for layer, chosen in formats.items()
        if (differing := {name: v for name, v in chosen.attributes().items() if common.get(name) != v})
    }
    model.metadata_props[METADATA_KEY] = json.dumps(record)


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A rewritten model that is in no file yet.

    Attributes:
        model: The graph; external data is referenced, not loaded.
    """

    model: ir.Model

    def open(
        self, formats: Mapping[str, KvFormat], captures: Mapping[str, ir.Value] | None = None
    ) -> InferenceSession:
        """A session of the model with other formats; weights stay where they are.

        Args:
            formats: One for each layer.
            captures: Output name -> value of the graph. Given, they are the only outputs but the caches that
                the model still has as outputs, so that nothing behind them is computed.

        Raises:
            ModelError: onnxruntime cannot load it.
        """
        proto = serialize(self.model)
        for node in proto.graph.node:
            if node.domain == DOMAIN and node.op_type == OP:
                _replace(node, formats)
        if captures is not None:
            kept = [value for value in proto.graph.output if value.name != "logits"]
            del proto.graph.output[:]
            proto.graph.output.extend(kept if len(kept) > 1 else [])
            for name, value in captures.items():
                proto.graph.node.add(op_type="Identity", input=[str(value.name)], output=[name])
                proto.graph.output.add(name=name)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # whatever goes wrong is raised, once
        folder = self._data_folder()
        if folder is not None:
            options.add_session_config_entry(_DATA_FOLDER, str(folder))
        try:
            return InferenceSession(_bytes(proto), options)
        except Exception as error:  # onnxruntime's exceptions have no common base
            if not type(error).__module__.startswith("onnxruntime"):
                raise
            reason = str(error).strip().splitlines()[0]
            raise ModelError(
                f"[auto] expected the rewritten model to load for its probe; found: {reason}"
            ) from error

    def _data_folder(self) -> Path | None:
        """The folder of the external data; None when all weights are inside."""
        tensors = (value.const_value for value in self.model.graph.initializers.values())
        folders = {Path(t.base_dir).resolve() for t in tensors if isinstance(t, ir.ExternalTensor)}
        if len(folders) > 1:
            found = ", ".join(sorted(map(str, folders)))
            raise ModelError(f"[auto] expected external data in one folder; found {found}")
        return next(iter(folders), None)


def _bytes(proto: onnx.ModelProto) -> bytes:
    try:
        return bytes(proto.SerializeToString())
    except ValueError as error:  # protobuf cannot serialize more than 2 GiB
        raise ModelError(
            f"[auto] expected a model below 2 GiB without its external data; found: {error}"
        ) from error


def _replace(node: onnx.NodeProto, formats: Mapping[str, KvFormat]) -> None:
    """Gives an op the attributes of its layer's format, and turns its guard off."""
    named = {attribute.name: attribute for attribute in node.attribute}
    values: dict[str, Any] = {**formats[named["layer"].s.decode()].attributes(), "guard": "off"}
    for name in values.keys() & named.keys():
        node.attribute.remove(named[name])
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in values.items())


def bits_per_element(formats: Sequence[tuple[KvFormat, int, int, int]]) -> float:
    """Mean bits of one stored element of (format, kv_num_heads, head_dim, value_head_dim) layers."""
    bytes_ = sum(f.bytes_per_token(heads, key, value) for f, heads, key, value in formats)
    elements = sum(heads * (key + value) for _, heads, key, value in formats)
    return 8 * bytes_ / elements
