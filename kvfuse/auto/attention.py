"""One attention by itself: how far its output is from the float attention's for a cache format.

The op of the rewritten model is run alone, by the very kernels that will serve it, on operands taken from a
run of the original. Dims: B batch size, S tokens, H num_heads, K kv_num_heads, D head_dim, V value head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper

from kvfuse.formats import KvFormat
from kvfuse.library import native
from kvfuse.passes.lower import DOMAIN, OP
from kvfuse.session import InferenceSession

from .rewritten import EXACT

# The newest keys are kept as floats for a while, so that a rollback is exact (kRollbackSlack and whole
# pages).
_FLOATS_KEPT = 64
OPERANDS = ("query", "key", "value", "slots", "key_padding", "attention_bias", "head_sink")


@dataclasses.dataclass(frozen=True)
class Attention:
    """One op with its operands.

    Attributes:
        attributes: The op's, of which the format's are replaced.
        operands: Arrays by the names of OPERANDS; query, key and value are those of a whole run from an empty
            cache, [B, heads, S, size] or [B, S, heads, size] as the attribute `axis` says.
    """

    attributes: Mapping[str, Any]
    operands: Mapping[str, NDArray[Any]]

    @property
    def tokens(self) -> int:
        """S."""
        return int(self.operands["query"].shape[self.attributes["axis"]])

    def output(self, chosen: KvFormat) -> NDArray[np.float64]:
        """The op's output with a format, float64, for the second half of the tokens."""
        session = _session(tuple(sorted({**self.attributes, **chosen.attributes()}.items())), self._types())
        (output,) = session.run(None, dict(self.operands))
        second_half = [slice(None)] * 4
        second_half[self.attributes["axis"]] = slice(self.tokens // 2, None)
        return np.asarray(output[tuple(second_half)], np.float64)

    def error(self, chosen: KvFormat, exact: NDArray[np.float64] | None = None) -> float:
        """Relative error |output - exact| / |exact| over all heads; `exact` defaults to the exact mode's."""
        expected = self.output(EXACT) if exact is None else exact
        norm = float(np.linalg.norm(expected))
        return float(np.linalg.norm(self.output(chosen) - expected)) / norm if norm else 0.0

    def stored_keys(self, chosen: KvFormat) -> NDArray[np.float32]:
        """The first keys [K, n, D] of row 0 as a format stores them, without those held as floats."""
        attributes = {**self.attributes, "window_left": -1}
        chosen = dataclasses.replace(chosen, n_recent=0, n_sink=0)
        session = _session(tuple(sorted({**attributes, **chosen.attributes()}.items())), self._types())
        session.run(None, dict(self.operands))
        floats = max(chosen.block, _FLOATS_KEPT)
        key, _ = native().read_layer(session.sequences[0].id, "0", self.tokens - floats)
        return np.asarray(key, np.float32)

    def _types(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, str(array.dtype)) for name, array in self.operands.items())


_SESSIONS: dict[tuple[Any, ...], InferenceSession] = {}


def _session(attributes: tuple[tuple[str, Any], ...], types: tuple[tuple[str, str], ...]) -> InferenceSession:
    """A session of one op that starts from an empty cache in every run; layers that are alike share it."""
    named = {name: value for name, value in attributes if name not in ("layer", "guard")}
    key = (tuple(sorted(named.items())), types)
    if key not in _SESSIONS:
        if len(_SESSIONS) > 64:  # models with many kinds of layers: let go of the oldest
            del _SESSIONS[next(iter(_SESSIONS))]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        model = _one_op({**named, "layer": "0", "guard": "off"}, dict(types), "0")
        _SESSIONS[key] = InferenceSession(model, options)
    return _SESSIONS[key]


def _one_op(attributes: Mapping[str, Any], types: Mapping[str, str], layer: str) -> bytes:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), None)
        for name, kind in types.items()
    ]
    begin = helper.make_node(
        "KvCacheBegin",
        ["kv_sequence", "kv_past_length", "query"],
        ["slots", "past_length", "past_lengths"],
        domain=DOMAIN,
        fingerprint="0" * 64,
        layers=layer,
        uniform=0,
    )
    names = ["slots" if name == "slots" else name if name in types else "" for name in OPERANDS]
    while not names[-1]:
        names.pop()
    attend = helper.make_node(OP, names, ["output"], domain=DOMAIN, **attributes)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(types["query"]))
    controls = [
        helper.make_tensor("kv_sequence", onnx.TensorProto.INT64, [1], [0]),
        helper.make_tensor("kv_past_length", onnx.TensorProto.INT64, [1], [0]),
    ]
    inputs += [helper.make_tensor_value_info(c.name, c.data_type, [f"{c.name}_rows"]) for c in controls]
    graph = helper.make_graph(
        [begin, attend], "one", inputs, [helper.make_tensor_value_info("output", element, None)], controls
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
