"""Storage rules of other runtimes' caches, and kvfuse's own, as torch functions on q, k and v.

Each rule states its bits per element, scales included. The rules are those of the runtimes' documentation and
source, written anew.
Dims: H query heads, K kv heads, T tokens, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.quality_torch import Seen
from kvfuse.formats import KvFormat

Rule = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """Another runtime's cache: its name, bits per element of a head of `D` channels, and its rules."""

    name: str
    bits: Callable[[int], float]
    key: Rule
    value: Rule
    query: Rule = lambda x: x
    rotated: bool = False

    def store(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Seen:
        """What attention sees of this layer."""
        if not self.rotated:
            return Seen(self.query(query), self.key(key), self.value(value))
        return Seen(
            self.query(hadamard(query)), self.key(hadamard(key)), hadamard(self.value(hadamard(value)))
        )


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The normalized Walsh-Hadamard transform over the last axis (a power of two); its own inverse."""
    size, step = x.shape[-1], 1
    while step < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * step), 2, step)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([low + high, low - high], -2).reshape(x.shape)
        step *= 2
    return x / size**0.5


def grouped(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., D] -> [..., D / size, size]; 0 keeps the channels together."""
    size = size or x.shape[-1]
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def symmetric(x: torch.Tensor, bits: int, group: int, half: bool) -> torch.Tensor:
    """One scale max |x| / (2^(bits-1) - 1) per group, codes to nearest even."""
    y, limit = grouped(x, group), 2 ** (bits - 1) - 1
    scale = y.abs().amax(-1, keepdim=True) / limit
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    scale = scale.half().float() if half else scale
    return ((y / scale).round().clamp(-limit, limit) * scale).reshape(x.shape)


def signed_extreme(x: torch.Tensor, bits: int, group: int, half: bool) -> torch.Tensor:
    """Scale = the extreme value with its sign / -2^(bits-1), so that all codes are used."""
    y, limit = grouped(x, group), 2 ** (bits - 1)
    scale = y.gather(-1, y.abs().argmax(-1, keepdim=True)) / -limit
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    scale = scale.half().float() if half else scale
    return ((y / scale).round().clamp(-limit, limit - 1) * scale).reshape(x.shape)


def q4_0(x: torch.Tensor) -> torch.Tensor:
    """Quantizes as llama.cpp: f16 scale = signed extreme / -8 of 32 values, codes floor(x / scale + 8.5)."""
    y = grouped(x, 32)
    scale = y.gather(-1, y.abs().argmax(-1, keepdim=True)) / -8
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    codes = (y * inverse + 8.5).floor().clamp(max=15) - 8
    return (codes * scale.half().float()).reshape(x.shape)


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """Quantizes as llama.cpp: f16 scale = max |x| / 127 of 32 values, codes from the scale unrounded."""
    y = grouped(x, 32)
    scale = y.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    return ((y * inverse).round() * scale.half().float()).reshape(x.shape)


def affine(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Quantizes as OpenVINO: minimum and maximum of each token's group, f32 scale and zero point."""
    y = grouped(x, group)
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    scale = torch.where(high > low, (high - low) / (2**bits - 1), torch.ones_like(low))
    zero = -low / scale
    return (((y / scale + zero).round().clamp(0, 2**bits - 1) - zero) * scale).reshape(x.shape)


def static(x: torch.Tensor, bits: int, per_channel: bool) -> torch.Tensor:
    """GroupQueryAttention of onnxruntime: symmetric, static scales, here this window's own (an oracle)."""
    limit = 2 ** (bits - 1)
    scale = (x.abs().amax(1, keepdim=True) if per_channel else x.abs().max()) / (limit - 1)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (x / scale).round().clamp(-limit, limit - 1) * scale


def _both(rule: Callable[..., torch.Tensor], *options: object) -> dict[str, Rule]:
    def bound(x: torch.Tensor) -> torch.Tensor:
        return rule(x, *options)

    return {"key": bound, "value": bound}


CONTENDERS = (
    Contender("onnxruntime GQA int8 per tensor", lambda d: 8.0, **_both(static, 8, False)),
    Contender("onnxruntime GQA int8 per channel", lambda d: 8.0, **_both(static, 8, True)),
    Contender("onnxruntime GQA int4 per channel", lambda d: 4.0, **_both(static, 4, True)),
    Contender("OpenVINO u8", lambda d: 8 + 64 / d, **_both(affine, 8, 0)),
    Contender("OpenVINO u4", lambda d: 4 + 64 / d, **_both(affine, 4, 0)),
    Contender("OpenVINO u4, groups of 32", lambda d: 4 + 64 / 32, **_both(affine, 4, 32)),
    Contender("llama.cpp q8_0", lambda d: 8.5, **_both(q8_0), query=q8_0),
    Contender("llama.cpp q4_0", lambda d: 4.5, **_both(q4_0), query=q8_0),
    Contender("llama.cpp q4_0, rotated", lambda d: 4.5, **_both(q4_0), query=q8_0, rotated=True),
)


@dataclass(frozen=True)
class Simulated:
    """kvfuse's own format, to check the product and to switch off what the product always does.

    Attributes:
        format: as the op has it.
        quantize_queries: int8 queries, as the op's.
    """

    format: KvFormat
    quantize_queries: bool = True

    def store(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Seen:
        """What attention sees of this layer."""
        form = self.format
        # A side of 16 bits is kept as it is, neither rotated nor centred.
        turn_key, turn_value = (
            hadamard if form.rotation == "hadamard" and bits != 16 else _same
            for bits in (form.key_bits, form.value_bits)
        )
        mean = None
        if form.key_center == "block" and form.key_bits != 16:
            mean = _block_means(key, form.block)
        low_key = self._side(turn_key(key if mean is None else key - mean), form.key_bits)
        low_value = turn_value(self._side(turn_value(value), form.value_bits))
        low_query = turn_key(query)
        if self.quantize_queries and form.key_bits != 16:
            low_query = symmetric(low_query, 8, 0, False)
        return Seen(low_query, low_key, low_value, mean, self._exact)

    def _side(self, x: torch.Tensor, bits: int) -> torch.Tensor:
        if bits == 16:
            return x.half().float()
        rule = signed_extreme if self.format.codes == "full" and bits == 4 else symmetric
        return rule(x, bits, self.format.group_size, self.format.group_size > 0)

    def _exact(self, p: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """The op's rule: a sink, or a block that has not wholly left the window as the query sees it."""
        form = self.format
        return (j < form.n_sink) | ((j // form.block + 1) * form.block > p - form.n_recent + 1)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _block_means(key: torch.Tensor, block: int) -> torch.Tensor:
    """Each token's block mean in f16; the last block may be short, and is never seen through its codes."""
    blocks = key.split(block, dim=1)
    means = [one.mean(1, keepdim=True).half().float().expand_as(one) for one in blocks]
    return torch.cat(means, 1)
