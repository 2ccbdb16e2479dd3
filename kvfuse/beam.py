"""Beam search over a rewritten decoder: a beam is a sequence, selecting beams forks and closes sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuse.decoder import Decoder, chunks
from kvfuse.errors import OptionError
from kvfuse.sequence import KvSequence, reorder


@dataclass(frozen=True)
class Hypothesis:
    """A continuation: its tokens (an end token is not among them) and the sum of their log probabilities."""

    token_ids: tuple[int, ...]
    log_probability: float
    finished: bool

    def score(self, length_penalty: float) -> float:
        """The sum divided by length ** length_penalty, an end token counted."""
        length = max(1, len(self.token_ids) + self.finished)
        score: float = self.log_probability / length**length_penalty
        return score


def beam_search(
    decoder: Decoder,
    prompt_ids: Sequence[int],
    *,
    beams: int = 4,
    max_new_tokens: int = 64,
    length_penalty: float = 1.0,
    eos_ids: frozenset[int] = frozenset(),
) -> list[Hypothesis]:
    """Finds likely continuations of a prompt; the prompt is run and stored once for all beams.

    Args:
        decoder: a decoder whose caches are all inside kvfuse's op; its own token count is not touched.
        prompt_ids: at least one token.
        beams: hypotheses kept after each token.
        max_new_tokens: the longest continuation.
        length_penalty: 0 ranks by the sum of log probabilities, 1 by their mean.
        eos_ids: tokens that end a continuation.

    Returns:
        At most `beams` hypotheses, the best first.

    Raises:
        OptionError: `beams` or `max_new_tokens` is below 1.
        ModelError: the decoder keeps caches as graph inputs.
    """
    for name, value in (("beams", beams), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise OptionError(f"[{name}] expected at least 1; found {value}")
    live, done = [Hypothesis((), 0.0, False)], list[Hypothesis]()
    rows = [KvSequence()]
    try:
        past = 0
        for chunk in chunks(prompt_ids):
            logits = decoder.step_rows(np.asarray([chunk], np.int64), rows, past)
            past += len(chunk)
        for _ in range(max_new_tokens):
            chosen = _best(live, log_softmax(logits), beams + len(eos_ids))
            done += [_end(live[row], gain) for row, token, gain in chosen if token in eos_ids]
            chosen = [choice for choice in chosen if choice[1] not in eos_ids][:beams]
            rows = reorder(rows, [row for row, _, _ in chosen])
            live = [_extend(live[row], token, gain) for row, token, gain in chosen]
            if (
                not live
                or len(live[0].token_ids) == max_new_tokens
                or _settled(live, done, beams, length_penalty)
            ):
                break
            last = np.array([[hypothesis.token_ids[-1]] for hypothesis in live], np.int64)
            logits = decoder.step_rows(last, rows, past)
            past += 1
    finally:
        for sequence in rows:
            sequence.close()
    return sorted(done + live, key=lambda h: h.score(length_penalty), reverse=True)[:beams]


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Log probabilities over the last axis, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result


def _best(live: list[Hypothesis], gains: NDArray[np.float64], count: int) -> list[tuple[int, int, float]]:
    """The `count` best (row, token, gain), by the sum that the row would then have."""
    totals = gains + np.array([[hypothesis.log_probability] for hypothesis in live])
    order = np.argsort(-totals, axis=None, kind="stable")[:count]
    found = zip(*np.unravel_index(order, totals.shape), strict=True)
    return [(int(row), int(token), float(gains[row, token])) for row, token in found]


def _extend(hypothesis: Hypothesis, token: int, gain: float) -> Hypothesis:
    return Hypothesis((*hypothesis.token_ids, token), hypothesis.log_probability + gain, False)


def _end(hypothesis: Hypothesis, gain: float) -> Hypothesis:
    return Hypothesis(hypothesis.token_ids, hypothesis.log_probability + gain, True)


def _settled(live: list[Hypothesis], done: list[Hypothesis], beams: int, length_penalty: float) -> bool:
    """Enough have ended, and no live one is better than the worst of them."""
    ended = sorted((h.score(length_penalty) for h in done), reverse=True)[:beams]
    return len(ended) == beams and max(h.score(length_penalty) for h in live) <= ended[-1]
