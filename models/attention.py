"""Self-attention with a growing cache in three spellings, one class each.

Making the object writes what all layers share (mask, rotary tables); calling it writes one layer.
Dims: B batch_size, H num_heads, K kv_num_heads, S sequence_length, P past_sequence_length, T = P + S,
D head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from models import masks, rotary
from models.config import AttentionForm, DecoderConfig
from models.graph import GraphWriter

Projection = Callable[..., ir.Value]
"""project(x, "q_proj", …): x times one named weight, or several side by side."""


@dataclass(frozen=True)
class Attended:
    """One layer's result: `output` [B, S, H·D] and the grown caches, each [B, K, T, D]."""

    output: ir.Value
    present_key: ir.Value
    present_value: ir.Value


class Spelling:
    """What the spellings share; `embeddings` [B, S, hidden] tells them B and S, the rest are graph inputs."""

    def __init__(
        self,
        graph: GraphWriter,
        config: DecoderConfig,
        form: AttentionForm,
        embeddings: ir.Value,
    ) -> None:
        self.graph, self.config, self.form, self.embeddings = graph, config, form, embeddings
        self.write_shared()

    def write_shared(self) -> None:
        """Writes what all layers read."""
        raise NotImplementedError

    def __call__(self, layer: int, x: ir.Value, project: Projection) -> Attended:
        """Writes layer number `layer` on its normalised input x [B, S, hidden]."""
        raise NotImplementedError

    def boolean_mask(self) -> ir.Value | None:
        """Writes the shared bool [B, 1, S, T] mask, read from layer 0's cache; None for mask "none"."""
        if self.form.mask == "none":
            return None
        padding = self.graph.inputs["attention_mask"] if self.form.mask == "padding" else None
        window = self.form.sliding_window
        return masks.boolean_mask(self.graph, self.past(0)[0], self.embeddings, padding, window)

    def past(self, layer: int) -> tuple[ir.Value, ir.Value]:
        """Returns the key and value cache inputs of one layer, each [B, K, P, D]."""
        key, value = (self.graph.inputs[f"past_key_values.{layer}.{side}"] for side in ("key", "value"))
        return key, value

    def split_heads(self, x: ir.Value, batch: ir.Value, length: ir.Value) -> ir.Value:
        """[B, S, n·D] → [B, n, S, D]."""
        shape = self.graph.shape(batch, length, -1, self.config.head_dim)
        return self.graph.op("Transpose", self.graph.reshape(x, shape), perm=[0, 2, 1, 3])

    def merge_heads(self, x: ir.Value, batch: ir.Value, length: ir.Value) -> ir.Value:
        """[B, H, S, D] → [B, S, H·D]."""
        x = self.graph.op("Transpose", x, perm=[0, 2, 1, 3])
        return self.graph.reshape(x, self.graph.shape(batch, length, -1))


class Decomposed(Spelling):
    """Concat → repeat_kv → MatMul → mask → Softmax → MatMul, as TorchScript exports unroll it."""

    def write_shared(self) -> None:
        """Writes the mask of the style and the cos and sin of the positions."""
        graph = self.graph
        self.mask = self.boolean_mask()
        if self.mask is not None and self.form.style == "eager":
            self.mask = masks.additive_mask(graph, self.mask)
        with graph.scope("rotary_emb"):
            self.tables = rotary.decomposed_tables(graph, self.config, graph.inputs["position_ids"])
        self.cos_sin: rotary.CosSin | None = None

    def normalize(self, layer: int, name: str, x: ir.Value) -> ir.Value:
        """Normalises the heads x [B, n, S, D] of "q_norm" or "k_norm"; the llama family does not."""
        return x

    def __call__(self, layer: int, x: ir.Value, project: Projection) -> Attended:
        """Writes layer number `layer` on its normalised input x [B, S, hidden]."""
        graph = self.graph
        batch, length = graph.dim(x, 0), graph.dim(x, 1)
        query, key, value = (
            self.split_heads(project(x, name), batch, length) for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = self.normalize(layer, "q_norm", query), self.normalize(layer, "k_norm", key)
        if (
            self.cos_sin is None
        ):  # exporters add the head dimension inside the first layer and share it from there
            cos, sin = (graph.unsqueeze(table, 1) for table in self.tables)
            self.cos_sin = cos, sin
        query = rotary.rotate_decomposed(graph, query, *self.cos_sin)
        key = rotary.rotate_decomposed(graph, key, *self.cos_sin)
        past_key, past_value = self.past(layer)
        key_name, value_name = f"present.{layer}.key", f"present.{layer}.value"
        present_key = graph.op("Concat", past_key, key, axis=-2, output_name=key_name)
        present_value = graph.op("Concat", past_value, value, axis=-2, output_name=value_name)
        keys, values = self.repeat_kv(present_key), self.repeat_kv(present_value)
        output = graph.op("MatMul", self.weights(query, keys), values)
        output = self.merge_heads(output, batch, length)
        return Attended(output, present_key, present_value)

    def repeat_kv(self, present: ir.Value) -> ir.Value:
        """[B, K, T, D] → [B, H, T, D], every kv head `kv_repeat` times in a row."""
        graph, repeat = self.graph, self.config.kv_repeat
        if repeat == 1:
            return present
        batch, heads, total, head_dim = (graph.dim(present, axis) for axis in range(4))
        repeated = graph.expand(graph.unsqueeze(present, 2), batch, heads, repeat, total, head_dim)
        all_heads = graph.op("Mul", heads, graph.constant(repeat))
        return graph.reshape(repeated, graph.shape(batch, all_heads, total, head_dim))

    def weights(self, query: ir.Value, keys: ir.Value) -> ir.Value:
        """Attention weights [B, H, S, T] of query [B, H, S, D] on keys [B, H, T, D]."""
        graph, config = self.graph, self.config
        sdpa = self.form.style == "sdpa"
        mask = None if self.mask is None else graph.slice(self.mask, 0, graph.dim(keys, 2), axis=3)
        transposed = graph.op("Transpose", keys, perm=[0, 1, 3, 2])
        if sdpa:
            root = math.sqrt(config.scale)
            query = graph.op("Mul", query, graph.number(root))
            scores = graph.op("MatMul", query, graph.op("Mul", transposed, graph.number(root)))
        else:
            scores = graph.op("Mul", graph.op("MatMul", query, transposed), graph.number(config.scale))
        if self.form.softcap:
            ratio = graph.op("Div", scores, graph.number(self.form.softcap))
            scores = graph.op("Mul", graph.op("Tanh", ratio), graph.number(self.form.softcap))
        if mask is not None:
            bias = graph.op("Where", mask, graph.number([0]), graph.number([-np.inf])) if sdpa else mask
            scores = graph.op("Add", scores, bias)
        weights = graph.op("Softmax", scores, axis=-1)
        if sdpa:
            return graph.op("Where", graph.op("IsNaN", weights), graph.number([0]), weights)
        return graph.cast(graph.cast(weights, ir.DataType.FLOAT), graph.float_type)


class OnnxAttention(Spelling):
    """ONNX Attention with its own past, which also maps query heads to kv heads."""

    def write_shared(self) -> None:
        """Writes the mask, if the operator needs one, and the rotary tables."""
        # Without padding and window the operator's own causality is enough: it owns the past, so its
        # triangle is aligned to the bottom right.
        self.is_causal = self.form.mask == "causal" and not self.form.sliding_window
        self.mask = None if self.is_causal else self.boolean_mask()
        self.tables = rotary.operator_tables(self.graph, self.config, self.graph.inputs["position_ids"])

    def __call__(self, layer: int, x: ir.Value, project: Projection) -> Attended:
        """Writes layer number `layer` on its normalised input x [B, S, hidden]."""
        graph, config = self.graph, self.config
        batch, length = graph.dim(x, 0), graph.dim(x, 1)
        query, key, value = (
            self.split_heads(project(x, name), batch, length) for name in ("q_proj", "k_proj", "v_proj")
        )
        query = rotary.rotate_operator(graph, query, *self.tables, config.num_heads)
        key = rotary.rotate_operator(graph, key, *self.tables, config.kv_num_heads)
        output, present_key, present_value = graph.node(
            "Attention",
            [query, key, value, self.mask, *self.past(layer)],
            [None, f"present.{layer}.key", f"present.{layer}.value"],
            {"is_causal": int(self.is_causal), "scale": config.scale, "softcap": self.form.softcap},
        )
        return Attended(self.merge_heads(output, batch, length), present_key, present_value)


class GroupQueryAttention(Spelling):
    """com.microsoft GroupQueryAttention on packed query, key and value, rotary inside.

    Lengths come from `attention_mask` alone; rows must not be padded on the left.
    """

    def write_shared(self) -> None:
        """Writes the two lengths that the operator wants, and the rotary tables."""
        graph, mask = self.graph, self.graph.inputs["attention_mask"]
        with graph.scope("attn_mask_reformat"):
            one = graph.constant([1])
            last = graph.op("Sub", graph.op("ReduceSum", mask, one, keepdims=0), one)
            self.seqlens_k = graph.cast(last, ir.DataType.INT32)
            self.total_sequence_length = graph.cast(graph.dim(mask, 1), ir.DataType.INT32)
        self.tables = rotary.cached_tables(graph, self.config)

    def __call__(self, layer: int, x: ir.Value, project: Projection) -> Attended:
        """Writes layer number `layer` on its normalised input x [B, S, hidden]."""
        packed = project(x, "q_proj", "k_proj", "v_proj")
        lengths = (self.seqlens_k, self.total_sequence_length)
        output, present_key, present_value = self.graph.node(
            "GroupQueryAttention",
            [packed, None, None, *self.past(layer), *lengths, *self.tables],
            [None, f"present.{layer}.key", f"present.{layer}.value"],
            {
                "num_heads": self.config.num_heads,
                "kv_num_heads": self.config.kv_num_heads,
                "scale": self.config.scale,
                "local_window_size": self.form.sliding_window or -1,
                "softcap": self.form.softcap,
                "do_rotary": 1,
                "rotary_interleaved": 0,
            },
            domain="com.microsoft",
        )
        return Attended(output, present_key, present_value)


SPELLINGS: dict[str, type[Spelling]] = {
    "decomposed": Decomposed,
    "attention": OnnxAttention,
    "group_query_attention": GroupQueryAttention,
}
