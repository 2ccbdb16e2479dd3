"""Runs the same tokens through an original and a rewritten model and measures how far the logits are apart.

The original comes first: it decodes greedily from the prompt and its logits go to a temporary file. The
rewritten model is then fed the very same tokens (teacher-forced), so that one early difference does not hide
what follows. The two models are never in memory together.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from kvfuse.decoder import Decoder, cache_names, chunks, open_decoder
from kvfuse.errors import ModelError, OptionError
from kvfuse.generate import Generation, Tokenizer
from kvfuse.provider import require_device

Progress = Callable[[str, int, int], None]
_ROWS = 64  # positions compared at once: a few float64 temporaries of 64 x V


@dataclass
class Agreement:
    """How two models agree over a set of positions; `add` folds rows of logits in."""

    positions: int = 0
    max_abs_error: float = 0.0
    mean_kl: float = 0.0
    max_kl: float = 0.0
    top1_matches: int = 0

    @property
    def top1_agreement(self) -> float:
        """The share of positions where both models prefer the same token; 1 without positions."""
        return self.top1_matches / self.positions if self.positions else 1.0

    def add(self, expected: NDArray[Any], found: NDArray[Any]) -> None:
        """Folds in logits [N, V] of the original and the rewritten model; NaN becomes an infinite error."""
        for start in range(0, len(expected), _ROWS):
            rows = slice(start, start + _ROWS)
            self._add(expected[rows].astype(np.float64), found[rows].astype(np.float64))

    def _add(self, expected: NDArray[np.float64], found: NDArray[np.float64]) -> None:
        with np.errstate(invalid="ignore"):
            gap = np.where(expected == found, 0.0, np.abs(expected - found))
            kl = divergence(expected, found)
        gap, kl = np.nan_to_num(gap, nan=np.inf), np.nan_to_num(kl, nan=np.inf)
        self.max_abs_error = max(self.max_abs_error, float(gap.max(initial=0.0)))
        self.max_kl = max(self.max_kl, float(kl.max(initial=0.0)))
        total = self.mean_kl * self.positions + float(kl.sum())
        self.positions += len(kl)
        self.mean_kl = total / self.positions if self.positions else 0.0
        self.top1_matches += int(np.sum(expected.argmax(axis=1) == found.argmax(axis=1)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures; a value that is not finite becomes None, as JSON has no such number."""
        values = asdict(self) | {"top1_agreement": self.top1_agreement}
        return {k: v if math.isfinite(v) else None for k, v in values.items()}


@dataclass
class Limits:
    """What a rewritten model must reach; with none set its greedy tokens must be the original's."""

    max_error: float | None = None
    max_mean_kl: float | None = None
    min_top1: float | None = None


@dataclass
class Verification:
    """The outcome of `verify`: figures by phase and both greedy continuations."""

    original: str
    rewritten: str
    prompt_ids: list[int]
    limits: Limits
    prefill: Agreement = field(default_factory=Agreement)
    decode: Agreement = field(default_factory=Agreement)
    original_ids: list[int] = field(default_factory=list)
    rewritten_ids: list[int] = field(default_factory=list)
    original_text: str | None = None
    rewritten_text: str | None = None

    @property
    def first_difference(self) -> int | None:
        """The index of the first greedy token that differs, None when all are the same."""
        pairs = zip(self.original_ids, self.rewritten_ids, strict=True)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), None)

    @property
    def failures(self) -> list[str]:
        """What is not as it must be, one sentence each; without limits, greedy tokens must be identical."""
        phases, limits = (self.prefill, self.decode), self.limits
        positions = sum(phase.positions for phase in phases)
        error = max(phase.max_abs_error for phase in phases)
        mean_kl = sum(phase.mean_kl * phase.positions for phase in phases) / positions
        top1 = sum(phase.top1_matches for phase in phases) / positions
        token = (self.first_difference or 0) + 1
        checks = [
            (math.isfinite(error), "expected finite logits; found NaN or infinity"),
            (
                limits != Limits() or self.first_difference is None,
                f"expected the same greedy tokens; found a difference at token {token}",
            ),
            (
                limits.max_error is None or error <= limits.max_error,
                f"expected logit errors up to {limits.max_error}; found {error:.3g}",
            ),
            (
                limits.max_mean_kl is None or mean_kl <= limits.max_mean_kl,
                f"expected a mean KL up to {limits.max_mean_kl}; found {mean_kl:.3g}",
            ),
            (
                limits.min_top1 is None or top1 >= limits.min_top1,
                f"expected a top-1 agreement of at least {limits.min_top1}; found {top1:.4f}",
            ),
        ]
        return [sentence for holds, sentence in checks if not holds]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Returns what `kvfuse verify --json` prints."""
        phases = {"prefill": self.prefill.to_dict(), "decode": self.decode.to_dict()}
        plain = {k: v for k, v in vars(self).items() if k not in phases and k != "limits"}
        outcome = {
            "passed": self.passed,
            "failures": self.failures,
            "first_difference": self.first_difference,
        }
        return plain | phases | {"limits": asdict(self.limits)} | outcome

    def render(self, console: Any) -> None:
        """Prints a table on a `rich.console.Console`."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=escape(f"{self.rewritten} against {self.original}"))
        for heading in ("phase", "positions", "max |error|", "mean KL", "max KL", "top-1"):
            table.add_column(heading, justify="left" if heading == "phase" else "right")
        for name, phase in (("prefill", self.prefill), ("decode", self.decode)):
            figures = (phase.max_abs_error, phase.mean_kl, phase.max_kl)
            top1 = f"{phase.top1_agreement:.1%}"
            table.add_row(name, str(phase.positions), *(f"{x:.3g}" for x in figures), top1)
        console.print(table)
        same = self.first_difference
        count = len(self.original_ids)
        verdict = (
            f"all {count} the same" if same is None else f"first difference at token {same + 1} of {count}"
        )
        console.print(f"greedy tokens: {verdict}", highlight=False)
        for label, text in (("original ", self.original_text), ("rewritten", self.rewritten_text)):
            if text is not None:
                console.print(f"{label}: {text!r}", highlight=False, markup=False)
        for failure in self.failures:
            console.print(f"FAILED: {failure}", style="red", highlight=False, markup=False)
        if self.passed:
            console.print("passed", style="green")


def verify(
    original: str | Path,
    rewritten: str | Path,
    *,
    text: str | None = None,
    tokenizer: Tokenizer | None = None,
    prompt_length: int = 64,
    tokens: int = 32,
    seed: int = 0,
    limits: Limits | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compares a rewritten decoder with its original over a prompt and its greedy continuation.

    Args:
        original: the model before rewriting.
        rewritten: the model after it; its metadata say which caches of the original it took in.
        text: the prompt; needs `tokenizer`. Without it the prompt is `prompt_length` random token ids.
        tokenizer: turns text into ids and both continuations into text.
        prompt_length: tokens of a random prompt.
        tokens: greedy tokens to make.
        seed: of the random prompt.
        limits: what counts as passed.
        device: where the rewritten model keeps its caches; the original runs on the CPU.
        progress: called with (phase, done, total) in tokens.

    Raises:
        ModelError: a model cannot be loaded or is no decoder.
        OptionError: an argument is out of range, or the device unknown.
        DeviceError: the device does not run here.
    """
    if device is not None:
        require_device(device)  # before the original has run
    if prompt_length < 1 or tokens < 1:
        raise OptionError(
            f"[verify] expected a prompt and tokens of 1 or more; found {prompt_length}, {tokens}"
        )
    if text is not None and tokenizer is None:
        raise OptionError("[verify] expected a tokenizer for the text; found none")
    report = progress or (lambda phase, done, total: None)
    known = cache_names(rewritten)
    with tempfile.TemporaryFile() as spool:
        decoder = open_decoder(original, known)
        prompt = _prompt(decoder, text, tokenizer, prompt_length, seed)
        result = Verification(str(original), str(rewritten), prompt, limits or Limits())
        result.original_ids = _record(decoder, prompt, tokens, spool, report)
        del decoder
        spool.seek(0)
        decoder = open_decoder(rewritten, device=device)
        _compare(decoder, result, spool, report)
    if tokenizer is not None:
        result.original_text = tokenizer.decode(result.original_ids)
        result.rewritten_text = tokenizer.decode(result.rewritten_ids)
    return result


def divergence(expected: NDArray[np.float64], found: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns KL(softmax(expected) || softmax(found)) of each row of [N, V], in nats."""
    p, q = _log_softmax(expected), _log_softmax(found)
    weights = np.exp(p)
    with np.errstate(invalid="ignore"):  # a token that neither model allows: -inf - -inf, with weight 0
        kl: NDArray[np.float64] = np.where(weights > 0, weights * (p - q), 0.0).sum(axis=1)
    return np.maximum(kl, 0.0)


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = logits - logits.max(axis=1, keepdims=True)
    total: NDArray[np.float64] = np.exp(shifted).sum(axis=1, keepdims=True)
    return shifted - np.log(total)


def _prompt(
    decoder: Decoder, text: str | None, tokenizer: Tokenizer | None, length: int, seed: int
) -> list[int]:
    if text is not None and tokenizer is not None:
        return tokenizer.encode(text)
    size = decoder.vocabulary_size or decoder.step([0]).shape[-1]
    decoder.reset()
    return [int(i) for i in np.random.default_rng(seed).integers(0, size, length)]


def _record(
    decoder: Decoder, prompt: list[int], tokens: int, spool: IO[bytes], report: Progress
) -> list[int]:
    """Runs the original greedily, writes the logits of each run to `spool` and returns its tokens."""
    total = len(prompt) + tokens
    for chunk in chunks(prompt):
        logits = decoder.step(chunk)
        np.save(spool, logits)
        report("original", decoder.length, total)
    made = [int(np.argmax(logits[-1]))]
    while len(made) < tokens:
        logits = decoder.step(made[-1:])
        np.save(spool, logits)
        made.append(int(np.argmax(logits[-1])))
        report("original", decoder.length, total)
    return made


def _compare(decoder: Decoder, result: Verification, spool: IO[bytes], report: Progress) -> None:
    """Feeds the recorded tokens to the rewritten model and fills `result` in."""
    total = len(result.prompt_ids) + len(result.original_ids)
    forced: list[int] = []
    prompt = chunks(result.prompt_ids)
    pieces: list[tuple[Agreement, Sequence[int]]] = [(result.prefill, chunk) for chunk in prompt]
    pieces += [(result.decode, [token]) for token in result.original_ids[:-1]]
    for index, (agreement, chunk) in enumerate(pieces):
        logits, expected = decoder.step(chunk), np.load(spool)
        if logits.shape != expected.shape:
            where, sizes = f"[{result.rewritten}]", f"{list(expected.shape)}; found {list(logits.shape)}"
            raise ModelError(f"{where} expected logits of the original's shape {sizes}")
        agreement.add(expected, logits)
        if index + 1 >= len(prompt):
            forced.append(int(np.argmax(logits[-1])))
        report("rewritten", decoder.length, total)
    result.rewritten_ids = forced
    if result.first_difference is not None:
        # Up to its first own choice the model has seen what it would have seen running free, but no further.
        free = Generation(decoder, result.prompt_ids, max_new_tokens=len(forced))
        result.rewritten_ids = list(free)
