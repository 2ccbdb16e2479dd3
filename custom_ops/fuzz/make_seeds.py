"""Writes the seeds of the fuzzer: small states of every kind of format, frozen after real runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "ops"), str(ROOT / "tests")]

from op_graph import Graph  # noqa: E402 - found through the line above
from op_harness import OpSession, random_history, sequences  # noqa: E402
from reference import OpConfig  # noqa: E402

from kvfuse import _native  # noqa: E402

TOKENS, HEAD_DIM = 5, 8
CONFIGS = {
    "plain": OpConfig(),
    "eight": OpConfig(key_bits=8, value_bits=8, n_recent=2, n_sink=1),
    "half": OpConfig(key_bits=16, value_bits=16, n_recent=3),
    "mixed": OpConfig(key_bits=8, value_bits=4, group_size=32, rotation="none"),
    "groups": OpConfig(group_size=32, codes="full", n_sink=2),
    "centred": OpConfig(block=2, key_center="block", n_recent=1, n_sink=1, codes="full", group_size=32),
    "blocks": OpConfig(block=4, n_recent=1),
    "exact": OpConfig(n_recent=100),
    "window": OpConfig(window_left=3),
    "window_centred": OpConfig(window_left=2, block=2, key_center="block", n_recent=1),
}


def frozen(config: OpConfig, tokens: int, layers: int) -> bytes:
    """The state of a sequence of `tokens` tokens in `layers` layers of one format."""
    named = tuple(replace(config, layer=f"layers.{index}") for index in range(layers))
    session = OpSession(Graph(named))
    history = random_history(1, tokens, num_heads=2, kv_heads=1, head_dim=HEAD_DIM)
    with sequences(1) as handles:
        session.run(*history.part(0, tokens), kv_sequence=handles)
        return bytes(_native.freeze_sequence(handles[0]))


def seeds() -> dict[str, bytes]:
    """Name -> bytes of every seed."""
    states = {name: frozen(config, TOKENS, 1) for name, config in CONFIGS.items()}
    states["two_layers"] = frozen(CONFIGS["eight"], TOKENS, 2)
    states["freed_pages"] = frozen(replace(CONFIGS["window"], window_left=0), 140, 1)
    with sequences(1) as handles:
        states["empty"] = bytes(_native.freeze_sequence(handles[0]))
    return states


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, state in seeds().items():
        (folder / name).write_bytes(state)
