"""Cache formats: what the op's format attributes may be, the presets, and the bytes that a format takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .errors import OptionError

_BITS = (4, 8, 16)
_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "key_bits": _BITS,
    "value_bits": _BITS,
    "codes": ("symmetric", "full"),
    "group_size": (0, 32, 64),
    "rotation": ("hadamard", "none"),
    "key_center": ("none", "block"),
}
FOR_EVER = 2**31 - 1  # the largest n_recent
_MINIMUM: Mapping[str, int] = {"n_recent": 0, "block": 1, "n_sink": 0}


@dataclasses.dataclass(frozen=True)
class KvFormat:
    """How a layer's keys and values are kept; the fields are the op's attributes of the same names.

    Attributes:
        n_recent: The newest tokens, as seen by each query, that are exact; larger than a run = exact mode.
        block: The tokens that leave the exact window together.
        n_sink: The first tokens that stay exact for ever.
        key_bits, value_bits: 4, 8 or 16 (exact half).
        group_size: Channels that share a scale; 0 = the whole head.
        codes: "symmetric" or "full".
        rotation: "hadamard" or "none".
        key_center: "none", or "block" to subtract each block's mean key.

    Raises:
        OptionError: A value is unknown or out of range.
    """

    n_recent: int = 0
    block: int = 1
    n_sink: int = 0
    key_bits: int = 4
    value_bits: int = 4
    group_size: int = 0
    codes: str = "symmetric"
    rotation: str = "hadamard"
    key_center: str = "none"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            found = getattr(self, name)
            if isinstance(found, bool) or found not in choices:
                expected = ", ".join(str(choice) for choice in choices)
                raise OptionError(f"[{name}] expected one of {expected}; found {found!r}")
        for name, least in _MINIMUM.items():
            found = getattr(self, name)
            if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= FOR_EVER:
                raise OptionError(f"[{name}] expected an integer from {least} to {FOR_EVER}; found {found!r}")
        if self.key_center == "block" and self.block == 1:
            raise OptionError("[key_center] expected block > 1 for key_center 'block'; found block 1")

    def attributes(self) -> dict[str, int | float | str]:
        """The op's format attributes, all of them, in the order of the fields."""
        return dataclasses.asdict(self)

    @property
    def exact(self) -> bool:
        """Whether no token ever turns low-bit: an exact window without end, kept in blocks."""
        return self.n_recent == FOR_EVER and self.block > 1

    def bytes_per_token(self, kv_num_heads: int, head_dim: int, value_head_dim: int) -> float:
        """Bytes of one low-bit token of one layer (of an exact one, when all are).

        A block's mean key is spread over its tokens.
        """
        if self.exact:
            return 4 * kv_num_heads * (head_dim + value_head_dim)
        key = self._side_bytes(self.key_bits, head_dim)
        value = self._side_bytes(self.value_bits, value_head_dim)
        centre = 2 * head_dim / self.block if self.key_center == "block" and self.key_bits != 16 else 0.0
        return kv_num_heads * (key + value + centre)

    def _side_bytes(self, bits: int, head_dim: int) -> int:
        """One token's codes and scales of one kv head: f32 scale per head, or f16 scales per group."""
        if bits == 16:
            return 2 * head_dim
        codes = (head_dim * bits + 7) // 8
        scales = 4 if self.group_size == 0 else 2 * -(-head_dim // self.group_size)
        return codes + scales

    def bits_per_element(self, head_dim: int, value_head_dim: int | None = None) -> float:
        """Bits of one element of one low-bit token, scales and mean keys included."""
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        return 8 * self.bytes_per_token(1, head_dim, value_head_dim) / (head_dim + value_head_dim)


# An exact window of 64 tokens, quantized block by block, and 4 exact sinks: what makes few bits accurate.
_WINDOW = KvFormat(n_recent=64, block=64, n_sink=4)
_CENTRED = dataclasses.replace(_WINDOW, group_size=32, codes="full", key_center="block")

PRESETS: Mapping[str, KvFormat] = {
    "default": _CENTRED,
    "int4": KvFormat(),
    "int4-g64": dataclasses.replace(_WINDOW, group_size=64, codes="full"),
    "int4-g32": dataclasses.replace(_WINDOW, group_size=32, codes="full"),
    "k8v4": dataclasses.replace(_CENTRED, key_bits=8),
    "int8": dataclasses.replace(_WINDOW, key_bits=8, value_bits=8, group_size=32),
    "exact": KvFormat(n_recent=FOR_EVER, block=64),
}

_MEANINGS: Mapping[str, str] = {
    "default": "4-bit, all 16 codes, groups of 32, keys centred by block, exact window of 64 and 4 sinks",
    "int4": "4-bit, one symmetric scale per token, nothing exact",
    "int4-g64": "4-bit, all 16 codes, groups of 64, exact window and sinks as in default",
    "int4-g32": "default without centred keys",
    "k8v4": "default with 8-bit keys",
    "int8": "8-bit, groups of 32, exact window and sinks as in default",
    "exact": "f32 for every token, to tell whether a difference comes from the format at all",
}


def describe_presets(head_dim: int = 64) -> str:
    """One sentence for each preset, with its bytes per token and kv head, and bits per element."""
    return "; ".join(
        f"{name} ({chosen.bytes_per_token(1, head_dim, head_dim):g} bytes, "
        f"{chosen.bits_per_element(head_dim):g} bits): {_MEANINGS[name]}"
        for name, chosen in PRESETS.items()
    )


def make_format(preset: str | KvFormat, overrides: Mapping[str, Any]) -> KvFormat:
    """A preset with single options replaced.

    Raises:
        OptionError: The preset or an option is unknown, or a value out of range.
    """
    if isinstance(preset, KvFormat):
        base = preset
    elif preset in PRESETS:
        base = PRESETS[preset]
    else:
        raise OptionError(f"[format] expected one of {', '.join(PRESETS)}; found {preset!r}")
    known = {field.name for field in dataclasses.fields(KvFormat)}
    for name in overrides:
        if name not in known:
            raise OptionError(
                f"[{name}] expected one of the options {', '.join(sorted(known))}; found {name!r}"
            )
    return dataclasses.replace(base, **overrides)
