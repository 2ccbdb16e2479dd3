"""What the tests of sequences compare with: a sequence is a plain list of token numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from op_graph import Graph
from op_harness import Array, OpSession, assert_close, check_dump, random_history
from reference import OpConfig, attend

import kvfuse
from kvfuse import _native

VOCABULARY = 40
KV_HEADS, HEADS, HEAD_DIM = 1, 2, 8
# Query, key and value of each token number: [1, heads, VOCABULARY, HEAD_DIM].
TABLE = random_history(99, VOCABULARY, num_heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)

FORMATS = {
    "exact": OpConfig(n_recent=4096),
    "int4": OpConfig(),
    "int8_recent_sinks": OpConfig(n_recent=5, n_sink=3, key_bits=8),
    "centred": OpConfig(n_recent=3, block=4, n_sink=2, key_center="block", group_size=32, codes="full"),
    "blocks_half": OpConfig(block=16, value_bits=16, key_center="block"),
    "window": OpConfig(n_recent=2, block=2, window_left=12),
}


def two_layers(config: OpConfig, **options: Any) -> Graph:
    """A model of two layers, the second with other codes."""
    return Graph((replace(config, layer="first"), replace(config, layer="second", codes="full")), **options)


def rows(tokens: Sequence[int]) -> tuple[Array, Array, Array]:
    """Query, key and value [1, heads, len(tokens), HEAD_DIM] of tokens."""
    return TABLE.query[:, :, tokens], TABLE.key[:, :, tokens], TABLE.value[:, :, tokens]


def run(
    session: OpSession, ids: Sequence[int], tokens: Sequence[Sequence[int]], **feeds: Any
) -> dict[str, Array]:
    """Feeds tokens [B][S] to the sequences `ids`."""
    batch = [np.concatenate(parts) for parts in zip(*(rows(list(row)) for row in tokens), strict=True)]
    return session.run_all(*batch, kv_sequence=list(ids), **feeds)


def check_outputs(
    session: OpSession, results: dict[str, Array], row: int, held: Sequence[int], count: int
) -> None:
    """Compares one batch row of a run with the model's, for a sequence that now holds `held`."""
    _, key, value = rows(list(held))
    query = rows(list(held)[len(held) - count :])[0]
    for index, layer in enumerate(session.graph.layers):
        expected = attend(layer, query, key, value, past=len(held) - count)
        assert_close(results[f"output_{index}"][row : row + 1], expected)


def check_state(session: OpSession, handle: int, held: Sequence[int]) -> None:
    """Each byte of what a sequence holds is what these tokens give."""
    assert _native.sequence_length(handle) == len(held)
    if not held:
        return
    _, key, value = rows(list(held))
    for layer in session.graph.layers:
        dump = dict(_native.dump_layer(handle, layer.layer))
        if dump["length"] == len(held):  # a failed run leaves uncommitted tokens in some layers
            check_dump(dump, layer, key[0], value[0], len(held))


def fresh_state(session: OpSession, held: Sequence[int]) -> bytes:
    """The frozen state of a sequence that got these tokens in one run and nothing else."""
    with kvfuse.KvSequence() as sequence:
        if held:
            run(session, [sequence.id], [held])
        return sequence.freeze()


@dataclass
class Tracked:
    """A sequence and the tokens that it has to hold."""

    sequence: kvfuse.KvSequence
    tokens: list[int]


def exact_rollback(session: OpSession, tracked: Tracked, dropped: int) -> int:
    """The shortest length, at most `dropped` tokens less, that a rollback reaches without a trace."""
    config = session.graph.layers[0]
    present = len(tracked.tokens)
    length = max(0, present - dropped)
    if config.n_recent or config.block > 1:
        exact_begin = tracked.sequence.exact_begin
        while max(0, length - config.n_recent) // config.block * config.block < exact_begin:
            length += 1
    if config.window_left >= 0:
        length = max(length, present - 8)
    return min(length, present)
