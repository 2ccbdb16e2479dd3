"""OpenVINO: stateful scaled dot product attention, as its own exports have it; float and low-bit caches."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contender import Contender, Entry, SkippedError
from benchmarks.workload import CHECKED_ROWS, Shape, Workload

try:
    import openvino
    from openvino import opset13
    from openvino.op import util
except ImportError:  # the optional dependency group `bench`
    openvino = None

BITS = {"f32": 32, "f16": 16, "bf16": 16, "u8": 8, "u4": 4}
LEAST_SLACK = 34  # tokens that the cache may be shorter or longer than stated
FILL_TOKENS = 512
# OpenVINO 2026.4.1 crashes when the state of a 4-bit cache is set, so it is filled by inference: T^2 work.
MOST_FILL_PRODUCTS = 10**12


def stateful_attention(shape: Shape) -> Any:
    """The model: query [1, H, S, D], key and value [1, K, S, D], beam_idx [1]."""
    heads, kv_heads, dim = shape.num_heads, shape.kv_num_heads, shape.head_dim
    op, f32 = opset13, openvino.Type.f32
    names = ("query", "key", "value")
    operands = [
        op.parameter(openvino.PartialShape([1, count, -1, dim]), f32) for count in (heads, kv_heads, kv_heads)
    ]
    beam = op.parameter(openvino.PartialShape([1]), openvino.Type.i32)
    for name, operand in zip((*names, "beam_idx"), (*operands, beam), strict=True):
        operand.output(0).set_names({name})
    sinks, merged = [], []
    for name, operand in zip(names[1:], operands[1:], strict=True):
        info = util.VariableInfo()
        info.data_shape = openvino.PartialShape([-1, kv_heads, -1, dim])
        info.data_type, info.variable_id = f32, f"past_{name}"
        variable = util.Variable(info)
        past = op.read_value(op.constant(np.zeros((1, kv_heads, 0, dim), np.float32)), variable)
        present = op.concat([op.gather(past, beam, op.constant(np.int64(0))), operand], 2)
        sinks.append(op.assign(present, variable))
        if heads != kv_heads:
            repeats = op.constant(np.array([1, 1, heads // kv_heads, 1, 1], np.int64))
            wide = op.unsqueeze(present, op.constant(np.int64(2)))
            wide = op.broadcast(wide, repeats, broadcast_spec="BIDIRECTIONAL")
            target = op.constant(np.array([0, heads, -1, dim], np.int64))
            present = op.reshape(wide, target, special_zero=True)
        merged.append(present)
    output = op.scaled_dot_product_attention(operands[0], *merged, causal=True)
    return openvino.Model([op.result(output)], sinks, [*operands, beam], "attention")


class OpenVino(Contender):
    """One compiled model; each layer is an infer request with a state of its own.

    Args:
        work: the workload.
        precision: inference precision.
        cache: precision of the key and value cache.
    """

    def __init__(self, work: Workload, precision: str, cache: str) -> None:
        if openvino is None:
            raise SkippedError("openvino is not installed")
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": work.threads,
            "NUM_STREAMS": 1,
            "KEY_CACHE_PRECISION": cache,
            "VALUE_CACHE_PRECISION": cache,
        }
        self.work, self.decode = work, work.mode == "decode"
        self.appends = cache == "u4" or not self.decode
        fill_products = work.shape.num_heads * work.shape.head_dim * work.past**2
        if self.appends and fill_products > MOST_FILL_PRODUCTS:
            raise SkippedError("its 4-bit cache can only be filled by attending, which takes too long here")
        model = stateful_attention(work.shape)
        compiled = openvino.Core().compile_model(model, "CPU", settings)
        self.requests = [compiled.create_infer_request() for _ in range(work.layers)]
        self.lengths = [0] * work.layers
        self.next = self.last = 0
        self.slack = max(LEAST_SLACK, work.past // 64)
        new = slice(work.past, None)
        self.beam = np.zeros(1, np.int32)
        self.operands = [
            np.ascontiguousarray(rows[np.newaxis])
            for rows in (work.query, work.key[:, new], work.value[:, new])
        ]
        for layer in range(work.layers):
            self._fill(layer, work.past)
        self.cache_bytes = work.key.size * BITS[cache] * 2 // 8

    def _bind(self, layer: int, operands: list[NDArray[Any]]) -> None:
        for index, array in enumerate((*operands, self.beam)):
            self.requests[layer].set_input_tensor(index, openvino.Tensor(array, shared_memory=True))

    def _fill(self, layer: int, tokens: int) -> None:
        """Puts the first `tokens` tokens into a state, by setting it, or by inference where that crashes."""
        work, request = self.work, self.requests[layer]
        request.reset_state()
        sides = {"past_key": work.key, "past_value": work.value}
        if not self.appends:
            for state in request.query_state():
                past = sides[state.name][np.newaxis, :, :tokens]
                state.state = openvino.Tensor(np.ascontiguousarray(past))
        for begin in range(0, tokens if self.appends else 0, FILL_TOKENS):
            part = slice(begin, min(begin + FILL_TOKENS, tokens))
            rows = [np.ascontiguousarray(side[np.newaxis, :, part]) for side in sides.values()]
            size = (1, work.shape.num_heads, part.stop - begin, work.shape.head_dim)
            operands = [np.zeros(size, np.float32), *rows]  # alive until the request has read them
            self._bind(layer, operands)
            request.infer()
        self._bind(layer, self.operands)
        self.lengths[layer] = tokens

    def prepare(self) -> None:
        """Empties the state (prefill), or shortens it when it has grown too far (decode)."""
        for layer, length in enumerate(self.lengths):
            if not self.decode:
                self._fill(layer, 0)
            elif length + self.burst + 2 > self.work.past + self.slack:
                self._fill(layer, max(0, self.work.past - self.slack))

    def step(self) -> None:
        """One inference."""
        request = self.requests[self.next]
        request.start_async()
        request.wait()
        self.lengths[self.next] += self.work.new_tokens
        self.last = self.next
        self.next = (self.next + 1) % len(self.requests)

    def output(self) -> NDArray[np.float32]:
        """The last rows, [H, R, D]."""
        array: NDArray[np.float32] = self.requests[self.last].get_output_tensor(0).data
        return array[0, :, -CHECKED_ROWS:]


ENTRIES = [
    Entry(
        f"openvino_{precision}_{cache}",
        partial(OpenVino, precision=precision, cache=cache),
        1 if BITS[cache] >= 16 else 0.5,
        f"OpenVINO: computes in {precision}, cache in {cache}",
        score_copies=2,
    )
    for precision, cache in (("bf16", "bf16"), ("f32", "u8"), ("bf16", "u8"), ("f32", "u4"), ("bf16", "u4"))
]
