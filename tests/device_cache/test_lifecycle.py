"""Rollback, forks, freezing and moves: a device's layer cache holds what the CPU's holds, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from caches import (
    DEVICE,
    Tokens,
    assert_canonical,
    assert_close,
    assert_same,
    feed,
    make,
    model,
    random_tokens,
    step,
)
from reference import OpConfig

from kvfuse import _native

PRESET = OpConfig(codes="full", group_size=32, n_recent=64, block=64, n_sink=4, key_center="block")
CONFIGS = [
    OpConfig(),
    OpConfig(n_recent=5, n_sink=3, key_bits=8),
    OpConfig(n_recent=3, block=4, n_sink=2, key_center="block", group_size=32, codes="full"),
    OpConfig(block=16, value_bits=16, key_center="block"),
    OpConfig(n_recent=2, block=2, window_left=40, value_bits=8),
    OpConfig(n_recent=20, block=8, key_bits=16, rotation="none", n_sink=1000),
    PRESET,
]


def refusal(cache: object, length: int) -> str | None:
    """The sentence with which a cache refuses to be cut to `length`; None when it does what is asked."""
    try:
        cache.truncate(length)
    except ValueError as error:
        return str(error)
    return None


class Pair:
    """One sequence in a cache of the CPU and in one of the device."""

    def __init__(self, config: OpConfig, cpu: _native.LayerCache, device: _native.LayerCache) -> None:
        self.config, self.cpu, self.device = config, cpu, device

    @classmethod
    def empty(cls, config: OpConfig, tokens: Tokens) -> Pair:
        return cls(config, make(config, tokens, "cpu"), make(config, tokens))

    def step(self, tokens: Tokens, **options: bool) -> None:
        for cache in (self.cpu, self.device):
            step(cache, self.config, tokens, **options)

    def fork(self) -> Pair:
        return Pair(self.config, self.cpu.fork(), self.device.fork())

    def check(self) -> None:
        assert self.device.length == self.cpu.length
        assert self.device.exact_begin == self.cpu.exact_begin
        for canonical in (False, True):
            assert_same(self.device.snapshot(canonical), self.cpu.snapshot(canonical))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_random_histories(config: OpConfig, seed: int) -> None:
    """Appends, failed runs, rollbacks, forks, moves: after each, every cache equals its twin on the CPU."""
    rng = np.random.default_rng(seed)
    fresh = iter(range(10_000))
    pairs = [Pair.empty(config, random_tokens(0, 1, heads=1, kv_heads=1, head_dim=12))]
    for _ in range(14):
        pair = pairs[rng.integers(len(pairs))]
        action = rng.choice(["append", "append", "one", "fail", "truncate", "fork", "move"])
        count = int(rng.integers(1, 90))
        tokens = random_tokens(next(fresh), 1 if action == "one" else count, heads=1, kv_heads=1, head_dim=12)
        if action in ("append", "one"):
            pair.step(tokens, settle=bool(rng.integers(2)))
        elif action == "fail":
            pair.step(tokens, commit=False)
        elif action == "truncate":
            length = max(0, pair.cpu.length - int(rng.integers(0, 50)))
            refused = [refusal(cache, length) for cache in (pair.cpu, pair.device)]
            assert refused[0] == refused[1]
            if refused[0] is not None:
                assert "the sliding window has freed older tokens" in refused[0]
                continue
        elif action == "fork":
            pairs.append(pair.fork())
        else:
            pair.device = pair.device.moved_to("cpu").moved_to(DEVICE)
            pair.cpu = pair.cpu.moved_to("cpu")
        for each in pairs:
            each.check()
    for each in pairs:
        np.testing.assert_array_equal(each.device.read(key=True), each.cpu.read(key=True))
        np.testing.assert_array_equal(each.device.read(key=False), each.cpu.read(key=False))


@pytest.mark.parametrize("config", CONFIGS[:4], ids=str)
def test_a_fork_is_not_changed_by_the_other(config: OpConfig) -> None:
    tokens = random_tokens(1, 100, head_dim=16)
    cache = make(config, tokens)
    feed(cache, config, tokens, [100])
    fork, before = cache.fork(), cache.snapshot()
    more, other = random_tokens(2, 70, head_dim=16), random_tokens(3, 70, head_dim=16)
    found = step(fork, config, more)
    assert_same(cache.snapshot(), before)
    assert_close(found, model(config, tokens.then(more), 70))
    assert_close(step(cache, config, other), model(config, tokens.then(other), 70))
    assert_canonical(fork.snapshot(), config, tokens.then(more))
    del cache
    assert_close(step(fork, config, other), model(config, tokens.then(more).then(other), 70))


def test_forks_share_pages_until_one_writes() -> None:
    config = OpConfig()
    tokens = random_tokens(4, 64 * 4 + 10, heads=1, kv_heads=1, head_dim=32)
    cache = make(config, tokens)
    feed(cache, config, tokens, [tokens.count])
    forks = [cache.fork() for _ in range(20)]
    one = random_tokens(5, 1, heads=1, kv_heads=1, head_dim=32)
    for (
        fork
    ) in forks:  # each takes a page of its own for the last, half-filled one: the pool grows under the others
        step(fork, config, one)
    assert_canonical(cache.snapshot(), config, tokens)
    for fork in forks:
        assert_canonical(fork.snapshot(), config, tokens.then(one))


@pytest.mark.parametrize("config", [replace(PRESET, n_recent=8, block=8), OpConfig(n_recent=6)], ids=str)
def test_a_rollback_within_the_slack_is_exact(config: OpConfig) -> None:
    tokens, other = random_tokens(6, 150, head_dim=16), random_tokens(7, 12, head_dim=16)
    cache = make(config, tokens)
    feed(cache, config, tokens, [100, 50])
    cache.truncate(140)
    found = step(cache, config, other)
    history = tokens.part(0, 140).then(other)
    assert_close(found, model(config, history, 12))
    assert_canonical(cache.snapshot(), config, history)


def test_a_dropped_chunk_leaves_no_trace() -> None:
    config = replace(PRESET, n_recent=0)
    tokens, other = random_tokens(8, 130, head_dim=16), random_tokens(9, 130, head_dim=16)
    cache = make(config, tokens)
    feed(cache, config, tokens, [130])
    before = cache.snapshot()
    step(cache, config, other, settle=False)
    cache.truncate(130)
    assert_same(cache.snapshot(), before)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_moving_between_devices_goes_on(config: OpConfig) -> None:
    tokens = random_tokens(10, 120, head_dim=16)
    whole = make(config, tokens)
    expected = feed(whole, config, tokens, [100, 20])[:, 100:]
    first = make(config, tokens, "cpu")
    feed(first, config, tokens, [100])
    moved = first.moved_to(DEVICE)
    np.testing.assert_allclose(step(moved, config, tokens.part(100, 120)), expected, rtol=0, atol=1e-5)
    assert_same(moved.snapshot(True), whole.snapshot(True))
    assert_same(moved.moved_to("cpu").snapshot(True), whole.snapshot(True))


def test_memory_is_counted_and_freed() -> None:
    config = OpConfig(group_size=32, window_left=70)
    tokens = random_tokens(11, 400, heads=1, kv_heads=1, head_dim=64)
    cache = make(config, tokens)
    assert cache.nbytes == 0
    for begin in range(0, 400, 40):
        expected = cache.nbytes + cache.growth_nbytes(40)
        step(cache, config, tokens.part(begin, begin + 40), settle=False)
        assert cache.nbytes == expected
        cache.settle()
    # Pages of 64 tokens, (64 / 2 + 4) bytes a side and token; window and slack span at most 3 of them.
    page = 64 * 2 * (64 // 2 + 4)
    assert 0 < cache.nbytes <= 3 * page
    cache.truncate(0)
    assert cache.nbytes == 0


def test_a_long_sequence_in_small_steps() -> None:
    """Tables and pools grow many times; entries of freed pages do not come back."""
    config = OpConfig(n_recent=2, n_sink=1, window_left=100)
    tokens = random_tokens(12, 1500, heads=1, kv_heads=1, head_dim=4)
    cache = make(config, tokens)
    begin = 0
    for size in [37] * 40:
        found = step(cache, config, tokens.part(begin, begin + size))
        begin += size
        if size and begin % 5 == 0:
            assert_close(found, model(config, tokens.part(0, begin), size))
    assert_canonical(cache.snapshot(), config, tokens.part(0, begin))
