"""The arithmetic of an evaluation: losses and divergences token by token, and what they add up to.

Dims: N positions, V vocabulary size. Everything is in nats.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuse.errors import ModelError

Float64 = NDArray[np.float64]

# Neighbouring tokens are correlated: errors are estimated from the means of blocks of this many.
BLOCK = 64

_ELEMENTS = 1 << 22  # logits handled at once: three f32 temporaries of 16 MiB


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Position by position: `nll` [N] of the token that follows, `kl` [N] and `same` [N].

    `kl` is KL(reference || model); `same` tells where both prefer the same token.
    """

    nll: Float64
    kl: Float64
    same: NDArray[np.bool_]


def score(
    logits: NDArray[np.floating[Any]],
    targets: NDArray[np.int64],
    reference: NDArray[np.floating[Any]] | None = None,
    where: str = "model",
) -> TokenScores:
    """Scores logits [N, V] against the tokens that follow [N] and against reference logits [N, V].

    Exponentials are taken in f32 and summed in f64; with logits below 100 in size the scores are off by less
    than 1e-5, and a reference equal to the logits gives a divergence of exactly 0.

    Args:
        logits: of the model.
        targets: token ids.
        reference: of the original; None scores the original itself (kl 0, same everywhere).
        where: the model's name in errors.

    Raises:
        ModelError: a logit is NaN, or a row has no finite one.
    """
    count, step = len(targets), max(1, _ELEMENTS // logits.shape[-1])
    nll, kl, same = np.zeros(count), np.zeros(count), np.ones(count, np.bool_)
    for start in range(0, count, step):
        rows = slice(start, start + step)
        block = np.asarray(logits[rows], np.float32)
        _, log_sum = _exponentials(block, where)
        nll[rows] = log_sum - np.take_along_axis(block, targets[rows, np.newaxis], axis=1)[:, 0]
        if reference is not None:
            expected = np.asarray(reference[rows], np.float32)
            kl[rows] = _divergence(expected, block, log_sum)
            same[rows] = expected.argmax(axis=1) == block.argmax(axis=1)
    return TokenScores(nll, kl, same)


def _exponentials(block: NDArray[np.float32], where: str) -> tuple[NDArray[np.float32], Float64]:
    """exp(x - max x) of each row, and the logarithm of the sum of exp(x)."""
    top = block.max(axis=1)
    if not np.isfinite(top).all():
        raise ModelError(f"[{where}] expected finite logits; found NaN or infinity")
    powers = np.exp(block - top[:, np.newaxis])
    return powers, top + np.log(powers.sum(axis=1, dtype=np.float64))


def _divergence(expected: NDArray[np.float32], found: NDArray[np.float32], log_sum: Float64) -> Float64:
    """KL(softmax(expected) || softmax(found)) of each row: sum p (x - y) - log Z_x + log Z_y."""
    powers, expected_sum = _exponentials(expected, "original")
    with np.errstate(invalid="ignore"):  # a token that neither model allows: -inf - -inf, with weight 0
        gaps = expected - found
        if not np.isfinite(gaps).all():
            gaps = np.where(powers > 0, gaps, np.float32(0))
    powers *= gaps
    scale = np.exp(expected.max(axis=1) - expected_sum)
    kl: Float64 = powers.sum(axis=1, dtype=np.float64) * scale - expected_sum + log_sum
    return np.maximum(kl, 0.0)


@dataclasses.dataclass(frozen=True)
class Scores:
    """What the positions of all windows add up to.

    Attributes:
        positions: N.
        perplexity, perplexity_se: exp of the mean loss, and its standard error.
        change, change_se: perplexity over the original's, minus 1; the error is the paired difference's.
        kl, kl_se, kl_p99, kl_max: of KL(original || model).
        top1: the share of positions where both prefer the same token.
    """

    positions: int
    perplexity: float
    perplexity_se: float
    change: float
    change_se: float
    kl: float
    kl_se: float
    kl_p99: float
    kl_max: float
    top1: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures; an error that too few positions give no estimate of becomes None."""
        values = dataclasses.asdict(self)
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def summarize(windows: list[TokenScores], reference: list[TokenScores]) -> Scores:
    """Adds up a model's windows; `reference` holds the original's scores of the same tokens."""
    loss, base = _concatenate(windows, "nll"), _concatenate(reference, "nll")
    kl = _concatenate(windows, "kl")
    change = [found.nll - expected.nll for found, expected in zip(windows, reference, strict=True)]
    perplexity, ratio = math.exp(loss.mean()), math.exp((loss - base).mean())
    return Scores(
        positions=len(loss),
        perplexity=perplexity,
        perplexity_se=perplexity * standard_error([window.nll for window in windows]),
        change=ratio - 1,
        change_se=ratio * standard_error(change),
        kl=float(kl.mean()),
        kl_se=standard_error([window.kl for window in windows]),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        top1=float(np.mean(np.concatenate([window.same for window in windows]))),
    )


def standard_error(windows: list[Float64]) -> float:
    """The standard error of the mean over all windows, from the means of whole blocks of BLOCK positions.

    NaN with fewer than two blocks.
    """
    blocks = [window[: len(window) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(axis=1) for window in windows]
    means = np.concatenate(blocks)
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan


def _concatenate(windows: list[TokenScores], name: str) -> Float64:
    return np.concatenate([getattr(window, name) for window in windows])
