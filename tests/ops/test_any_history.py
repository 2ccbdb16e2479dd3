"""Random runs, rollbacks, failures and truncations: after each step, outputs and state are the model's."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from op_graph import Graph
from op_harness import Array, OpSession, assert_close, check_dump, random_history
from reference import OpConfig, attend

from kvfuse import _native

CONFIGS = [
    OpConfig(),
    OpConfig(n_recent=5, n_sink=3, key_bits=8),
    OpConfig(n_recent=3, block=4, n_sink=2, key_center="block", group_size=32, codes="full"),
    OpConfig(block=16, value_bits=16, key_center="block"),
    OpConfig(n_recent=2, block=2, window_left=12, softcap=3.0),
    OpConfig(n_recent=20, block=8, key_bits=16, value_bits=8),
]


class AnyHistory(RuleBasedStateMachine):
    """One sequence of two layers; `key` and `value` [1, 1, T, 8] are the tokens that count."""

    @initialize(config=st.sampled_from(CONFIGS))
    def start(self, config: OpConfig) -> None:
        layers = (replace(config, layer="first"), replace(config, layer="second", codes="full"))
        self.session = OpSession(Graph(layers, gates={0: "check"}))
        self.handle = _native.create_sequence()
        self.seed = 0
        self.forget(0)

    def teardown(self) -> None:
        if hasattr(self, "handle"):
            _native.destroy_sequence(self.handle)

    def forget(self, length: int) -> None:
        if not hasattr(self, "key") or length == 0:
            self.key, self.value = (np.zeros((1, 1, 0, 8), np.float32) for _ in range(2))
        self.key, self.value = self.key[:, :, :length], self.value[:, :, :length]

    @property
    def length(self) -> int:
        return int(self.key.shape[2])

    def fresh(self, count: int) -> tuple[Array, Array, Array]:
        self.seed += 1
        return random_history(self.seed, count, num_heads=2, kv_heads=1, head_dim=8).part(0, count)

    def append(self, count: int, past_length: int) -> None:
        past = self.length
        query, key, value = self.fresh(count)
        results = self.session.run_all(
            query, key, value, index=0, kv_sequence=[self.handle], kv_past_length=[past_length]
        )
        self.key = np.concatenate([self.key, key], axis=2)
        self.value = np.concatenate([self.value, value], axis=2)
        assert results["past_lengths"].tolist() == [past]
        for index, layer in enumerate(self.session.graph.layers):
            assert_close(results[f"output_{index}"], attend(layer, query, self.key, self.value, past=past))

    def within_slack(self, dropped: int) -> int:
        """A length at most `dropped` tokens shorter that may still be rolled back to exactly."""
        config = self.session.graph.layers[0]
        length = max(0, self.length - dropped)
        if config.n_recent or config.block > 1:
            while max(0, length - config.n_recent) // config.block * config.block < self.exact_begin():
                length += 1
        if config.window_left >= 0:
            length = max(length, self.length - 8)
        return min(length, self.length)

    def exact_begin(self) -> int:
        return int(_native.sequence_exact_begin(self.handle)) if self.length else 0

    @rule(count=st.integers(0, 40))
    def go_on(self, count: int) -> None:
        self.append(count, -1)

    @rule(dropped=st.integers(0, 40), count=st.integers(0, 5))
    def roll_back_and_run(self, dropped: int, count: int) -> None:
        self.forget(self.within_slack(dropped))
        self.append(count, self.length)

    @rule(count=st.integers(0, 30))
    def start_again(self, count: int) -> None:
        self.forget(0)
        self.append(count, 0)

    @precondition(lambda self: self.length > 0)
    @rule(dropped=st.integers(0, 30))
    def truncate(self, dropped: int) -> None:
        length = self.within_slack(dropped)
        _native.truncate_sequence(self.handle, length)
        self.forget(length)

    @rule(count=st.integers(1, 60))
    def fail_between_layers(self, count: int) -> None:
        with pytest.raises(InvalidArgument, match=r"[Gg]ather"):
            self.session.run(*self.fresh(count), index=4, kv_sequence=[self.handle])

    @rule(beyond=st.integers(1, 50))
    def roll_back_to_the_future(self, beyond: int) -> None:
        with pytest.raises(InvalidArgument, match=rf"found {self.length + beyond}"):
            self.session.run(
                *self.fresh(1), index=0, kv_sequence=[self.handle], kv_past_length=[self.length + beyond]
            )

    @invariant()
    def state_is_the_models(self) -> None:
        if not hasattr(self, "handle") or not self.length:
            return
        assert _native.sequence_length(self.handle) == self.length
        for layer in self.session.graph.layers:
            dump = dict(_native.dump_layer(self.handle, layer.layer))
            if dump["length"] == self.length:  # a failed run leaves uncommitted tokens in some layers
                check_dump(dump, layer, self.key[0], self.value[0], self.length)


AnyHistory.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=20)
TestAnyHistory = AnyHistory.TestCase
