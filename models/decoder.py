"""Writes one llama-family decoder graph (RMSNorm, RoPE, grouped heads, gated SiLU) in any attention spelling.

Inputs: input_ids int64 [B, S]; attention_mask int64 [B, T] (1 = attend) and position_ids int64 [B, S] where
the form has them; past_key_values.N.key/value [B, K, P, D].
Outputs: logits [B, S, vocab]; present.N.key/value [B, K, T, D].
Dims: B batch_size, K kv_num_heads, S sequence_length, P past_sequence_length, T = P + S, D head_dim.
"""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from models.attention import SPELLINGS, Attended, Spelling
from models.config import AttentionForm, DecoderConfig, require
from models.graph import GraphWriter

LoadWeight = Callable[[str], np.ndarray]
"""load(name) → that weight with the shape of `DecoderConfig.weight_shapes`, any float type."""

TOKENS = ("batch_size", "sequence_length")
TOTAL = "past_sequence_length + sequence_length"


def build_decoder(config: DecoderConfig, form: AttentionForm, load: LoadWeight) -> ir.Model:
    """Returns the decoder; its weights are loaded one by one when the model is saved or serialised.

    Raises:
        BuildError: while saving, when `load` returns a weight of another shape than the sizes ask for.
    """
    return DecoderWriter(config, form, load).model()


class DecoderWriter:
    """Writes a decoder of the llama family; relatives override what they do otherwise."""

    def __init__(self, config: DecoderConfig, form: AttentionForm, load: LoadWeight) -> None:
        self.config, self.form, self.load = config, form, load
        self.graph = GraphWriter(config.dtype)
        self.shapes = config.weight_shapes()

    def model(self) -> ir.Model:
        """Writes everything and returns the model."""
        self.write()
        opsets = {"": self.form.opset}
        if self.form.spelling == "group_query_attention":
            opsets["com.microsoft"] = 1
        return self.graph.model(opsets, self.form.ir_version)

    def write(self) -> None:
        """Writes the graph from its inputs to its outputs."""
        graph, config = self.graph, self.config
        self.inputs()
        embedding = self.weight("model.embed_tokens.weight")
        presents: list[ir.Value] = []
        with graph.scope("model"):
            with graph.scope("embed_tokens"):
                hidden = self.embed(embedding)
            spellings = self.spellings(hidden)
            for layer in range(config.num_layers):
                with graph.scope(f"layers.{layer}"):
                    hidden, attended = self.layer(layer, hidden, spellings[layer])
                presents += (attended.present_key, attended.present_value)
            hidden = self.norm("norm", hidden, "model.norm.weight")
        graph.output(self.logits(hidden, embedding), (*TOKENS, config.vocab_size))
        for present in presents:
            graph.output(present, ("batch_size", config.kv_num_heads, TOTAL, config.head_dim))

    def inputs(self) -> None:
        """Declares the graph inputs."""
        graph, config, form = self.graph, self.config, self.form
        graph.input("input_ids", TOKENS, ir.DataType.INT64)
        if form.attention_mask_input:
            graph.input("attention_mask", ("batch_size", TOTAL), ir.DataType.INT64)
        if form.spelling != "group_query_attention":
            graph.input("position_ids", TOKENS, ir.DataType.INT64)
        dims = ("batch_size", config.kv_num_heads, "past_sequence_length", config.head_dim)
        for layer in range(config.num_layers):
            graph.input(f"past_key_values.{layer}.key", dims)
            graph.input(f"past_key_values.{layer}.value", dims)

    def embed(self, embedding: ir.Value) -> ir.Value:
        """Looks the input ids up; returns [B, S, hidden]."""
        return self.graph.op("Gather", embedding, self.graph.inputs["input_ids"])

    def spellings(self, embeddings: ir.Value) -> Sequence[Spelling]:
        """Writes what attentions share, and returns one spelling for each layer."""
        attend = SPELLINGS[self.form.spelling](self.graph, self.config, self.form, embeddings)
        return [attend] * self.config.num_layers

    def layer(self, layer: int, hidden: ir.Value, attend: Spelling) -> tuple[ir.Value, Attended]:
        """Writes attention and MLP with norms and residuals; returns hidden [B, S, hidden] and the caches."""
        graph, path = self.graph, f"model.layers.{layer}"

        def project(x: ir.Value, *names: str) -> ir.Value:
            return self.linear(x, *(f"{path}.self_attn.{name}.weight" for name in names))

        x = self.norm("input_layernorm", hidden, f"{path}.input_layernorm.weight")
        with graph.scope("self_attn"):
            attended = attend(layer, x, project)
            x = project(attended.output, "o_proj")
        hidden = graph.op("Add", hidden, x)
        x = self.norm("post_attention_layernorm", hidden, f"{path}.post_attention_layernorm.weight")
        with graph.scope("mlp"):
            gate = self.linear(x, f"{path}.mlp.gate_proj.weight")
            gate = graph.op("Mul", gate, graph.op("Sigmoid", gate))
            gated = graph.op("Mul", gate, self.linear(x, f"{path}.mlp.up_proj.weight"))
            x = self.linear(gated, f"{path}.mlp.down_proj.weight")
        return graph.op("Add", hidden, x), attended

    def norm(self, scope: str, x: ir.Value, weight_name: str) -> ir.Value:
        """Writes RMSNorm of x [B, S, hidden], computed in f32."""
        graph, weight, eps = self.graph, self.weight(weight_name), self.config.rms_norm_eps
        with graph.scope(scope):
            if self.form.opset >= 23:
                return graph.op("RMSNormalization", x, weight, axis=-1, epsilon=eps, stash_type=1)
            wide = graph.cast(x, ir.DataType.FLOAT)
            square = graph.op("Pow", wide, graph.constant(2, np.float32))
            mean = graph.op("ReduceMean", square, graph.constant([-1]), keepdims=1)
            root = graph.op("Sqrt", graph.op("Add", mean, graph.constant(eps, np.float32)))
            inverse = graph.op("Div", graph.constant(1, np.float32), root)
            normal = graph.cast(graph.op("Mul", wide, inverse), graph.float_type)
            return graph.op("Mul", weight, normal)

    def logits(self, hidden: ir.Value, embedding: ir.Value) -> ir.Value:
        """Writes the output projection of hidden [B, S, hidden], named "logits"."""
        if self.config.tie_embeddings:
            projection = self.graph.op("Transpose", embedding, perm=[1, 0])
        else:
            projection = self.weight("lm_head.weight", transposed=True)
        return self.graph.op("MatMul", hidden, projection, output_name="logits")

    def linear(self, x: ir.Value, *names: str) -> ir.Value:
        """Multiplies x [B, S, in] by the named [out, in] weights, transposed and placed side by side."""
        return self.graph.op("MatMul", x, self.weight(*names, transposed=True))

    def weight(self, *names: str, transposed: bool = False) -> ir.Value:
        """Adds the named weights, stacked along their first dimension, as one initializer."""
        shapes = [self.shapes[name] for name in names]
        shape = (sum(s[0] for s in shapes), *shapes[0][1:])
        if transposed:
            shape = shape[::-1]

        def load() -> np.ndarray:
            arrays = [self.load(name) for name in names]
            for name, array in zip(names, arrays, strict=True):
                require(array.shape == self.shapes[name], name, f"shape {self.shapes[name]}", array.shape)
            stacked = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            return stacked.T if transposed else stacked

        return self.graph.weight("+".join(names), shape, load)
