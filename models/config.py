"""What a decoder is (`DecoderConfig`) and how its graph spells attention (`AttentionForm`)."""

import math
from dataclasses import dataclass

import numpy as np

from kvfuse.errors import KVFuseError

SPELLINGS = ("decomposed", "attention", "group_query_attention")
STYLES = ("sdpa", "eager")
MASKS = ("padding", "causal", "none")
DTYPES = ("float32", "float16")


class BuildError(KVFuseError):
    """A model cannot be built: an option, a weight or a download is not what was expected."""


def require(condition: bool, where: str, expected: str, found: object) -> None:
    """Raises BuildError `[where] expected …; found …` unless `condition` holds."""
    if not condition:
        raise BuildError(f"[{where}] expected {expected}; found {found!r}")


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants of one llama-family decoder.

    Attributes:
        num_layers: decoder layers.
        num_heads: query heads.
        kv_num_heads: key/value heads; divides `num_heads`.
        head_dim: channels of one head; even, because RoPE rotates halves.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        vocab_size: rows of the embedding.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: epsilon of every RMSNorm.
        max_positions: rows of the cos/sin tables that GroupQueryAttention reads.
        tie_embeddings: the output projection is the transposed embedding, stored once.
        dtype: "float32" or "float16": weights, caches and logits.

    Raises:
        BuildError: a value is out of range or the head counts do not divide.
    """

    num_layers: int
    num_heads: int
    kv_num_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 2048
    tie_embeddings: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in (
            "num_layers", "num_heads", "kv_num_heads", "head_dim", "hidden_size",
            "intermediate_size", "vocab_size", "max_positions",
        ):  # fmt: skip
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        require(self.num_heads % self.kv_num_heads == 0, "kv_num_heads",
                 f"a divisor of num_heads {self.num_heads}", self.kv_num_heads)  # fmt: skip
        require(self.head_dim % 2 == 0, "head_dim", "an even number", self.head_dim)
        require(self.rope_theta > 0, "rope_theta", "a positive number", self.rope_theta)
        require(self.dtype in DTYPES, "dtype", f"one of {DTYPES}", self.dtype)

    @property
    def scale(self) -> float:
        """The factor on query-key products, 1/sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def kv_repeat(self) -> int:
        """How many query heads share one key/value head."""
        return self.num_heads // self.kv_num_heads

    @property
    def inverse_frequencies(self) -> np.ndarray:
        """Rotary frequencies, f32 [head_dim / 2]: theta^(-2i / head_dim)."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        return (1.0 / self.rope_theta**exponents).astype(np.float32)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns name → shape of every weight, as checkpoints store them: projections are [out, in]."""
        query, kv = self.num_heads * self.head_dim, self.kv_num_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            shapes |= {
                f"model.layers.{layer}.{name}.weight": shape
                for name, shape in (
                    ("input_layernorm", (hidden,)),
                    ("self_attn.q_proj", (query, hidden)),
                    ("self_attn.k_proj", (kv, hidden)),
                    ("self_attn.v_proj", (kv, hidden)),
                    ("self_attn.o_proj", (hidden, query)),
                    ("post_attention_layernorm", (hidden,)),
                    ("mlp.gate_proj", (inner, hidden)),
                    ("mlp.up_proj", (inner, hidden)),
                    ("mlp.down_proj", (hidden, inner)),
                )
            }
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


@dataclass(frozen=True)
class AttentionForm:
    """How the graph spells one and the same attention.

    Attributes:
        spelling: "decomposed" (Concat, repeat_kv, MatMul, Softmax, MatMul; opset 18, the TorchScript way),
            "attention" (ONNX Attention with its own past, opset 23) or "group_query_attention"
            (com.microsoft, rotary inside, opset 22).
        style: decomposed only. "sdpa" multiplies query and key by sqrt(scale), masks with -inf and guards
            NaN rows; "eager" scales the scores and masks with the lowest finite number, unguarded.
        mask: "padding" (causal and `attention_mask`), "causal", or "none": every query sees every key, so
            only one-token steps are causal.
        attention_mask_input: False leaves `attention_mask` out of the inputs; with mask "causal" and True it
            is an input that nothing reads.
        sliding_window: keys that a query sees, itself included; 0 = all.
        softcap: softcap * tanh(score / softcap) before the mask; 0 = off.

    Raises:
        BuildError: an unknown word, or a combination that the spelling cannot express.
    """

    spelling: str = "decomposed"
    style: str = "sdpa"
    mask: str = "padding"
    attention_mask_input: bool = True
    sliding_window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        require(self.spelling in SPELLINGS, "spelling", f"one of {SPELLINGS}", self.spelling)
        require(self.style in STYLES, "style", f"one of {STYLES}", self.style)
        require(self.mask in MASKS, "mask", f"one of {MASKS}", self.mask)
        require(self.sliding_window >= 0, "sliding_window", "0 or more", self.sliding_window)
        require(self.softcap >= 0, "softcap", "0 or more", self.softcap)
        if self.style == "eager":
            require(
                self.spelling == "decomposed", "style", 'spelling "decomposed" with "eager"', self.spelling
            )
        if self.mask == "padding":
            require(self.attention_mask_input, "mask", 'an attention_mask input with "padding"', "none")
        if self.mask == "none":
            require(not self.sliding_window, "mask", 'no sliding window with "none"', self.sliding_window)
        if self.spelling == "group_query_attention":
            require(self.mask == "padding", "mask", '"padding" with group_query_attention', self.mask)

    @property
    def opset(self) -> int:
        """Version of the default operator set that the spelling needs."""
        return {"decomposed": 18, "attention": 23, "group_query_attention": 22}[self.spelling]

    @property
    def ir_version(self) -> int:
        """ONNX IR version that exporters write beside that operator set."""
        return 8 if self.spelling == "decomposed" else 10
