"""What `make quality` measures: presets, ablations of the default, and other runtimes' caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvfuse.formats import PRESETS, make_format

PRESET, ABLATION, SIMULATED, CONTENDER = "preset", "ablation", "simulated", "contender"


@dataclass(frozen=True)
class Variant:
    """One line of a table.

    Attributes:
        name: as the table shows it.
        kind: PRESET or ABLATION (the product), SIMULATED (its format in torch, with f32 queries), CONTENDER.
        preset: what the product starts from.
        overrides: options on top.
        environment: variables that the product is run under.
    """

    name: str
    kind: str
    preset: str = "default"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name.lower())

    def options(self) -> dict[str, Any]:
        """What a result depends on, as plain data."""
        options: dict[str, Any] = {"kind": self.kind, "environment": dict(self.environment)}
        if self.kind == CONTENDER:
            return options
        if self.preset not in PRESETS:  # chosen layer by layer
            return options | {"preset": self.preset} | dict(self.overrides)
        return options | make_format(self.preset, self.overrides).attributes()


def _ablation(name: str, preset: str = "default", **overrides: Any) -> Variant:
    return Variant(name, ABLATION, preset, overrides)


_NO_WINDOW = {"n_recent": 0, "block": 1, "n_sink": 0, "key_center": "none"}

# What is also asked for greedy text, needles and layers.
WITH_EXTRAS = ("default", "int4", "auto, target 0.5 %")
PRESET_VARIANTS = tuple(Variant(name, PRESET, name) for name in PRESETS)
CHOSEN = Variant("auto, target 0.5 %", PRESET, "auto", {"target": 0.005})

ABLATIONS = (
    _ablation("no rotation", rotation="none"),
    _ablation("symmetric codes", codes="symmetric"),
    _ablation("one f32 scale per token", group_size=0),
    _ablation("groups of 64", group_size=64),
    _ablation("keys not centred", key_center="none"),
    _ablation("n_recent 0", n_recent=0),
    _ablation("n_recent 16", n_recent=16),
    _ablation("n_recent 128", n_recent=128),
    _ablation("n_recent 256", n_recent=256),
    _ablation("block 1 (cannot centre)", block=1, key_center="none"),
    _ablation("nothing exact: block 1, n_recent 0, n_sink 0", **_NO_WINDOW),
    _ablation("n_sink 0", n_sink=0),
    _ablation("n_sink 16", n_sink=16),
    _ablation("n_sink 0, keys not centred", n_sink=0, key_center="none"),
    _ablation("only keys low-bit (values f16)", value_bits=16),
    _ablation("only values low-bit (keys f16)", key_bits=16, key_center="none"),
    _ablation("8-bit keys, f16 values", key_bits=8, value_bits=16),
    _ablation("f16 keys and values", key_bits=16, value_bits=16, key_center="none"),
    Variant("softmax weights in floats", ABLATION, environment={"KVFUSE_WEIGHTS": "exact"}),
)
FLOAT_QUERIES = (
    Variant("default, f32 queries (simulated)", SIMULATED),
    Variant("k8v4, f32 queries (simulated)", SIMULATED, "k8v4"),
    Variant("int8, f32 queries (simulated)", SIMULATED, "int8"),
)
# The long Gemma run takes a minute and more a line: only what the short run cannot tell.
_LONG = (
    "keys not centred",
    "n_recent 0",
    "n_recent 128",
    "n_recent 256",
    "n_sink 0",
    "only keys low-bit (values f16)",
    "softmax weights in floats",
)
LONG_ABLATIONS = tuple(variant for variant in ABLATIONS if variant.name in _LONG)
