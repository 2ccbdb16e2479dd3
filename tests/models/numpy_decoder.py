"""A llama-family decoder in NumPy float64, written from the formulas: one row at a time, no cache."""

import numpy as np


def rms_norm(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def rotate(x, theta, *, interleaved):
    """Turns the channel pairs of x [heads, tokens, head_dim]; row t stands at position t.

    A pair is (2i, 2i + 1) when interleaved, else (i, i + head_dim / 2).
    """
    tokens, head_dim = x.shape[1:]
    angle = np.outer(np.arange(tokens), theta ** (-np.arange(0, head_dim, 2) / head_dim))
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    pairs = (first + 1j * second) * np.exp(1j * angle)
    if interleaved:
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def attend(query, keys, values, *, causal=True, window=0, softcap=0.0):
    """Softmax attention of query [heads, tokens, head_dim] on keys, values [kv heads, tokens, head_dim]."""
    heads, tokens, head_dim = query.shape
    output = np.zeros_like(query)
    for head in range(heads):
        kv = head // (heads // len(keys))
        for t in range(tokens):
            first = max(0, t - window + 1) if window else 0
            last = t + 1 if causal else tokens
            scores = keys[kv, first:last] @ query[head, t] / np.sqrt(head_dim)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            output[head, t] = weights @ values[kv, first:last] / weights.sum()
    return output


def logits(config, load, tokens, *, interleaved=False, **mask):
    """Returns the logits [tokens, vocab] of one row of token ids.

    Args:
        config: sizes, as `models.config.DecoderConfig`.
        load: name → weight, as checkpoints store them ([out, in]).
        tokens: ids, the first one at position 0.
        interleaved: pairing of the rotated channels.
        **mask: `causal`, `window` and `softcap` of `attend`.
    """

    def linear(x, name):
        return x @ load(name).astype(np.float64).T

    def heads(x):
        return x.reshape(len(tokens), -1, config.head_dim).swapaxes(0, 1)

    embedding = load("model.embed_tokens.weight").astype(np.float64)
    hidden = embedding[tokens]
    for layer in range(config.num_layers):
        path = f"model.layers.{layer}"
        x = rms_norm(hidden, load(f"{path}.input_layernorm.weight").astype(np.float64), config.rms_norm_eps)
        query, key, value = (heads(linear(x, f"{path}.self_attn.{n}_proj.weight")) for n in "qkv")
        query = rotate(query, config.rope_theta, interleaved=interleaved)
        key = rotate(key, config.rope_theta, interleaved=interleaved)
        attended = attend(query, key, value, **mask).swapaxes(0, 1).reshape(len(tokens), -1)
        hidden = hidden + linear(attended, f"{path}.self_attn.o_proj.weight")
        norm = load(f"{path}.post_attention_layernorm.weight").astype(np.float64)
        x = rms_norm(hidden, norm, config.rms_norm_eps)
        gate = linear(x, f"{path}.mlp.gate_proj.weight")
        gated = gate / (1 + np.exp(-gate)) * linear(x, f"{path}.mlp.up_proj.weight")
        hidden = hidden + linear(gated, f"{path}.mlp.down_proj.weight")
    hidden = rms_norm(hidden, load("model.norm.weight").astype(np.float64), config.rms_norm_eps)
    head = embedding if config.tie_embeddings else load("lm_head.weight").astype(np.float64)
    return hidden @ head.T
