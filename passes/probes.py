"""Probe shapes and values for a graph's inputs, by the meaning of their dims and never by their names.

The roles of dims: B batch_size, S sequence_length (new tokens), P past_sequence_length, T = P + S. Cache
inputs fix B and P; what remains open is tried, and a trial is kept only when the site proves itself with it.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from .plan import Array
from .site import Mismatch, Operand, label

PADDINGS = ("none", "left", "right", "holes")
# Right padding as ops read it that are told the length of each row: later rows are shorter.
RAGGED = "ragged"
_ROW_DEFICIT = 2
# A length that fits nothing else, for axes such as an encoder's.
_OTHER_LENGTH = 9


@dataclasses.dataclass(frozen=True)
class Probe:
    """Sizes of one trial run, and how its batch is padded (one of PADDINGS, or RAGGED)."""

    batch: int
    sequence: int
    past: int
    padding: str = "none"

    @property
    def total(self) -> int:
        """Cached and new tokens."""
        return self.past + self.sequence

    def describe(self) -> dict[str, int | str]:
        """The probe as plain data for the report."""
        return dataclasses.asdict(self)

    def attend(self) -> Array:
        """Bool [B, T]: the tokens that are not padding; every row keeps at least one."""
        attend = np.ones((self.batch, self.total), bool)
        if self.padding == RAGGED:
            return np.asarray(np.arange(self.total)[None] < self.lengths()[:, None])
        for row in range(self.batch if self.padding != "none" else 0):
            hidden = min(self.total - 1, 1 + (row + 1) % 3)
            if self.padding == "left":
                attend[row, :hidden] = False
            elif self.padding == "right":
                attend[row, self.total - hidden :] = False
            else:
                attend[row, (row + 1) % 2 :: 3] = False
        return attend

    def lengths(self) -> Array:
        """int64 [B]: the tokens of each row, cached and new."""
        rows = np.arange(self.batch) * (_ROW_DEFICIT if self.padding == RAGGED else 0)
        return np.asarray(np.maximum(self.total - rows, 1))

    def pasts(self) -> Array:
        """int64 [B]: the cached tokens of each row; its new tokens follow them."""
        return np.asarray(np.maximum(self.lengths() - self.sequence, 0))


Roles = Mapping[str, str]


class InputSpace:
    """Builds arrays for the inputs of a graph.

    Args:
        graph: The main graph.
        caches: The cache inputs and the order of their axes.
        prefill_only: The caches are empty in every run of this graph.
    """

    def __init__(
        self, graph: ir.Graph, caches: Mapping[ir.Value, Operand], *, prefill_only: bool = False
    ) -> None:
        self.prefill_only = prefill_only
        self._caches = dict(caches)
        self._inputs = [value for value in graph.inputs if value.name not in graph.initializers]
        self._fixed: dict[str, str] = {}
        self._arrays: dict[tuple[Probe, frozenset[tuple[str, str]], bool], dict[ir.Value, Array]] = {}
        for value, operand in caches.items():
            self._fix(value, operand.batch_axis, "B")
            self._fix(value, operand.sequence_axis, "P")
        for value in self._inputs:
            if value not in caches and value.shape is not None and len(value.shape) >= 2:
                self._fix(value, 0, "B")

    def _fix(self, value: ir.Value, axis: int, role: str) -> None:
        symbol = dim_symbol(value, axis)
        if isinstance(symbol, str) and symbol not in self._fixed:
            self._fixed[symbol] = role

    def batch_size(self) -> int | None:
        """The batch size when a cache input fixes it to a number, else None."""
        sizes = {dim_symbol(value, operand.batch_axis) for value, operand in self._caches.items()}
        numbers = [size for size in sizes if isinstance(size, int)]
        return numbers[0] if numbers else None

    def trials(self, used: set[ir.Value]) -> Iterator[Roles]:
        """Assignments of roles to the open symbols of the inputs in `used`, the likeliest first."""
        symbols: list[str] = []
        tried = 0
        for value in sorted(self._inputs, key=lambda value: value not in used):
            if value in self._caches or value.shape is None:
                continue
            for axis in range(len(value.shape)):
                symbol = dim_symbol(value, axis)
                for name in [] if isinstance(symbol, int) else _names(symbol):
                    if name not in self._fixed and name not in symbols:
                        symbols.append(name)
            if value in used:
                tried = len(symbols)
        likeliest = {name: _candidates(name)[0] for name in symbols}
        open_symbols = symbols[: min(tried, 3)]
        choices = itertools.product(*(_candidates(name) for name in open_symbols))
        # Distinct roles first: two different symbols rarely mean the same length.
        for chosen in sorted(choices, key=lambda chosen: len(chosen) - len(set(chosen))):
            yield {**self._fixed, **likeliest, **dict(zip(open_symbols, chosen, strict=True))}

    def role(self, value: ir.Value, axis: int, roles: Roles) -> str | int:
        """What a dim of an input means: a number, or one of "B", "S", "P", "T", "other"."""
        symbol = dim_symbol(value, axis)
        if isinstance(symbol, int):
            return symbol
        if symbol in roles:
            return roles[symbol]
        sizes = {"B": 1009, "S": 101, "P": 10007, "T": 10108, "other": 17}
        number = _evaluate(symbol, {name: sizes[role] for name, role in roles.items()})
        meaning = {size: role for role, size in sizes.items()}
        return "other" if number is None else meaning.get(number, "other")

    def shape(self, value: ir.Value, probe: Probe, roles: Roles) -> tuple[int, ...]:
        """The shape of an input under a probe."""
        if value.shape is None:
            raise Mismatch(f"the graph input {label(value)} has no declared rank", value)
        sizes = {"B": probe.batch, "S": probe.sequence, "P": probe.past, "T": probe.total}
        dims = [self.role(value, axis, roles) for axis in range(len(value.shape))]
        return tuple(dim if isinstance(dim, int) else sizes.get(dim, _OTHER_LENGTH) for dim in dims)

    def arrays(self, probe: Probe, roles: Roles, *, data: bool) -> dict[ir.Value, Array]:
        """Arrays for all inputs whose type numpy knows; without `data`, floats are shapes only."""
        key = (probe, frozenset(roles.items()), data)
        if key not in self._arrays:
            self._arrays[key] = self._build(probe, roles, data)
        return dict(self._arrays[key])

    def _build(self, probe: Probe, roles: Roles, data: bool) -> dict[ir.Value, Array]:
        result = {}
        for value in self._inputs:
            dtype = _numpy_dtype(value)
            if dtype is None or value.shape is None:
                continue
            shape = self.shape(value, probe, roles)
            if dtype.kind == "f" and not self.is_padding_like(value, roles):
                result[value] = _random(str(value.name), shape, dtype) if data else hollow(shape, dtype)
            else:
                result[value] = self._integers(value, shape, probe, roles).astype(dtype)
        return result

    def is_padding_like(self, value: ir.Value, roles: Roles) -> bool:
        """True for a bool, integer or float input of shape [B, T]."""
        if value.shape is None or len(value.shape) != 2 or value in self._caches:
            return False
        return self.role(value, 0, roles) in ("B", 1) and self.role(value, 1, roles) == "T"

    def batch_carrier(self) -> ir.Value | None:
        """The first non-cache input whose dim 0 is the batch."""
        ranked = [
            v for v in self._inputs if v not in self._caches and v.shape is not None and len(v.shape) >= 2
        ]
        by_symbol = [v for v in ranked if self._fixed.get(str(dim_symbol(v, 0))) == "B"]
        cache_symbols = {str(dim_symbol(v, operand.batch_axis)) for v, operand in self._caches.items()}
        exact = [v for v in by_symbol if str(dim_symbol(v, 0)) in cache_symbols]
        numbered = [v for v in ranked if str(dim_symbol(v, 0)) in cache_symbols]
        return next(iter([*exact, *numbered, *by_symbol]), None)

    def _integers(self, value: ir.Value, shape: tuple[int, ...], probe: Probe, roles: Roles) -> Array:
        if self.is_padding_like(value, roles):
            return np.broadcast_to(probe.attend(), shape)
        last = self.role(value, len(shape) - 1, roles) if shape else None
        if last == "S":
            return np.broadcast_to(np.arange(probe.past, probe.total), shape)
        if last == "T":
            return np.ones(shape, np.int64)
        return np.full(shape, probe.past, np.int64)


def hollow(shape: tuple[int, ...], dtype: np.dtype | type) -> Array:
    """Zeros of any shape that take no memory (for values whose shape alone is read)."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def dim_symbol(value: ir.Value, axis: int) -> int | str:
    """A dim of a value's declared shape: a number (also one written as a string) or a symbol."""
    dim = value.shape[axis] if value.shape is not None else None
    if isinstance(dim, int):
        return dim
    name = None if dim is None else dim.value
    if name is None:
        return f"{value.name}:{axis}"
    return int(name) if name.isdigit() else name


def _candidates(name: str) -> tuple[str, ...]:
    """Roles to try for an open symbol; its name only decides which is tried first."""
    if "past" in name:
        return "P", "S", "T"
    if "total" in name or "mask" in name:
        return "T", "S", "P"
    if "encoder" in name and "decoder" not in name:
        return ("other",)
    return "S", "T", "P", "other"


def _names(symbol: str) -> list[str]:
    """The names in a symbolic expression; the whole text when it is not one."""
    try:
        tree = ast.parse(symbol, mode="eval")
    except SyntaxError:
        return [symbol]
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    # An expression that is understood gives a number for any sizes.
    understood = _evaluate(symbol, {name: 1000 + i for i, name in enumerate(names)}) is not None
    return names if understood else [symbol]


def _evaluate(symbol: str, sizes: Mapping[str, int]) -> int | None:
    """The number that an expression of names, integers, +, -, * and // gives; None for anything else."""

    def visit(node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp):
            left, right = visit(node.left), visit(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.FloorDiv) and right:
                return left // right
        raise KeyError(symbol)

    try:
        return visit(ast.parse(symbol, mode="eval").body)
    except (KeyError, SyntaxError):
        return None


def _numpy_dtype(value: ir.Value) -> np.dtype | None:
    if value.dtype is None or value.dtype in (ir.DataType.STRING, ir.DataType.BFLOAT16):
        return None
    dtype = np.dtype(value.dtype.numpy())
    return dtype if dtype.kind in "fiub" else None


def _random(name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.standard_normal(shape).astype(dtype)
