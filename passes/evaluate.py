"""Evaluates parts of a graph on probe inputs, so that passes can judge by meaning and not by spelling.

What the original model computes is by definition what onnxruntime computes; only this file uses it.
Shapes are read without computing the tensors behind them (see shape_rules), so no weight is loaded for them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from .plan import MAX_CONSTANT_BYTES, Array, Plan, PlanBuilder
from .shape_rules import Shape, rule_for
from .site import Mismatch, TooLarge, label

_MAX_CACHED_BYTES = 16 << 20
# All tensors of one evaluation together; a mask that makes [T, T] tables meets it at some T.
_MAX_ARENA_BYTES = 256 << 20


class Evaluator:
    """Evaluates values of one model; sessions and results are shared between layers that compute the same."""

    def __init__(self, model: ir.Model) -> None:
        self._opsets = dict(model.graph.opset_imports)
        self._ir_version = model.ir_version
        self._functions = model.functions
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._sessions: dict[bytes, Any] = {}
        self._results: dict[bytes, list[Array]] = {}
        self._shapes: dict[Hashable, Evaluation] = {}

    @property
    def opset(self) -> int:
        """The version of the default operator set."""
        return self._opsets.get("", 1)

    @property
    def session_count(self) -> int:
        """How many different parts of the model were built so far."""
        return len(self._sessions)

    def on(self, bindings: Mapping[ir.Value, Array]) -> Evaluation:
        """An evaluation with the given values of graph inputs or inner values."""
        return Evaluation(self, bindings)

    def shapes(self, key: Hashable, bindings: Mapping[ir.Value, Array]) -> Evaluation:
        """An evaluation of shapes by rules alone; the same one for an equal key, so that layers share it."""
        if key not in self._shapes:
            self._shapes[key] = Evaluation(self, bindings, by_rules=True)
        return self._shapes[key]

    def plan(self, outputs: Sequence[ir.Value], bindings: Mapping[ir.Value, Array]) -> Plan:
        """The part of the graph between the bound values and `outputs`, ready to run.

        Raises:
            Mismatch: It needs an unbound input, too many constants, or operators that cannot be cut out.
        """
        key = (tuple(outputs), frozenset(bindings))
        if key not in self._plans:
            builder = PlanBuilder(self._functions, bindings)
            model = builder.build(outputs, self._opsets, self._ir_version)
            digest = hashlib.sha256(model).digest()
            if digest not in self._sessions:
                try:
                    self._sessions[digest] = _session(model)
                except Exception as error:  # onnxruntime's exceptions share no base class of their own
                    raise _refusal(error) from error
            self._plans[key] = Plan(digest, builder.feeds, builder.shapes)
        return self._plans[key]

    def run(self, plan: Plan, feeds: Mapping[str, Array]) -> list[Array]:
        """Runs a plan.

        Raises:
            Mismatch: onnxruntime reports an error (for example two shapes that do not broadcast).
            TooLarge: It takes more memory than an analysis may.
        """
        digest = hashlib.sha256(plan.key)
        for name, array in feeds.items():
            digest.update(f"{name}{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
        key = digest.digest()
        if key in self._results:
            return self._results[key]
        try:
            result = list(self._sessions[plan.key].run(None, dict(feeds)))
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise _refusal(error) from error
        if sum(array.nbytes for array in result) <= _MAX_CACHED_BYTES:
            self._results[key] = result
        return result


@functools.cache
def _register_arena() -> None:
    """Makes one bounded arena for all evaluations, so that no graph can eat the machine's memory.

    It belongs to onnxruntime's environment; only sessions that ask for environment allocators use it.
    """
    import onnxruntime  # late: importing kvfuse loads no runtime

    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    # Strategy 1 extends it by what is asked for and no more.
    limit = onnxruntime.OrtArenaCfg({"max_mem": _MAX_ARENA_BYTES, "arena_extend_strategy": 1})
    onnxruntime.create_and_register_allocator(place, limit)


def _session(model: bytes) -> Any:
    import onnxruntime

    _register_arena()
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _refusal(error: Exception) -> Mismatch:
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else type(error).__name__
    memory = any(words in message for words in ("Available memory", "bad_alloc", "bad allocation"))
    kind = TooLarge if memory else Mismatch
    return kind(f"a part of the graph could not be evaluated on a probe: {message[:200]}")


class Evaluation:
    """Values and shapes of the graph under one set of bindings.

    Args:
        evaluator: The evaluator of the model.
        bindings: Arrays for graph inputs and for inner values where the graph is cut. Zero-strided arrays
            are fine where only the shape is read.
        by_rules: Shapes come from rules alone; nothing but their small operands is evaluated.
    """

    def __init__(
        self, evaluator: Evaluator, bindings: Mapping[ir.Value, Array], *, by_rules: bool = False
    ) -> None:
        self._by_rules = by_rules
        self._evaluator = evaluator
        self.bindings = dict(bindings)
        self._shapes: dict[ir.Value, Shape] = {value: array.shape for value, array in bindings.items()}
        self._open: set[ir.Value] = set()

    @property
    def opset(self) -> int:
        """The version of the default operator set."""
        return self._evaluator.opset

    def beside(self, values: Sequence[ir.Value], bindings: Mapping[ir.Value, Array]) -> list[Array]:
        """The arrays of values that nodes outside of the graph compute from other bindings."""
        return Evaluation(self._evaluator, bindings).arrays(values)

    def arrays(self, values: Sequence[ir.Value]) -> list[Array]:
        """The arrays of `values`.

        Raises:
            Mismatch: They cannot be evaluated from the bindings.
        """
        plan = self._evaluator.plan(values, self.bindings)
        feeds = {}
        for position, value in enumerate(plan.feeds):
            array = self.bindings[value]
            if array.nbytes > MAX_CONSTANT_BYTES:
                raise TooLarge(
                    f"evaluating needs the data of {label(value)} on a probe too large to build", value
                )
            feeds[f"f{position}"] = np.ascontiguousarray(array).reshape(array.shape)
        for position, node in enumerate(plan.shapes):
            feeds[f"s{position}"] = np.array(self._shape_output(node), np.int64)
        return self._evaluator.run(plan, feeds)

    def array(self, value: ir.Value) -> Array:
        """The array of one value; raises Mismatch like `arrays`."""
        return self.arrays([value])[0]

    def shape(self, value: ir.Value) -> Shape:
        """The shape of `value`, by rules where they exist, else by evaluating it.

        Raises:
            Mismatch: It cannot be evaluated from the bindings.
        """
        stack = [value]
        while stack:
            current = stack[-1]
            if current in self._shapes:
                stack.pop()
                continue
            constant = current.const_value
            found = rule_for(current) if constant is None else None
            missing = [v for v in found[1] if v not in self._shapes] if found else []
            if missing:
                stack.extend(missing)
                continue
            if constant is not None:
                self._shapes[current] = tuple(int(size) for size in constant.shape.numpy())
            elif found is not None:
                self._shapes[current] = self._apply(current, found)
            else:
                self._shapes[current] = self._evaluated_shape(current)
        return self._shapes[value]

    def _apply(self, value: ir.Value, found: Any) -> Shape:
        rule, operands = found
        node = value.producer()
        try:
            shape = rule(node, [self._shapes[operand] for operand in operands], self._ints)
        except (ValueError, IndexError):
            return self._evaluated_shape(value)
        return tuple(int(size) for size in shape)

    def _evaluated_shape(self, value: ir.Value) -> Shape:
        if self._by_rules:
            raise Mismatch(f"no rule gives the shape of {label(value)}", value)
        if value in self._open:
            raise Mismatch(f"the shape of {label(value)} depends on itself", value)
        self._open.add(value)
        try:
            return self.array(value).shape
        finally:
            self._open.discard(value)

    def _ints(self, value: ir.Value) -> list[int]:
        return [int(number) for number in np.asarray(self.array(value)).reshape(-1)]

    def _shape_output(self, node: ir.Node) -> Shape:
        operand = node.inputs[0]
        if operand is None:
            raise Mismatch("a Shape node has no input", node)
        shape = self.shape(operand)
        start, end = shape_range(node, len(shape))
        return shape[start:end]


def shape_range(node: ir.Node, rank: int) -> tuple[int, int]:
    """The half-open range of axes that a Shape node returns (its `start` and `end`, clamped as ONNX says)."""
    start = node.attributes["start"].as_int() if "start" in node.attributes else 0
    end = node.attributes["end"].as_int() if "end" in node.attributes else rank
    clamp = [min(max(edge + rank if edge < 0 else edge, 0), rank) for edge in (start, end)]
    return clamp[0], clamp[1]
