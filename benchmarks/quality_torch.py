"""A decoder in torch whose attention can be made to see keys and values through any storage format.

Written from the formulas, apart from the ONNX builders, so that contenders can be measured inside the real
models: what another runtime's cache would give is simulated by quantizing and dequantizing before attention.
One causal pass over a window is the same computation as decoding token by token.
Dims: T tokens, H query heads, K kv heads, D head size.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from models.config import DecoderConfig
from models.gemma3_decoder import Gemma3Config

_QUERY_BLOCK = 512
_LOGIT_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Seen:
    """What low-bit attention works on: `query` [H, T, D], `key` and `value` [K, T, D] as stored.

    `mean` [K, T, D] adds query · mean to the scores, with the query as it was. `exact` decides which keys a
    query sees as they were: a function of query positions [S, 1] and key positions [1, T]; None for none.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mean: torch.Tensor | None = None
    exact: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


Store = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], Seen]
"""store(layer, query, key, value) -> what attention sees."""


class TorchDecoder:
    """A llama-family or Gemma 3 decoder, f32.

    Args:
        config: sizes and constants.
        load: name -> weight, as the checkpoints of `models` give it.
    """

    def __init__(self, config: DecoderConfig, load: Callable[[str], np.ndarray]) -> None:
        self.config = config
        self.gemma = config if isinstance(config, Gemma3Config) else None
        self.weights = {
            name: torch.from_numpy(np.array(load(name), np.float32)) for name in config.weight_shapes()
        }

    @torch.inference_mode()
    def hidden(self, token_ids: list[int], store: Store | None = None) -> torch.Tensor:
        """Returns the states before the output projection, [T, hidden]."""
        config, gemma = self.config, self.gemma
        x = self.weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
        if gemma is not None:
            x = x * math.sqrt(config.hidden_size)
        for layer in range(config.num_layers):
            path = f"model.layers.{layer}."
            attended = self._attention(layer, self._norm(x, path + "input_layernorm"), store)
            if gemma is None:
                x = x + attended
                x = x + self._mlp(path, self._norm(x, path + "post_attention_layernorm"))
            else:
                x = x + self._norm(attended, path + "post_attention_layernorm")
                inner = self._mlp(path, self._norm(x, path + "pre_feedforward_layernorm"))
                x = x + self._norm(inner, path + "post_feedforward_layernorm")
        return self._norm(x, "model.norm")

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> Iterator[np.ndarray]:
        """Yields the logits of [T, hidden] in pieces of rows."""
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        for rows in hidden.split(max(1, _LOGIT_ELEMENTS // head.shape[0])):
            yield (rows @ head.T).numpy()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * root * self.weights[name + ".weight"]

    def _mlp(self, path: str, x: torch.Tensor) -> torch.Tensor:
        gate = x @ self.weights[path + "mlp.gate_proj.weight"].T
        gelu = self.gemma is not None
        gate = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
        return (gate * (x @ self.weights[path + "mlp.up_proj.weight"].T)) @ self.weights[
            path + "mlp.down_proj.weight"
        ].T

    def _attention(self, layer: int, x: torch.Tensor, store: Store | None) -> torch.Tensor:
        config, gemma, path = self.config, self.gemma, f"model.layers.{layer}.self_attn."

        def heads(name: str) -> torch.Tensor:
            projected = x @ self.weights[f"{path}{name}_proj.weight"].T
            return projected.reshape(len(x), -1, config.head_dim).transpose(0, 1)

        query, key, value = heads("q"), heads("k"), heads("v")
        theta, window = config.rope_theta, 0
        if gemma is not None:
            query, key = self._norm(query, path + "q_norm"), self._norm(key, path + "k_norm")
            if not gemma.is_global(layer):
                theta, window = gemma.sliding_rope_theta, gemma.sliding_window
        query, key = rotate(query, theta), rotate(key, theta)
        seen = Seen(query, key, value) if store is None else store(layer, query, key, value)
        output = attend(query, key, value, seen, config.scale, window)
        return output.transpose(0, 1).reshape(len(x), -1) @ self.weights[path + "o_proj.weight"].T


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Turns the channel pairs (i, i + D/2) of x [n, T, D]; row t stands at position t."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies).float()
    cos, sin = angles.cos(), angles.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: Seen, scale: float, window: int
) -> torch.Tensor:
    """Causal attention [H, T, D], in blocks of queries; `window` keys at most, 0 = all."""
    tokens = query.shape[1]
    outputs = []
    for start in range(0, tokens, _QUERY_BLOCK):
        end = min(tokens, start + _QUERY_BLOCK)
        first = max(0, start - window + 1) if window else 0
        p, j = torch.arange(start, end)[:, None], torch.arange(first, end)[None]
        visible = (j <= p) & (j > p - window) if window else j <= p

        def product(
            q: torch.Tensor, k: torch.Tensor, start: int = start, end: int = end, first: int = first
        ) -> torch.Tensor:
            folded = q[:, start:end].reshape(len(k), -1, q.shape[-1])
            return (folded @ k[:, first:end].mT).reshape(len(q), end - start, end - first)

        scores = product(seen.query, seen.key)
        if seen.mean is not None:
            scores = scores + product(query, seen.mean)
        exact = None if seen.exact is None else seen.exact(p, j)
        if exact is not None:
            scores = torch.where(exact, product(query, key), scores)
        weights = torch.softmax((scores * scale).masked_fill_(~visible, -math.inf), -1)

        def mix(w: torch.Tensor, v: torch.Tensor, end: int = end, first: int = first) -> torch.Tensor:
            return (w.reshape(len(v), -1, w.shape[-1]) @ v[:, first:end]).reshape(*w.shape[:2], v.shape[-1])

        if exact is None:
            outputs.append(mix(weights, seen.value))
        else:
            outputs.append(mix(weights * ~exact, seen.value) + mix(weights * exact, value))
    return torch.cat(outputs, 1)
