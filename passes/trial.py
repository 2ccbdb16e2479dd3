"""A proposed site with sizes and probe inputs: where its mask, scale and numbers are evaluated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .evaluate import Evaluation, Evaluator
from .plan import Array
from .probes import InputSpace, Probe, Roles, dim_symbol, hollow
from .proposal import Proposal, ScoreChain
from .site import Heads, Mismatch, Operand, label
from .values import dtype_of

# A cache longer than any window that a Slice might cut it to.
_LONG_CACHE = 300007
SERVED_DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


class Trial:
    """Evaluates one proposal under one reading of the graph's input dims.

    Attributes:
        proposal: The proposal.
        space, roles: How probe inputs are built.
        batch: The batch size of the probes.
        heads, kv_heads, head_dim, value_head_dim: Sizes.
    """

    def __init__(self, proposal: Proposal, evaluator: Evaluator, space: InputSpace, roles: Roles) -> None:
        self.proposal = proposal
        self.space = space
        self.roles = roles
        self._evaluator = evaluator
        self.batch = space.batch_size() or 2
        # Multiplies the random query, so that scores spread and a wrong scale or head map shows.
        self.query_gain = 1.0
        self.kv_heads, self.head_dim = self._cache_sizes(proposal.key_cache, proposal.new_key)
        value_heads, self.value_head_dim = self._cache_sizes(proposal.value_cache, proposal.new_value)
        if value_heads != self.kv_heads:
            raise Mismatch(
                f"the key cache has {self.kv_heads} heads and the value cache {value_heads}", proposal.anchor
            )
        self.heads = self._query_heads()
        self._require_cache_first()
        self._require_new_tokens()
        self._require_all_tokens()

    def probe(self, sequence: int, past: int, padding: str = "none", batch: int | None = None) -> Probe:
        """A probe with this trial's batch size; where nothing is ever cached, all of its tokens are new."""
        if self.space.prefill_only:
            sequence, past = sequence + past, 0
        return Probe(self.batch if batch is None else batch, sequence, past, padding)

    def evaluation(self, probe: Probe, *, data: bool, cut: ir.Value | None = None) -> Evaluation:
        """The graph's inputs, the new tokens and (where given) scores of zero, bound for a probe.

        Args:
            probe: The sizes.
            data: Random numbers; without, floats have shapes only and take no memory.
            cut: The raw scores, bound to zeros [1, 1, S, T].
        """
        bindings = self.space.arrays(probe, self.roles, data=data)
        proposal = self.proposal
        for cache, heads_dim in self._caches():
            bindings[cache.value] = self._floats(cache, probe.batch, probe.past, heads_dim, data, 1)
        if proposal.lengths is not None:
            bindings.update(proposal.lengths.arrays(probe))
        if proposal.head_sink is not None:
            bindings[proposal.head_sink] = self._array(proposal.head_sink, (self.heads,), data, 4)
        bindings.update(self._new_tokens(probe, data))
        if cut is not None:
            bindings[cut] = hollow(self._scores_shape(probe), dtype_of(cut).numpy())
        return self._evaluator.on(bindings)

    def _scores_shape(self, probe: Probe) -> tuple[int, ...]:
        mask = self.proposal.mask
        folded = {
            "batch": (probe.batch * self.heads,),
            "groups": (probe.batch, self.kv_heads, self.heads // self.kv_heads),
        }
        leading = folded.get(mask.fold, (1, 1)) if isinstance(mask, ScoreChain) else (1, 1)
        return (*leading, probe.sequence, probe.total)

    def _new_tokens(self, probe: Probe, data: bool) -> dict[ir.Value, Array]:
        """Query, key and value, or what they are made of."""
        proposal = self.proposal
        if proposal.preamble is not None:
            sizes = Heads(self.heads, self.kv_heads, self.head_dim, self.value_head_dim)
            return proposal.preamble.arrays(sizes, probe, self.query_gain, data=data)
        arrays = {}
        for new, heads_dim in ((proposal.new_key, self.head_dim), (proposal.new_value, self.value_head_dim)):
            arrays[new.value] = self._floats(new, probe.batch, probe.sequence, heads_dim, data, 2)
        shape = proposal.query.shape(probe.batch, self.heads, probe.sequence, self.head_dim)
        query = self._array(proposal.query.value, shape, data, 3)
        arrays[proposal.query.value] = (query * self.query_gain).astype(query.dtype) if data else query
        return arrays

    def product(self, factors: Sequence[tuple[ir.Value, int]]) -> float:
        """The product of scalar factors.

        Raises:
            Mismatch: One is no single number, or changes with the shapes.
        """
        product = 1.0
        for value, power in factors:
            first, second, third = (
                self.evaluation(probe, data=False).array(value).reshape(-1).tolist()
                for probe in (self.probe(5, 3), self.probe(1, 7), self.probe(2, 9))
            )
            if len(first) != 1 or not first == second == third:
                raise Mismatch(f"the factor {label(value)} on the scores is not one constant number", value)
            product *= float(first[0]) ** power
        return product

    def scale_and_softcap(self) -> tuple[float, float]:
        """The op's scale and softcap from all factors of the proposal."""
        proposal = self.proposal
        scale = 1.0 / math.sqrt(self.head_dim) if proposal.scale is None else proposal.scale
        scale *= self.product(proposal.factors)
        chain = proposal.mask
        if not isinstance(chain, ScoreChain):
            return scale, proposal.softcap
        outer = self.product(chain.factors)
        if chain.inner is None:
            return scale * outer, 0.0
        # outer * tanh(inner * scores) is softcap * tanh(scale * scores / softcap).
        return scale * self.product(chain.inner) * outer, outer

    def _require_cache_first(self) -> None:
        """Raises Mismatch when the supposed cache is as long as the query: then it is not the cache."""
        query = self.proposal.query
        for cache, _ in self._caches():
            cached = dim_symbol(cache.value, cache.sequence_axis)
            if query.value.shape is not None and cached == dim_symbol(query.value, query.sequence_axis):
                raise Mismatch(
                    f"the first operand of the Concat, {label(cache.value)}, is as long as the query; "
                    "expected the cache first and the new tokens after it",
                    self.proposal.anchor,
                )

    def _require_new_tokens(self) -> None:
        """Raises Mismatch when query, key or value are known not to be of this run's rows and tokens."""
        proposal, probe = self.proposal, self.probe(5, 3)
        if proposal.preamble is not None:
            return
        for operand in (proposal.query, proposal.new_key, proposal.new_value):
            shape = self._shape_in_graph(operand.value)
            if shape is None:
                continue  # the op looks again at every run
            found = shape[operand.batch_axis], shape[operand.sequence_axis]
            if found != (probe.batch, probe.sequence):
                raise Mismatch(
                    f"{label(operand.value)} has shape {shape} for {probe.batch} rows of {probe.sequence} "
                    f"new tokens after {probe.past} cached ones; expected it to hold the new tokens",
                    proposal.anchor,
                )

    def _shape_in_graph(self, value: ir.Value) -> tuple[int, ...] | None:
        """The shape of a value on the probe (5, 3), from the graph's inputs by rules alone; None without."""
        probe = self.probe(5, 3)
        inputs = self.space.arrays(probe, self.roles, data=False)
        try:
            return self._evaluator.shapes((probe, frozenset(self.roles.items())), inputs).shape(value)
        except Mismatch:
            return None

    def _require_all_tokens(self) -> None:
        """Raises Mismatch when the attention reads a part of the cache only, such as the newest tokens."""
        proposal = self.proposal
        probe = self.probe(2, _LONG_CACHE)
        evaluation = self.evaluation(probe, data=False)
        for operand, head_dim in (
            (proposal.key_operand, self.head_dim),
            (proposal.value_operand, self.value_head_dim),
        ):
            if operand in (proposal.key.present, proposal.value.present):
                continue
            shape = evaluation.shape(operand)
            if math.prod(shape) % (probe.batch * probe.total * head_dim):
                raise Mismatch(
                    f"{label(operand)} has shape {shape} for {probe.total} tokens; expected all of them",
                    proposal.anchor,
                )

    def _caches(self) -> list[tuple[Operand, int]]:
        proposal = self.proposal
        return [(proposal.key_cache, self.head_dim), (proposal.value_cache, self.value_head_dim)]

    def _floats(
        self, operand: Operand, batch: int, sequence: int, head_dim: int, data: bool, seed: int
    ) -> Array:
        return self._array(operand.value, operand.shape(batch, self.kv_heads, sequence, head_dim), data, seed)

    def _array(self, value: ir.Value, shape: tuple[int, ...], data: bool, seed: int) -> Array:
        dtype = np.dtype(dtype_of(value).numpy())
        if not data:
            return hollow(shape, dtype)
        # Seeded by what it is, not by its name: equal layers then share their evaluations.
        generator = np.random.default_rng([seed, *shape])
        return generator.standard_normal(shape).astype(dtype)

    def _cache_sizes(self, cache: Operand, new: Operand) -> tuple[int, int]:
        """(kv_num_heads, head size) of a cache, from its own shape or from the new tokens'."""
        dtype = dtype_of(cache.value)
        if dtype not in SERVED_DTYPES:
            raise Mismatch(
                f"the cache input {label(cache.value)} holds {dtype.name}; expected float or float16",
                cache.value,
            )
        width = self._static(cache, "C" if cache.layout == "BSC" else "D")
        if cache.layout == "BSC":
            heads = self.proposal.kv_heads
            if heads is None or width is None:
                raise Mismatch(
                    f"the packed cache {label(cache.value)} does not say how many heads it holds", cache.value
                )
            return heads, width // heads
        heads = self._static(cache, "H")
        if heads is None or width is None:
            probe = Probe(self.batch, 5, 3)
            evaluation = self._evaluator.on(self.space.arrays(probe, self.roles, data=False))
            shape = evaluation.shape(new.value)
            if new.layout == "BSC":
                return self._packed_sizes(shape[2])
            return shape[new.layout.index("H")], shape[new.layout.index("D")]
        return heads, width

    def _packed_sizes(self, width: int) -> tuple[int, int]:
        """(kv_num_heads, head size) of new tokens with their heads side by side."""
        preamble = self.proposal.preamble
        heads = self.proposal.kv_heads or 1
        packed = preamble is not None and preamble.key is None
        side_by_side = (self.proposal.heads or 1) + 2 * heads if packed else heads
        if width % side_by_side:
            raise Mismatch(
                f"{label(self.proposal.new_key.value)} is {width} wide; expected {side_by_side} heads in it",
                self.proposal.anchor,
            )
        return heads, width // side_by_side

    def _static(self, operand: Operand, axis: str) -> int | None:
        place = operand.leading + (2 if operand.layout == "BSC" else operand.layout.index(axis))
        size = dim_symbol(operand.value, place)
        return size if isinstance(size, int) else None

    def _query_heads(self) -> int:
        """num_heads: said by the op, by the query's shape, or by the repeated key."""
        proposal = self.proposal
        if proposal.heads is not None:
            return proposal.heads
        declared = proposal.query.value.shape
        layout = proposal.query.layout
        axis = 2 if layout == "BSC" else layout.index("H")
        told = declared[axis] if declared is not None and len(declared) == len(layout) else None
        if isinstance(told, int):
            return self._heads_in(told)
        known = self._shape_in_graph(proposal.query.value) if proposal.preamble is None else None
        if known is not None and len(known) == len(layout):
            return self._heads_in(known[axis])
        self.heads = self.kv_heads
        probe = self.probe(5, 3)
        evaluation = self.evaluation(probe, data=False)
        if layout == "BHSD" and proposal.key_operand is not proposal.key.present:
            shape = evaluation.shape(proposal.key_operand)
            if len(shape) == 4 and shape[1] != 1:
                return shape[1]
        del evaluation.bindings[proposal.query.value]
        evaluation = self._evaluator.on(evaluation.bindings)
        shape = evaluation.shape(proposal.query.value)
        if len(shape) != len(layout):
            raise Mismatch(
                f"the query {label(proposal.query.value)} has rank {len(shape)}; expected {len(layout)}",
                proposal.anchor,
            )
        return self._heads_in(shape[axis])

    def _heads_in(self, size: int) -> int:
        """num_heads from the query's heads axis, or from its width where heads lie side by side."""
        return size // self.head_dim if self.proposal.query.layout == "BSC" else size
