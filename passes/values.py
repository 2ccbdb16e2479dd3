"""Small readers of values: constants, bytes of (external) tensors, element types."""

from __future__ import annotations

import os

import numpy as np
import onnx_ir as ir

from .site import Mismatch, label


def is_op(node: ir.Node | None, *names: str) -> bool:
    """True for a node of the default domain with one of the names."""
    return node is not None and node.domain == "" and node.op_type in names


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The array of a small constant (initializer or Constant node), else None."""
    if value is None:
        return None
    tensor = value.const_value if value.const_value is not None else _constant_node(value.producer())
    if tensor is None or tensor.size > 4096 or tensor.dtype == ir.DataType.STRING:
        return None
    if isinstance(tensor, ir.ExternalTensor):
        data = np.frombuffer(tensor_bytes(tensor), tensor.dtype.numpy())
        return data.reshape(tensor.shape.numpy())
    return tensor.numpy()


_PLAIN_CONSTANTS = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def _constant_node(node: ir.Node | None) -> ir.TensorProtocol | None:
    """The tensor of a Constant node (onnx_ir's own reader renames it, in the caller's model too)."""
    if not is_op(node, "Constant") or node is None or len(node.attributes) != 1:
        return None
    (attribute,) = node.attributes.values()
    if attribute.is_ref():
        return None
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.as_tensor()
    plain = _PLAIN_CONSTANTS.get(attribute.name)
    return None if plain is None else ir.tensor(np.array(attribute.value, plain))


def tensor_bytes(tensor: ir.TensorProtocol) -> bytes:
    """The little-endian bytes of a tensor; external data is read in place, this tensor's range only.

    Raises:
        Mismatch: The data file is missing or shorter than the tensor says.
    """
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor.tobytes()
    path = os.path.join(tensor.base_dir, tensor.location)
    length = tensor.length or tensor.nbytes
    try:
        with open(path, "rb") as file:
            file.seek(tensor.offset or 0)
            data = file.read(length)
    except OSError as error:
        raise Mismatch(f"the external data of {tensor.name} cannot be read: {error.strerror}") from error
    if len(data) != length:
        raise Mismatch(f"the external data of {tensor.name} is shorter than {length} bytes")
    return data


_COUNTS = ("Shape", "Size", "NonZero", "ArgMax", "ArgMin")
_COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN")
_LOGIC = ("And", "Or", "Xor", "Not")
_FIXED_DTYPES = {
    **dict.fromkeys(_COUNTS, ir.DataType.INT64),
    **dict.fromkeys(_COMPARISONS + _LOGIC, ir.DataType.BOOL),
}
# Ops whose result has the type of another input than the first.
_DTYPE_INPUT = {"Where": 1, "DequantizeLinear": 1, "CastLike": 1, "OneHot": 2}


def dtype_of(value: ir.Value) -> ir.DataType:
    """The element type of a value, declared or followed back to where it is known.

    Raises:
        Mismatch: It cannot be known.
    """
    current: ir.Value | None = value
    while current is not None:
        if current.const_value is not None:
            return ir.DataType(current.const_value.dtype)
        if current.dtype is not None:
            return current.dtype
        node = current.producer()
        if node is None:
            break
        if node.op_type in _FIXED_DTYPES:
            return _FIXED_DTYPES[node.op_type]
        known = constant(current)
        if known is not None:
            return ir.DataType.from_numpy(known.dtype)
        if node.op_type == "Cast":
            return ir.DataType(node.attributes["to"].as_int())
        if node.op_type == "ConstantOfShape":
            fill = node.attributes.get("value")
            return ir.DataType.FLOAT if fill is None else ir.DataType(fill.as_tensor().dtype)
        position = _DTYPE_INPUT.get(node.op_type, 0)
        current = node.inputs[position] if position < len(node.inputs) else None
    raise Mismatch(f"the element type of {label(value)} is not known", value)
