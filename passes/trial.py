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
from .site import Mismatch, Operand, label
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
        self._require_all_tokens()

    def probe(self, sequence: int, past: int, padding: str = "none", batch: int | None = None) -> Probe:
        """A probe with this trial's batch size."""
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
        for new, heads_dim in ((proposal.new_key, self.head_dim), (proposal.new_value, self.value_head_dim)):
            bindings[new.value] = self._floats(new, probe.batch, probe.sequence, heads_dim, data, 2)
        shape = proposal.query.shape(probe.batch, self.heads, probe.sequence, self.head_dim)
        query = self._array(proposal.query.value, shape, data, 3)
        bindings[proposal.query.value] = (query * self.query_gain).astype(query.dtype) if data else query
        if cut is not None:
            bindings[cut] = hollow((1, 1, probe.sequence, probe.total), dtype_of(cut).numpy())
        return self._evaluator.on(bindings)

    def product(self, factors: Sequence[tuple[ir.Value, int]]) -> float:
        """The product of scalar factors.

        Raises:
            Mismatch: One is no single number, or changes with the shapes.
        """
        product = 1.0
        for value, power in factors:
            first, second = (
                self.evaluation(probe, data=False).array(value).reshape(-1).tolist()
                for probe in (self.probe(5, 3), self.probe(1, 7))
            )
            if len(first) != 1 or first != second:
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
                heads = self.proposal.kv_heads or 1
                return heads, shape[2] // heads
            return shape[new.layout.index("H")], shape[new.layout.index("D")]
        return heads, width

    def _static(self, operand: Operand, axis: str) -> int | None:
        size = dim_symbol(operand.value, 2 if operand.layout == "BSC" else operand.layout.index(axis))
        return size if isinstance(size, int) else None

    def _query_heads(self) -> int:
        """num_heads: said by the op, by the query's shape, or by the repeated key."""
        proposal = self.proposal
        if proposal.heads is not None:
            return proposal.heads
        declared = proposal.query.value.shape
        if declared is not None and len(declared) == 4 and isinstance(declared[1], int):
            return declared[1]
        self.heads = self.kv_heads
        probe = self.probe(5, 3)
        evaluation = self.evaluation(probe, data=False)
        shape = evaluation.shape(proposal.key_operand)
        if proposal.key_operand is not proposal.key.present and len(shape) == 4 and shape[1] != 1:
            return shape[1]
        del evaluation.bindings[proposal.query.value]
        evaluation = self._evaluator.on(evaluation.bindings)
        shape = evaluation.shape(proposal.query.value)
        if len(shape) != 4:
            raise Mismatch(
                f"the query {label(proposal.query.value)} has rank {len(shape)}; expected 4", proposal.anchor
            )
        return shape[1]
