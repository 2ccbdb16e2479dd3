"""Measures what a rewritten decoder's cache format costs, on a text read through the cache.

Both models read the same tokens in chunks; by contract a prefill in chunks gives what token-by-token decoding
gives, so every position is scored as decoding would see it. The original runs first and its logits go to a
file (context x vocabulary x 4 bytes for each window); the models are never in memory together.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuse.decoder import PREFILL_CHUNK, Decoder, cache_names, open_decoder
from kvfuse.errors import ModelError, OptionError
from kvfuse.evaluate_layers import FusedLayer, measure_layers, read_layers
from kvfuse.evaluate_plan import Plan
from kvfuse.evaluate_report import Evaluation, GreedyRun, NeedleResult, Result
from kvfuse.evaluate_scores import TokenScores, score, summarize
from kvfuse.formats import KvFormat
from kvfuse.generate import Tokenizer

Progress = Callable[[str, int, int], None]
_CHUNK_LOGITS = 1 << 26  # elements of one run's logits: 256 MiB


@dataclasses.dataclass
class Observation:
    """What one model answered: scores by window, greedy tokens and top-2 gaps by prompt, needles."""

    scores: list[TokenScores] = dataclasses.field(default_factory=list)
    greedy: list[list[int]] = dataclasses.field(default_factory=list)
    gaps: list[list[float]] = dataclasses.field(default_factory=list)
    needles: list[NeedleResult] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Reference:
    """The original's observation, and the folder with its logits (one .npy [N, V] of f32 for each window)."""

    model: str
    plan: Plan
    folder: Path
    observation: Observation


def evaluate(
    original: str | Path,
    rewritten: Sequence[str | Path],
    plan: Plan,
    *,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Runs the original, then each rewritten model, and compares.

    Args:
        original: the model before rewriting.
        rewritten: models after it.
        plan: what to ask, from `make_plan`.
        tokenizer: turns greedy tokens into text for the report.
        progress: called with (phase, done, total) in tokens.

    Raises:
        ModelError: a model cannot be run, gives NaN, or has another vocabulary.
    """
    if not rewritten:
        raise OptionError("[evaluate] expected at least one rewritten model; found none")
    layers = [read_layers(path) for path in rewritten]  # before the long run: fail early
    with tempfile.TemporaryDirectory() as folder:
        reference = record(original, plan, Path(folder), cache_names(rewritten[0]), progress)
        results = [compare(reference, path, progress) for path in rewritten]
    return summarize_all(reference, layers[0], results, tokenizer)


def summarize_all(
    reference: Reference,
    layers: Sequence[FusedLayer],
    results: Sequence[Result],
    tokenizer: Tokenizer | None = None,
) -> Evaluation:
    """Puts the original's own figures beside the results; `layers` are those of any rewritten model."""
    base = reference.observation
    elements = sum(layer.elements_per_token for layer in layers)
    size = sum(layer.original_bits / 8 * layer.elements_per_token for layer in layers)
    return Evaluation(
        original=reference.model,
        context=len(reference.plan.windows[0]),
        windows=len(reference.plan.windows),
        scores=summarize(base.scores, base.scores),
        bytes_per_token=size,
        bits_per_element=8 * size / elements,
        needles=base.needles,
        greedy_texts=[] if tokenizer is None else [tokenizer.decode(tokens) for tokens in base.greedy],
        results=list(results),
    )


def record(
    original: str | Path,
    plan: Plan,
    folder: Path,
    caches: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> Reference:
    """Runs the original and keeps its logits in `folder`.

    Args:
        original: the model before rewriting.
        plan: what to ask.
        folder: gets one file for each window.
        caches: past input -> present output where known.
        progress: called with (phase, done, total) in tokens.

    Raises:
        ModelError: the model cannot be run, or gives NaN.
    """
    decoder = open_decoder(original, caches)
    report = _phase(progress, "original", plan)
    reference = Reference(str(original), plan, folder, Observation())
    found = reference.observation
    for index, window in enumerate(plan.windows):
        logits: NDArray[np.float32] | None = None
        for start, rows in _runs(decoder, window):
            if logits is None:
                shape = (len(window), rows.shape[-1])
                logits = np.lib.format.open_memmap(_logits(folder, index), "w+", np.float32, shape)
            logits[start : start + len(rows)] = rows
            report(len(rows))
        if logits is None:
            raise OptionError("[evaluate] expected windows of at least one token; found none")
        found.scores.append(score(logits[:-1], np.asarray(window[1:], np.int64), where=str(original)))
    for prompt in plan.prompts:
        tokens, gaps = _continue(decoder, prompt, plan.greedy, None)
        found.greedy.append(tokens)
        found.gaps.append(gaps)
        report(len(prompt) + len(tokens))
    found.needles = _find_needles(decoder, plan)
    return reference


def compare(reference: Reference, rewritten: str | Path, progress: Progress | None = None) -> Result:
    """Runs a rewritten model on the reference's plan and compares the two.

    Raises:
        ModelError: the model cannot be run, gives NaN, or has another vocabulary than the original.
    """
    layers = read_layers(rewritten)
    plan, base = reference.plan, reference.observation
    decoder = open_decoder(rewritten)
    report = _phase(progress, Path(rewritten).name, plan)
    scores: list[TokenScores] = []
    resident = 0
    for index, window in enumerate(plan.windows):
        expected = np.load(_logits(reference.folder, index), mmap_mode="r")
        pieces = []
        for start, rows in _runs(decoder, window):
            if rows.shape[1:] != expected.shape[1:]:
                sizes = f"{expected.shape[1]}; found {rows.shape[1]}"
                raise ModelError(f"[{rewritten}] expected the original's vocabulary of {sizes}")
            # The last token of the window has no successor to score.
            end = min(start + len(rows), len(window) - 1)
            targets = np.asarray(window[start + 1 : end + 1], np.int64)
            pieces.append(score(rows[: end - start], targets, expected[start:end], str(rewritten)))
            report(len(rows))
        scores.append(_join(pieces))
        resident = max(resident, sum(sequence.nbytes for sequence in decoder.session.sequences))
    greedy = []
    for prompt, tokens, gaps in zip(plan.prompts, base.greedy, base.gaps, strict=True):
        made, _ = _continue(decoder, prompt, plan.greedy, tokens)
        same = next((i for i, (a, b) in enumerate(zip(tokens, made, strict=False)) if a != b), len(tokens))
        greedy.append(GreedyRun(len(prompt), len(tokens), same, gaps[same] if same < len(tokens) else None))
        report(len(prompt) + plan.greedy)
    needles = _find_needles(decoder, plan)
    del decoder
    errors = (
        list(measure_layers(rewritten, plan.windows[0][: plan.layer_tokens])) if plan.layer_tokens else []
    )
    elements = sum(layer.elements_per_token for layer in layers)
    size = sum(layer.bytes_per_token for layer in layers)
    return Result(
        model=str(rewritten),
        scores=summarize(scores, base.scores),
        bytes_per_token=size,
        bits_per_element=8 * size / elements,
        resident_bytes=resident,
        formats=_formats(layers),
        greedy=greedy,
        needles=needles,
        layers=errors,
    )


def _phase(progress: Progress | None, name: str, plan: Plan) -> Callable[[int], None]:
    """Returns a function that counts tokens of a phase."""
    total = sum(map(len, plan.windows)) + sum(len(prompt) + plan.greedy for prompt in plan.prompts)
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress is not None:
            progress(name, done, total)

    return advance


def _logits(folder: Path, window: int) -> Path:
    return folder / f"window_{window}.npy"


def _runs(decoder: Decoder, window: Sequence[int]) -> Iterator[tuple[int, NDArray[np.floating[Any]]]]:
    """Feeds a window from the start in chunks whose logits stay small; gives each one's place and logits."""
    decoder.reset()
    chunk = max(1, min(PREFILL_CHUNK, _CHUNK_LOGITS // (decoder.vocabulary_size or 1 << 18)))
    for start in range(0, len(window), chunk):
        tokens = window[start : start + chunk]
        rows = decoder.step(tokens)
        if len(rows) != len(tokens):
            raise ModelError(
                f"[evaluate] expected logits of every token; found {len(rows)} rows for {len(tokens)} tokens"
            )
        yield start, rows


def _join(pieces: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(
        *(np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("nll", "kl", "same"))
    )


def _continue(
    decoder: Decoder, prompt: Sequence[int], count: int, expected: Sequence[int] | None
) -> tuple[list[int], list[float]]:
    """Greedy tokens after a prompt, up to the first that `expected` has not, and the top-2 logit gaps."""
    decoder.reset()
    logits = decoder.prefill(prompt)
    tokens: list[int] = []
    gaps: list[float] = []
    while True:
        second, first = np.partition(logits, -2)[-2:]
        tokens.append(int(np.argmax(logits)))
        gaps.append(float(first - second))
        differs = expected is not None and tokens[-1] != expected[len(tokens) - 1]
        if differs or len(tokens) == count:
            return tokens, gaps
        logits = decoder.step(tokens[-1:])[-1]


def _find_needles(decoder: Decoder, plan: Plan) -> list[NeedleResult]:
    """Reads the haystack once, then asks for each needle and takes the question back."""
    if not plan.needles:
        return []
    decoder.reset()
    decoder.prefill(plan.haystack)
    mark = decoder.mark()
    results = []
    for needle in plan.needles:
        logits = decoder.step([*needle.question, *needle.answer])
        decoder.back_to(mark)
        answers = np.asarray(needle.answer, np.int64)
        rows = logits[len(needle.question) - 1 : -1]  # a row predicts the token after it
        found = score(rows, answers)
        retrieved = bool((rows.argmax(axis=1) == answers).all())
        results.append(NeedleResult(needle.depth, -float(found.nll.mean()), retrieved))
    return results


def _formats(layers: Sequence[FusedLayer]) -> list[dict[str, Any]]:
    """Each format in use with the layers that have it."""
    groups: dict[KvFormat, list[str]] = {}
    for layer in layers:
        groups.setdefault(layer.format, []).append(layer.layer)
    return [chosen.attributes() | {"layers": names} for chosen, names in groups.items()]
