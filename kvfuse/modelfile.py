"""Reads and writes model files: weights stay where they are, output appears whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from .errors import ModelError
from .sparse_files import copy_sparse, same_bytes


@dataclasses.dataclass(frozen=True)
class Source:
    """A model as it was given.

    Attributes:
        model: Its graph; external data is referenced, not loaded.
        fingerprint: sha256 of the file's bytes (of the deterministic serialization for a model in memory).
        path: The file, or None.
        proto: The given ModelProto, when it was one.
    """

    model: ir.Model
    fingerprint: str
    path: Path | None = None
    proto: onnx.ModelProto | None = None


def read(source: str | os.PathLike[str] | onnx.ModelProto | ir.Model) -> Source:
    """Reads a model from a path, a ModelProto or an onnx_ir.Model (which are not modified).

    Raises:
        ModelError: The file cannot be read, is no ONNX model, or lacks its external data.
    """
    if isinstance(source, onnx.ModelProto):
        digest = hashlib.sha256(source.SerializeToString(deterministic=True)).hexdigest()
        return Source(_deserialize(source, "the given model"), digest, None, source)
    if isinstance(source, ir.Model):
        proto = serialize(source)
        digest = hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()
        return Source(source.clone(), digest)
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"[{path}] expected a readable ONNX file; found: {error.strerror}") from error
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError has several homes
        raise ModelError(
            f"[{path}] expected an ONNX model; found data that is truncated or no protobuf"
        ) from error
    fingerprint = hashlib.sha256(data).hexdigest()
    del data
    if not proto.opset_import or not (proto.graph.node or proto.graph.output):
        raise ModelError(f"[{path}] expected an ONNX model; found no graph and no opset in it")
    model = _deserialize(proto, str(path))
    ir.external_data.set_base_dir(model.graph, path.parent)
    _require_external_data(model, path)
    return Source(model, fingerprint, path)


def _deserialize(proto: onnx.ModelProto, where: str) -> ir.Model:
    try:
        return ir.from_proto(proto)
    except Exception as error:  # a malformed graph surfaces as any of a dozen types
        raise ModelError(f"[{where}] expected a valid ONNX graph; found: {_reason(error)}") from error


def serialize(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto; external data stays external.

    Raises:
        ModelError: The model holds something that has no place in a file, such as text that is no UTF-8.
    """
    try:
        return ir.to_proto(model)
    except Exception as error:  # a malformed graph surfaces as any of a dozen types
        raise ModelError(f"[model] expected a graph that can be written; found: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of the first cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR and isinstance(
                    attribute.value, ir.ExternalTensor
                ):
                    yield attribute.value


def _require_external_data(model: ir.Model, path: Path) -> None:
    sizes: dict[Path, int] = {}
    for tensor in _external_tensors(model):
        location = Path(tensor.location)
        if location.is_absolute() or ".." in location.parts:
            raise ModelError(
                f"[{path}] expected external data inside the model's folder; found location '{location}'"
            )
        file = path.parent / location
        if file not in sizes:
            try:
                sizes[file] = file.stat().st_size
            except OSError as error:
                raise ModelError(
                    f"[{path}] expected the external data file {file}; found: {error.strerror}"
                ) from error
        needed = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
        if sizes[file] < needed:
            raise ModelError(
                f"[{path}] expected at least {needed} bytes in the external data file {file} (for "
                f"{tensor.name}); found "
                f"{sizes[file]}"
            )


def write(source: Source, *, changed: bool, destination: Path) -> None:
    """Writes a model and makes its external data reachable from there.

    Args:
        source: The model, rewritten or not.
        changed: False copies the original file unchanged.
        destination: The file to write; may be the source itself.

    Raises:
        ModelError: It cannot be written; nothing is left behind then.
    """
    try:
        with _replacing(destination) as temporary:
            locations = _place_data(source.model, destination)
            if not changed and source.path is not None and all(old == new for old, new in locations.items()):
                shutil.copyfile(source.path, temporary)
                return
            proto = source.proto if source.proto is not None and not changed else serialize(source.model)
            _relocate(proto, locations)
            temporary.write_bytes(proto.SerializeToString(deterministic=True))
    except OSError as error:
        raise ModelError(
            f"[{destination}] expected a writable place; found: {error.strerror or error}"
        ) from error
    except ValueError as error:  # protobuf cannot serialize more than 2 GiB
        raise ModelError(
            f"[{destination}] expected a model below 2 GiB without its external data; found: {error}"
        ) from error


@contextlib.contextmanager
def _replacing(destination: Path) -> Iterator[Path]:
    """A temporary file beside `destination` that takes its place at the end, or vanishes on an error."""
    if destination.is_dir():
        raise OSError(21, "Is a directory", str(destination))
    handle, name = tempfile.mkstemp(prefix=f".{destination.name}.", suffix=".tmp", dir=destination.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(_mode_for(destination))
        os.replace(temporary, destination)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _mode_for(destination: Path) -> int:
    """The mode of the file that is replaced, else what the umask gives a new one."""
    if destination.exists():
        return destination.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _place_data(model: ir.Model, destination: Path) -> dict[str, str]:
    """Old location -> location relative to the destination; files that are not below it are copied once."""
    folder = destination.parent.resolve()
    files = {
        str(tensor.location): (Path(tensor.base_dir) / tensor.location).resolve()
        for tensor in _external_tensors(model)
        if str(tensor.base_dir)  # without a folder it can only be meant relative to the destination
    }
    places = {file: file.relative_to(folder) for file in files.values() if file.is_relative_to(folder)}
    if folder / destination.name in places:
        raise OSError(17, "the model's own external data", str(destination))
    for file in files.values():
        if file not in places:
            # A hard link would save the copy, but onnx refuses to load data that has one, the original's too.
            taken = {destination.name, *map(str, places.values())}
            places[file] = Path(_copy_once(file, folder, destination.name, taken))
    return {location: places[file].as_posix() for location, file in files.items()}


def _copy_once(file: Path, folder: Path, model: str, taken: set[str]) -> str:
    """Copies a data file beside the model, unless the same bytes are there already; not to a taken name."""
    names = (file.name, f"{model}.{file.name}", *(f"{model}.{n}.{file.name}" for n in range(1, 1000)))
    for name in (name for name in names if name not in taken):
        target = folder / name
        if target.exists() and same_bytes(file, target):
            return name
        if target.exists() and name == file.name:
            continue  # another model's; what is named after this one is its own and may be replaced
        with _replacing(target) as temporary:
            copy_sparse(file, temporary)
        return name
    raise OSError(17, "no free name for the external data", str(folder))


def _relocate(proto: onnx.ModelProto, locations: dict[str, str]) -> None:
    """Rewrites the location of every external tensor of a serialized model."""
    for tensor in _tensors(proto.graph):
        for entry in tensor.external_data if tensor.data_location == onnx.TensorProto.EXTERNAL else ():
            if entry.key == "location":
                entry.value = locations.get(entry.value, entry.value)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for inner in (attribute.g, *attribute.graphs):
                if inner.node or inner.initializer:
                    yield from _tensors(inner)
