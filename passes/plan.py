"""Cuts a part out of a graph and writes it as a small model of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx
import onnx_ir as ir

from .site import Mismatch, label
from .values import dtype_of, tensor_bytes

Array = npt.NDArray[Any]
# A part that needs more constants than this is not a mask, a scale or a layout: it is the model.
MAX_CONSTANT_BYTES = 64 << 20
# A part needs nothing of later formats, and every supported onnxruntime reads this one.
_IR_VERSION = 10


@dataclasses.dataclass(frozen=True)
class Plan:
    """A part of the graph as a small model of its own, with canonical names so that equal layers share it.

    Attributes:
        key: Digest of the model; equal parts of different layers have equal keys.
        feeds: The bound values, in the order of the inputs `f0`, `f1`, …
        shapes: Shape nodes whose result is fed, in the order of the inputs `s0`, `s1`, …
    """

    key: bytes
    feeds: tuple[ir.Value, ...]
    shapes: tuple[ir.Node, ...]


class PlanBuilder:
    """Collects the backward slice of a graph and writes it as a model.

    Args:
        functions: The model's local functions; those that the slice calls go with it.
        bindings: The values at which the slice ends.
    """

    def __init__(
        self, functions: Mapping[ir.OperatorIdentifier, ir.Function], bindings: Mapping[ir.Value, Array]
    ) -> None:
        self._functions = functions
        self._called: dict[ir.OperatorIdentifier, ir.Function] = {}
        self._bindings = bindings
        self._names: dict[ir.Value, str] = {}
        self._feeds: list[ir.Value] = []
        self._shapes: list[ir.Node] = []
        self._graph = onnx.GraphProto(name="part")
        self._constant_bytes = 0

    @property
    def feeds(self) -> tuple[ir.Value, ...]:
        """The bound values that the slice reads."""
        return tuple(self._feeds)

    @property
    def shapes(self) -> tuple[ir.Node, ...]:
        """The Shape nodes whose results the slice reads."""
        return tuple(self._shapes)

    def build(self, outputs: Sequence[ir.Value], opsets: Mapping[str, int], ir_version: int) -> bytes:
        """The serialized model that computes `outputs`; raises Mismatch when it cannot be cut out."""
        for output in outputs:
            self._visit(output)
        for position, output in enumerate(outputs):
            # A bound or constant output still needs a node of its own in a valid model.
            self._graph.node.add(op_type="Identity", input=[self._names[output]], output=[f"o{position}"])
            self._graph.output.add(name=f"o{position}")
        for position, value in enumerate(self._feeds):
            element = onnx.helper.np_dtype_to_tensor_dtype(self._bindings[value].dtype)
            self._graph.input.append(onnx.helper.make_tensor_value_info(f"f{position}", element, None))
        for position in range(len(self._shapes)):
            self._graph.input.append(
                onnx.helper.make_tensor_value_info(f"s{position}", onnx.TensorProto.INT64, [None])
            )
        model = onnx.ModelProto(ir_version=min(ir_version, _IR_VERSION), graph=self._graph)
        model.functions.extend(ir.serde.serialize_function(function) for function in self._called.values())
        used = {"", *(node.domain for node in self._graph.node), *(domain for domain, _, _ in self._called)}
        for domain in sorted(used & opsets.keys()):
            model.opset_import.add(domain=domain, version=opsets[domain])
        return bytes(model.SerializeToString(deterministic=True))

    def _visit(self, output: ir.Value) -> None:
        """Depth first without recursion: a slice may be thousands of nodes deep."""
        stack: list[tuple[ir.Value, bool]] = [(output, False)]
        while stack:
            value, done = stack.pop()
            if value in self._names:
                continue
            node = value.producer()
            if done and node is not None:
                self._emit(node)
            elif not self._leaf(value) and node is not None:
                self._check(node)
                stack.append((value, True))
                operands = node.inputs[:1] if node.op_type == "CastLike" else node.inputs
                stack.extend((operand, False) for operand in reversed(operands) if operand is not None)

    def _leaf(self, value: ir.Value) -> bool:
        node = value.producer()
        if value in self._bindings:
            self._names[value] = f"f{len(self._feeds)}"
            self._feeds.append(value)
        elif value.const_value is not None:
            self._emit_constant(value)
        elif node is None:
            raise Mismatch(f"evaluating it needs {label(value)}, whose shape or meaning is unknown", value)
        elif node.op_type == "Shape" and node.domain == "":
            self._names[value] = f"s{len(self._shapes)}"
            self._shapes.append(node)
        else:
            return False
        return True

    def _check(self, node: ir.Node) -> None:
        self._call(node)
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            raise Mismatch(f"{label(node)} holds a subgraph", node)
        if node.domain == "kvfuse":
            raise Mismatch(f"{label(node)} is already a kvfuse op", node)

    def _call(self, node: ir.Node) -> None:
        """Notes the local function that a node calls, and those that it calls in turn."""
        function = self._functions.get(node.op_identifier())
        if function is None or function.identifier() in self._called:
            return
        self._called[function.identifier()] = function
        for inner in function.all_nodes():
            self._call(inner)

    def _emit(self, node: ir.Node) -> None:
        proto = ir.serde.serialize_node(node)
        for position, value in enumerate(node.outputs):
            if value not in self._names:
                self._names[value] = f"v{len(self._names)}"
            if position < len(proto.output) and proto.output[position]:
                proto.output[position] = self._names[value]
        if node.op_type == "CastLike" and node.inputs[1] is not None:
            # Only the type of its second input counts, and that is known without computing it.
            del proto.input[1]
            proto.op_type = "Cast"
            proto.attribute.append(onnx.helper.make_attribute("to", int(dtype_of(node.inputs[1]))))
        for position in range(len(proto.input)):
            operand = node.inputs[position]
            if operand is not None:
                proto.input[position] = self._names[operand]
        proto.ClearField("name")
        proto.ClearField("doc_string")
        proto.ClearField("metadata_props")
        self._graph.node.append(proto)

    def _emit_constant(self, value: ir.Value) -> None:
        tensor = value.const_value
        if tensor is None or tensor.dtype == ir.DataType.STRING:
            raise Mismatch(f"{label(value)} is not a numeric constant", value)
        self._constant_bytes += tensor.nbytes
        if self._constant_bytes > MAX_CONSTANT_BYTES:
            raise Mismatch(
                f"evaluating it needs more than {MAX_CONSTANT_BYTES >> 20} MiB of constants, "
                f"{label(value)} among them",
                value,
            )
        self._names[value] = f"v{len(self._names)}"
        self._graph.initializer.add(
            name=self._names[value],
            data_type=int(tensor.dtype),
            dims=[int(size) for size in tensor.shape.numpy()],
            raw_data=tensor_bytes(tensor),
        )
