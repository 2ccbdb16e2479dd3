"""The operator: H num_heads, K kv_num_heads, S new and T total tokens, D head_dim, V value head size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .cache import EncodedRows, OpConfig, encode_rows
from .numerics import Float32, fwht, hadamard, quantize

Float64 = NDArray[np.float64]


def is_exact(config: OpConfig, query_positions: NDArray[np.int64], total: int) -> NDArray[np.bool_]:
    """The exactness rule [S, T]: which keys each query must see as the caller's own floats."""
    key = np.arange(total)
    exact = np.broadcast_to(key < config.n_sink, (len(query_positions), total)).copy()
    if config.n_recent > 0 or config.block > 1:
        block_end = (key // config.block + 1) * config.block
        exact |= block_end > query_positions[:, None] - config.n_recent + 1
    return exact


def is_visible(config: OpConfig, query_positions: NDArray[np.int64], total: int) -> NDArray[np.bool_]:
    """Which keys each query may attend to [S, T] by position alone."""
    key = np.arange(total)
    visible = np.ones((len(query_positions), total), bool)
    if config.causal:
        visible &= key <= query_positions[:, None]
    if config.window_left >= 0:
        visible &= key >= query_positions[:, None] - config.window_left
    return visible


def quantize_query(config: OpConfig, query: Float32) -> tuple[Float64, Float64]:
    """8-bit query [H, S, D] as codes and one scale [H, S]; 1 for a zero row, NaN for a non-finite one."""
    rotated = fwht(query) if config.rotation == "hadamard" else query
    codes, scales = quantize(rotated, 8, 0, "symmetric")
    return codes.astype(np.float64), scales[..., 0].astype(np.float64)


def low_bit_scores(config: OpConfig, query: Float32, keys: EncodedRows, heads: NDArray[np.int64]) -> Float64:
    """Unscaled scores [H, S, n] of queries against encoded keys."""
    if keys.codes is None:
        assert keys.halves is not None
        return np.einsum("hsd,hnd->hsn", query.astype(np.float64), keys.halves[heads].astype(np.float64))
    query_codes, query_scale = quantize_query(config, query)
    codes, scales = keys.codes[heads].astype(np.float64), keys.scales[heads].astype(np.float64)
    width = config.group_size or codes.shape[-1]
    scores = np.zeros((*query.shape[:2], codes.shape[1]))
    for group in range(scales.shape[-1]):
        part = slice(group * width, (group + 1) * width)
        dot = np.einsum("hsd,hnd->hsn", query_codes[..., part], codes[..., part])
        scores += dot * scales[:, None, :, group]
    scores *= query_scale[..., None]
    if keys.means is not None:
        means = np.repeat(keys.means, config.block, axis=1)[heads].astype(np.float64)
        scores += np.einsum("hsd,hnd->hsn", query.astype(np.float64), means)
    return scores


def decoded_values(config: OpConfig, values: EncodedRows) -> Float64:
    """Encoded values [K, n, V] back in the caller's channels."""
    if values.codes is None:
        assert values.halves is not None
        return values.halves.astype(np.float64)
    width = config.group_size or values.codes.shape[-1]
    scales = np.repeat(values.scales.astype(np.float64), width, axis=-1)[..., : values.codes.shape[-1]]
    rotated = values.codes * scales
    return rotated @ hadamard(rotated.shape[-1]) if config.rotation == "hadamard" else rotated


def softmax_with_sink(scores: Float64, visible: NDArray[np.bool_], head_sink: Float64 | None) -> Float64:
    """Weights [H, S, T]; a row that sees nothing is zero, a sink is one more logit of the denominator."""
    masked = np.where(visible, scores, -np.inf)
    top = masked.max(axis=-1, keepdims=True, initial=-np.inf)
    if head_sink is not None:
        top = np.maximum(top, head_sink[:, None, None])
    top = np.where(np.isneginf(top), 0.0, top)
    weights = np.where(visible, np.exp(masked - top), 0.0)
    denominator = weights.sum(axis=-1, keepdims=True)
    if head_sink is not None:
        denominator = denominator + np.exp(head_sink[:, None, None] - top)
    return weights / np.where(denominator == 0, 1.0, denominator)


def weighted_sum(weights: Float64, visible: NDArray[np.bool_], values: Float64) -> Float64:
    """Sum over visible tokens of weights [H, S, T] times values [H, T, V]; other tokens never count."""
    if np.isfinite(values).all():
        return np.einsum("hst,htv->hsv", weights, values)
    terms = weights[..., None] * values[:, None]
    return np.where(visible[..., None], terms, 0.0).sum(axis=-2)


def attend_row(
    config: OpConfig,
    query: Float32,
    key: Float32,
    value: Float32,
    *,
    key_padding: NDArray[np.generic] | None = None,
    attention_bias: Float64 | None = None,
    head_sink: NDArray[np.floating] | None = None,
    exact_from: int = 0,
) -> Float64:
    """Output [H, S, V] of one batch row whose new tokens are the last S of the history.

    Args:
        config: the node's attributes.
        query: float32 [H, S, D].
        key: float32 [K, T, D], the whole history.
        value: float32 [K, T, V], the whole history.
        key_padding: [>=T], nonzero = attend.
        attention_bias: [H, S, T].
        head_sink: [H].
        exact_from: tokens before it lost their floats (rollback beyond the slack), sinks excepted.
    """
    num_heads, steps, head_dim = query.shape
    kv_heads, total, _ = key.shape
    heads = np.arange(num_heads) // (num_heads // kv_heads)
    positions = np.arange(total - steps, total)
    scale = 1 / np.sqrt(head_dim) if config.scale is None else float(np.float32(config.scale))
    closed = total // config.block * config.block
    keys = encode_rows(config, key[:, :closed], is_key=True)
    values = encode_rows(config, value[:, :closed], is_key=False)
    exact = is_exact(config, positions, total)
    exact[:, config.n_sink : exact_from] = False

    with np.errstate(all="ignore"):
        exact_scores = np.einsum("hsd,htd->hst", query.astype(np.float64), key[heads].astype(np.float64))
        low_scores = np.zeros_like(exact_scores)
        low_scores[..., :closed] = low_bit_scores(config, query, keys, heads)
        scores = scale * np.where(exact, exact_scores, low_scores)
        if config.softcap:
            scores = config.softcap * np.tanh(scores / config.softcap)
        visible = np.broadcast_to(is_visible(config, positions, total), scores.shape).copy()
        if attention_bias is not None:
            visible &= ~np.isneginf(attention_bias)
            scores = scores + np.where(visible, attention_bias, 0.0)
        if key_padding is not None:
            visible &= np.asarray(key_padding)[:total] != 0
        sink = None if head_sink is None else np.asarray(head_sink, np.float64)
        weights = softmax_with_sink(scores, visible, sink)
        output = weighted_sum(np.where(exact, weights, 0.0), visible & exact, value[heads].astype(np.float64))
        low = ~exact[:, :closed]
        low_weights = np.where(low, weights[..., :closed], 0.0)
        output += weighted_sum(
            low_weights, visible[..., :closed] & low, decoded_values(config, values)[heads]
        )
    return output


def attend(
    config: OpConfig,
    query: Float32,
    key: Float32,
    value: Float32,
    *,
    past: Sequence[int] | int = 0,
    key_padding: NDArray[np.generic] | None = None,
    attention_bias: NDArray[np.floating] | None = None,
    head_sink: NDArray[np.floating] | None = None,
) -> Float64:
    """Output [B, H, S, V] of a batch: row b sees its first past_b + S history tokens and mask columns.

    Args:
        config: the node's attributes.
        query: float32 [B, H, S, D], the new tokens.
        key: float32 [B, K, >=past_b + S, D], the history including the new tokens.
        value: float32 [B, K, >=past_b + S, V], likewise.
        past: tokens before the new ones, one number or one per row.
        key_padding: [B, >=T].
        attention_bias: anything that broadcasts to [B, H, S, T].
        head_sink: [H].
    """
    batch, num_heads, steps, _ = query.shape
    lengths = [past] * batch if isinstance(past, int) else list(past)
    longest = max(lengths) + steps
    bias = None
    if attention_bias is not None:
        bias = np.broadcast_to(attention_bias.astype(np.float64), (batch, num_heads, steps, longest))
    rows = []
    for row, length in enumerate(lengths):
        total = length + steps
        rows.append(
            attend_row(
                config,
                query[row],
                key[row, :, :total],
                value[row, :, :total],
                key_padding=None if key_padding is None else key_padding[row],
                attention_bias=None if bias is None else bias[row, ..., :total],
                head_sink=head_sink,
            )
        )
    return np.stack(rows)


def plain_attention(query: Float32, key: Float32, value: Float32, *, scale: float, causal: bool) -> Float64:
    """Textbook float64 attention [B, H, S, V] of the last S tokens, which shares no code with `attend`."""
    group = query.shape[1] // key.shape[1]
    keys = np.repeat(key.astype(np.float64), group, axis=1)
    values = np.repeat(value.astype(np.float64), group, axis=1)
    scores = scale * (query.astype(np.float64) @ keys.swapaxes(-1, -2))
    if causal:
        steps, total = scores.shape[-2:]
        scores = np.where(np.tril(np.ones((steps, total), bool), total - steps), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values
