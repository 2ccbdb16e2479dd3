"""Writes a tiny llama-architecture GGUF file with random weights, as converters write real ones."""

import gguf
import numpy as np
from tokenizers import pre_tokenizers

SIZES = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 64, "inner": 96}
SPECIAL = ["<|endoftext|>", "<|im_start|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "2 0"]
TOKENS = [
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]


def write(path, *, architecture="llama", tokenizer="gpt2"):
    """Writes the file; projections are Q8_0, everything else f32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(SIZES["layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(SIZES["hidden"])
    writer.add_feed_forward_length(SIZES["inner"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_rope_dimension_count(SIZES["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    for name, shape in _shapes().items():
        _add(writer, name, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes():
    hidden, inner, head_dim = SIZES["hidden"], SIZES["inner"], SIZES["head_dim"]
    query, kv = SIZES["heads"] * head_dim, SIZES["kv_heads"] * head_dim
    shapes = {"token_embd": (len(TOKENS), hidden), "output_norm": (hidden,)}
    for layer in range(SIZES["layers"]):
        parts = {
            "attn_norm": (hidden,), "attn_q": (query, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
            "attn_output": (hidden, query), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    return shapes


def _add(writer, name, shape):
    rng = np.random.default_rng(list(name.encode()))
    noise = rng.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        writer.add_tensor(f"{name}.weight", 1 + np.float32(0.1) * noise)
        return
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quantize(noise / np.float32(np.sqrt(shape[1])), kind)
    writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
