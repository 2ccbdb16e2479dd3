"""Reads a llama-architecture GGUF file: sizes, weights by their usual names, and the tokenizer's tables."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from models.config import DecoderConfig, require
from models.gguf_file import GgufFile, stored_name

GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CONTROL_TOKEN = 3


@dataclass(frozen=True)
class Vocabulary:
    """Byte-level BPE: `tokens` by id, `merges` ("left right") by rank, ids of the `special` tokens."""

    tokens: list[str]
    merges: list[str]
    special: list[int]


class GgufCheckpoint(GgufFile):
    """One opened file of the llama architecture."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "llama")

    @cached_property
    def config(self) -> DecoderConfig:
        """Sizes and constants, in f32."""
        hidden, heads = self.field("llama.embedding_length"), self.field("llama.attention.head_count")
        return DecoderConfig(
            num_layers=self.field("llama.block_count"),
            num_heads=heads,
            kv_num_heads=self.field("llama.attention.head_count_kv"),
            head_dim=self.field("llama.rope.dimension_count"),
            hidden_size=hidden,
            intermediate_size=self.field("llama.feed_forward_length"),
            vocab_size=self.field("llama.vocab_size"),
            rope_theta=self.field("llama.rope.freq_base"),
            rms_norm_eps=self.field("llama.attention.layer_norm_rms_epsilon"),
            max_positions=self.field("llama.context_length"),
            tie_embeddings="output.weight" not in self._tensors,
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's tables.

        Raises:
            BuildError: the tokenizer is not byte-level BPE.
        """
        model = self.field("tokenizer.ggml.model")
        require(model == "gpt2", "tokenizer.ggml.model", "gpt2 (byte-level BPE)", model)
        types = self.field("tokenizer.ggml.token_type")
        special = [token for token, kind in enumerate(types) if kind == CONTROL_TOKEN]
        return Vocabulary(self.field("tokenizer.ggml.tokens"), self.field("tokenizer.ggml.merges"), special)

    def weight(self, name: str) -> np.ndarray:
        """Returns one weight, f32, with the name and shape that `DecoderConfig.weight_shapes` gives it.

        Raises:
            BuildError: the file has no such tensor.
        """
        stored = self.stored_weight(gguf_name(name))
        if name.endswith("q_proj.weight"):
            return rotate_half_rows(stored, self.config.num_heads)
        if name.endswith("k_proj.weight"):
            return rotate_half_rows(stored, self.config.kv_num_heads)
        return stored


def gguf_name(name: str) -> str:
    """Translates a weight's usual name into the GGUF one."""
    return stored_name(name, GLOBAL_NAMES, LAYER_NAMES)


def rotate_half_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of a query or key projection [heads · D, in] for rotate-half RoPE.

    GGUF keeps the two channels of each rotated pair in neighbouring rows (2i, 2i + 1); rotate-half pairs
    channel i with i + D/2.
    """
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)
