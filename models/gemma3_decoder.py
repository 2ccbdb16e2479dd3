"""Writes a Gemma 3 decoder graph: sandwich norms, normalised queries and keys, sliding and global layers.

Inputs, outputs and dims are those of `models.decoder`. Attention is spelled out (Concat, repeat_kv, MatMul,
mask, Softmax, MatMul at opset 18), as TorchScript-based exporters unroll it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from models.attention import Attended, Decomposed, Spelling
from models.config import AttentionForm, DecoderConfig, require
from models.decoder import DecoderWriter, LoadWeight
from models.graph import GraphWriter

_LAYER_NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """Sizes and constants of a Gemma 3 text model.

    Attributes:
        sliding_window: keys that a query of a sliding layer sees, itself included.
        global_every: layer number global_every, 2·global_every … (from 1) sees all keys, with `rope_theta`.
        sliding_rope_theta: base of the rotary frequencies of the sliding layers.
    """

    sliding_window: int = 512
    global_every: int = 6
    sliding_rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sliding_window", "global_every"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))

    def is_global(self, layer: int) -> bool:
        """Whether a layer sees all keys."""
        return (layer + 1) % self.global_every == 0

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns name → shape of every weight, as checkpoints store them: projections are [out, in]."""
        shapes = super().weight_shapes()
        for layer in range(self.num_layers):
            path = f"model.layers.{layer}"
            shapes |= {f"{path}.{name}.weight": (self.hidden_size,) for name in _LAYER_NORMS}
            shapes |= {f"{path}.self_attn.{side}_norm.weight": (self.head_dim,) for side in "qk"}
        return shapes


def build_gemma3(config: Gemma3Config, load: LoadWeight) -> ir.Model:
    """Returns the decoder; its weights are loaded one by one when the model is saved or serialised.

    Args:
        config: sizes and constants.
        load: name → weight; those of norms are the factors themselves (checkpoints often keep them less 1).

    Raises:
        BuildError: while saving, when `load` returns a weight of another shape than the sizes ask for.
    """
    return _Gemma3Writer(config, load).model()


class _NormalizedHeads(Decomposed):
    """Attention whose queries and keys are normalised head by head before they are rotated."""

    def __init__(
        self,
        graph: GraphWriter,
        config: DecoderConfig,
        form: AttentionForm,
        embeddings: ir.Value,
        norm: Callable[[str, ir.Value, str], ir.Value],
    ) -> None:
        self.norm = norm
        super().__init__(graph, config, form, embeddings)

    def normalize(self, layer: int, name: str, x: ir.Value) -> ir.Value:
        """Writes RMSNorm of the heads x [B, n, S, D]."""
        return self.norm(name, x, f"model.layers.{layer}.self_attn.{name}.weight")


class _Gemma3Writer(DecoderWriter):
    def __init__(self, config: Gemma3Config, load: LoadWeight) -> None:
        super().__init__(config, AttentionForm(), load)
        self.gemma = config

    def embed(self, embedding: ir.Value) -> ir.Value:
        """Looks the input ids up and multiplies by sqrt(hidden)."""
        scale = self.graph.number(math.sqrt(self.config.hidden_size))
        return self.graph.op("Mul", super().embed(embedding), scale)

    def spellings(self, embeddings: ir.Value) -> Sequence[Spelling]:
        """Writes both masks and both rotary tables, and returns the spelling of each layer."""
        gemma = self.gemma
        sliding_config = replace(gemma, rope_theta=gemma.sliding_rope_theta)
        sliding_form = replace(self.form, sliding_window=gemma.sliding_window)
        sliding = _NormalizedHeads(self.graph, sliding_config, sliding_form, embeddings, self.norm)
        full = _NormalizedHeads(self.graph, gemma, self.form, embeddings, self.norm)
        return [full if gemma.is_global(layer) else sliding for layer in range(gemma.num_layers)]

    def layer(self, layer: int, hidden: ir.Value, attend: Spelling) -> tuple[ir.Value, Attended]:
        """Writes attention and MLP, each between two norms; returns hidden [B, S, hidden] and the caches."""
        graph, path = self.graph, f"model.layers.{layer}"

        def project(x: ir.Value, *names: str) -> ir.Value:
            return self.linear(x, *(f"{path}.self_attn.{name}.weight" for name in names))

        x = self.norm("input_layernorm", hidden, f"{path}.input_layernorm.weight")
        with graph.scope("self_attn"):
            attended = attend(layer, x, project)
            x = project(attended.output, "o_proj")
        x = self.norm("post_attention_layernorm", x, f"{path}.post_attention_layernorm.weight")
        hidden = graph.op("Add", hidden, x)
        x = self.norm("pre_feedforward_layernorm", hidden, f"{path}.pre_feedforward_layernorm.weight")
        with graph.scope("mlp"):
            gate = self.gelu(self.linear(x, f"{path}.mlp.gate_proj.weight"))
            gated = graph.op("Mul", gate, self.linear(x, f"{path}.mlp.up_proj.weight"))
            x = self.linear(gated, f"{path}.mlp.down_proj.weight")
        x = self.norm("post_feedforward_layernorm", x, f"{path}.post_feedforward_layernorm.weight")
        return graph.op("Add", hidden, x), attended

    def gelu(self, x: ir.Value) -> ir.Value:
        """Writes the tanh form of GELU: x/2 · (1 + tanh(sqrt(2/π) · (x + 0.044715·x³)))."""
        graph = self.graph
        cube = graph.op("Pow", x, graph.constant(3, np.float32))
        inner = graph.op("Add", x, graph.op("Mul", cube, graph.number(0.044715)))
        turned = graph.op("Tanh", graph.op("Mul", inner, graph.number(math.sqrt(2 / math.pi))))
        return graph.op(
            "Mul", graph.op("Mul", x, graph.number(0.5)), graph.op("Add", turned, graph.number(1))
        )
