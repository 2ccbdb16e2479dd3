"""Reads a Gemma 3 GGUF file: sizes, weights by their usual names, and the tokenizer's tables."""

from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from models.config import require
from models.gemma3_decoder import Gemma3Config
from models.gguf_file import GgufFile, stored_name
from models.spm_tokenizer import spm_bpe

GLOBAL_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Gemma3Checkpoint(GgufFile):
    """One opened file of the gemma3 architecture."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "gemma3")

    @cached_property
    def config(self) -> Gemma3Config:
        """Sizes and constants, in f32."""
        head_dim = self.field("gemma3.attention.key_length")
        value_dim = self.field("gemma3.attention.value_length")
        require(value_dim == head_dim, "value_length", f"the key length {head_dim}", value_dim)
        return Gemma3Config(
            num_layers=self.field("gemma3.block_count"),
            num_heads=self.field("gemma3.attention.head_count"),
            kv_num_heads=self.field("gemma3.attention.head_count_kv"),
            head_dim=head_dim,
            hidden_size=self.field("gemma3.embedding_length"),
            intermediate_size=self.field("gemma3.feed_forward_length"),
            vocab_size=len(self.field("tokenizer.ggml.tokens")),
            rope_theta=self.field("gemma3.rope.freq_base"),
            rms_norm_eps=self.field("gemma3.attention.layer_norm_rms_epsilon"),
            max_positions=self.field("gemma3.context_length"),
            sliding_window=self.field("gemma3.attention.sliding_window"),
        )

    def tokenizer(self) -> Tokenizer:
        """Makes the tokenizer.

        Raises:
            BuildError: it is not sentencepiece's.
        """
        model = self.field("tokenizer.ggml.model")
        require(model == "llama", "tokenizer.ggml.model", "llama (sentencepiece)", model)
        tables = (self.field(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type"))
        return spm_bpe(*tables, self.field("tokenizer.ggml.bos_token_id"))

    def weight(self, name: str) -> np.ndarray:
        """Returns one weight, f32, with the name and shape that `Gemma3Config.weight_shapes` gives it.

        GGUF keeps norms as the factor itself, not less 1, and the rotated halves of a head apart already.

        Raises:
            BuildError: the file has no such tensor.
        """
        return self.stored_weight(stored_name(name, GLOBAL_NAMES, LAYER_NAMES))
