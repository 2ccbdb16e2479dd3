"""A Gemma 3 decoder in NumPy float64, written from the formulas: one row at a time, no cache."""

import numpy as np
from numpy_decoder import attend, rms_norm, rotate


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def logits(config, load, tokens):
    """Returns the logits [tokens, vocab] of one row of token ids, the first at position 0."""

    def weight(name):
        return load(f"{name}.weight").astype(np.float64)

    def norm(x, name):
        return rms_norm(x, weight(name), config.rms_norm_eps)

    embedding = weight("model.embed_tokens")
    hidden = embedding[tokens] * np.sqrt(config.hidden_size)
    for layer in range(config.num_layers):
        path = f"model.layers.{layer}"

        def heads(x, name, path=path):
            projected = x @ weight(f"{path}.self_attn.{name}_proj").T
            return projected.reshape(len(tokens), -1, config.head_dim).swapaxes(0, 1)

        x = norm(hidden, f"{path}.input_layernorm")
        query = norm(heads(x, "q"), f"{path}.self_attn.q_norm")
        key = norm(heads(x, "k"), f"{path}.self_attn.k_norm")
        sees_all = layer % config.global_every == config.global_every - 1
        theta = config.rope_theta if sees_all else config.sliding_rope_theta
        query, key = (rotate(x, theta, interleaved=False) for x in (query, key))
        window = 0 if sees_all else config.sliding_window
        attended = attend(query, key, heads(x, "v"), window=window).swapaxes(0, 1).reshape(len(tokens), -1)
        attended = attended @ weight(f"{path}.self_attn.o_proj").T
        hidden = hidden + norm(attended, f"{path}.post_attention_layernorm")
        x = norm(hidden, f"{path}.pre_feedforward_layernorm")
        gated = gelu(x @ weight(f"{path}.mlp.gate_proj").T) * (x @ weight(f"{path}.mlp.up_proj").T)
        hidden = hidden + norm(
            gated @ weight(f"{path}.mlp.down_proj").T, f"{path}.post_feedforward_layernorm"
        )
    return norm(hidden, "model.norm") @ embedding.T
