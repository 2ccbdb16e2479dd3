"""Writes an ONNX graph node by node, naming values by module path as the TorchScript exporter does."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir

INT64_MAX = np.iinfo(np.int64).max
Dims = Sequence[int | str]


class GraphWriter:
    """Collects nodes, inputs, outputs and weights of one graph.

    Constants become `Constant` nodes, one per use; weights become initializers whose data is only computed
    when the model is saved.

    Args:
        dtype: "float32" or "float16", the float type of weights and activations.

    Attributes:
        inputs: the graph inputs so far, by name.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.float_type = ir.DataType.from_numpy(self.dtype)
        self._nodes: list[ir.Node] = []
        self.inputs: dict[str, ir.Value] = {}
        self._outputs: list[ir.Value] = []
        self._weights: list[ir.Value] = []
        self._scope: tuple[str, ...] = ()
        self._names: Counter[str] = Counter()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Adds `name` to the module path of everything written inside the `with` block."""
        outer = self._scope
        self._scope = (*outer, name)
        yield
        self._scope = outer

    def op(
        self, op_type: str, *inputs: ir.Value | None, output_name: str | None = None, **attributes: Any
    ) -> ir.Value:
        """Appends one node of the default domain that has one output, and returns that."""
        (output,) = self.node(op_type, inputs, [output_name], attributes)
        return output

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        output_names: Sequence[str | None],
        attributes: dict[str, Any],
        domain: str = "",
    ) -> list[ir.Value]:
        """Appends one node and returns its outputs; an output without a name gets one of the module path."""
        path = "/".join(("", *self._scope, op_type))
        count = self._names[path]
        self._names[path] += 1
        name = f"{path}_{count}" if count else path
        outputs = [ir.Value(name=o or f"{name}_output_{i}") for i, o in enumerate(output_names)]
        self._nodes.append(ir.node(op_type, inputs, attributes, domain=domain, outputs=outputs, name=name))
        return outputs

    def constant(self, value: Any, dtype: Any = np.int64) -> ir.Value:
        """Appends a `Constant` node holding `value` (a scalar, list or array) as `dtype`."""
        return self.op("Constant", value=ir.tensor(np.asarray(value, dtype=dtype)))

    def number(self, value: Any) -> ir.Value:
        """Appends a `Constant` node in the graph's float type."""
        return self.constant(value, self.dtype)

    def weight(self, name: str, shape: Sequence[int], load: Callable[[], np.ndarray]) -> ir.Value:
        """Adds an initializer of the graph's float type; `load` returns its data when the model is saved."""

        def tensor() -> ir.TensorProtocol:
            data = np.ascontiguousarray(load(), dtype=self.dtype)
            return ir.Tensor(data, name=name)

        lazy = ir.LazyTensor(tensor, self.float_type, ir.Shape(shape), name=name)
        value = ir.Value(
            name=name, shape=ir.Shape(shape), type=ir.TensorType(self.float_type), const_value=lazy
        )
        self._weights.append(value)
        return value

    def input(self, name: str, dims: Dims, dtype: ir.DataType | None = None) -> ir.Value:
        """Adds a graph input; strings in `dims` are symbolic, `dtype` defaults to the graph's float type."""
        value = ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype or self.float_type))
        self.inputs[name] = value
        return value

    def output(self, value: ir.Value, dims: Dims) -> None:
        """Makes `value` a graph output of the graph's float type."""
        value.shape, value.type = ir.Shape(dims), ir.TensorType(self.float_type)
        self._outputs.append(value)

    def model(self, opsets: dict[str, int], ir_version: int) -> ir.Model:
        """Returns the finished model."""
        graph = ir.Graph(
            list(self.inputs.values()),
            self._outputs,
            nodes=self._nodes,
            initializers=self._weights,
            opset_imports=opsets,
            name="main_graph",
        )
        return ir.Model(graph, ir_version=ir_version, producer_name="kvfuse models")

    # Idioms that exported graphs repeat everywhere.

    def unsqueeze(self, value: ir.Value, axis: int) -> ir.Value:
        """Inserts a dimension of 1 at `axis`."""
        return self.op("Unsqueeze", value, self.constant([axis]))

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """Returns the size of one dimension as an int64 scalar: Shape, then Gather."""
        return self.op("Gather", self.op("Shape", value), self.constant(axis), axis=0)

    def shape(self, *dims: ir.Value | int) -> ir.Value:
        """Concatenates scalars (computed or known) into an int64 shape vector."""
        parts = [self.constant([d]) if isinstance(d, int) else self.unsqueeze(d, 0) for d in dims]
        return self.op("Concat", *parts, axis=0)

    def reshape(self, value: ir.Value, shape: ir.Value) -> ir.Value:
        """Reshapes; zeros in `shape` mean "keep", as in `allowzero` 0."""
        return self.op("Reshape", value, shape, allowzero=0)

    def expand(self, value: ir.Value, *dims: ir.Value | int) -> ir.Value:
        """Broadcasts to `dims`, where -1 keeps a dimension, by the exporter's Equal/Where detour."""
        wanted = self.reshape(self.shape(*dims), self.constant([-1]))
        ones = self.op("ConstantOfShape", self.op("Shape", wanted), value=ir.tensor(np.ones(1, np.int64)))
        keep = self.op("Equal", wanted, self.op("Mul", ones, self.constant(-1)))
        return self.op("Expand", value, self.op("Where", keep, ones, wanted))

    def slice(self, value: ir.Value, start: ir.Value | int, end: ir.Value | int, axis: int) -> ir.Value:
        """Takes [start, end) of one axis with step 1."""
        axes = self.constant([axis])
        bounds = [self.constant([x]) if isinstance(x, int) else self.unsqueeze(x, 0) for x in (start, end)]
        return self.op("Slice", value, *bounds, axes, self.constant([1]))

    def cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        """Casts to `to`."""
        return self.op("Cast", value, to=int(to))
