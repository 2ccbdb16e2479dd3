"""Greedy or sampled decoding of a decoder model, original or rewritten, token by token."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuse.decoder import Decoder
from kvfuse.errors import KVFuseError, OptionError


@dataclass
class Generation:
    """Decodes a continuation; iterate over it to get token ids as they are made.

    The decoder is reset first. Afterwards `finish_reason` is "eos" or "length", `token_ids` holds every token
    made (an end token is not among them), and the two durations, in seconds, are those of the model's runs.
    """

    decoder: Decoder
    prompt_ids: Sequence[int]
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    eos_ids: frozenset[int] = frozenset()
    token_ids: list[int] = field(default_factory=list, init=False)
    finish_reason: str = field(default="length", init=False)
    prefill_seconds: float = field(default=0.0, init=False)
    decode_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise OptionError(f"[max_new_tokens] expected at least 1; found {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise OptionError(f"[temperature] expected 0 or more; found {self.temperature}")

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng(self.seed)
        self.token_ids.clear()
        self.finish_reason, self.decode_seconds = "length", 0.0
        self.decoder.reset()
        start = time.perf_counter()
        logits = self.decoder.prefill(self.prompt_ids)
        self.prefill_seconds = time.perf_counter() - start
        while True:
            token = choose_token(logits, self.temperature, random)
            if token in self.eos_ids:
                self.finish_reason = "eos"
                return
            self.token_ids.append(token)
            yield token
            if len(self.token_ids) == self.max_new_tokens:
                return
            start = time.perf_counter()
            logits = self.decoder.step([token])[-1]
            self.decode_seconds += time.perf_counter() - start

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed; None before a token was decoded (the first one comes from the prompt's run)."""
        steps = len(self.token_ids) - (self.finish_reason == "length")
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds else None


def choose_token(logits: NDArray[Any], temperature: float, random: np.random.Generator) -> int:
    """Returns the index of the largest of `logits` [V], or a sample of softmax(logits / temperature)."""
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return int(random.choice(len(weights), p=weights / weights.sum()))


class Tokenizer:
    """A `tokenizer.json` through the optional package `tokenizers`.

    Args:
        path: the file.

    Raises:
        KVFuseError: the package is not installed.
        OptionError: the file is missing or no tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise KVFuseError(
                "[tokenizer] expected the package 'tokenizers'; found none (pip install tokenizers)"
            ) from error
        if not Path(path).is_file():
            raise OptionError(f"[tokenizer] expected a tokenizer.json at {path}; found none")
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise OptionError(f"[tokenizer] expected a tokenizer.json at {path}; found: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text`, with the special tokens the tokenizer adds to a prompt."""
        return list(self._backend.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids`, special tokens included."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def id_of(self, token: str) -> int | None:
        """Returns the id of one token, None when the vocabulary lacks it."""
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)


def find_tokenizer(model: str | Path, path: str | Path | None = None) -> Tokenizer:
    """Loads the tokenizer at `path`, by default `tokenizer.json` beside the model."""
    return Tokenizer(Path(model).parent / "tokenizer.json" if path is None else path)


def find_eos_ids(model: str | Path, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """Reads the end tokens from the configuration files that exporters leave beside a model; may be empty."""
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        path = Path(model).parent / name
        if not path.is_file():
            continue
        try:
            settings = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise OptionError(f"[{path}] expected JSON; found: {error}") from error
        ids = settings.get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
        token = settings.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        found = tokenizer.id_of(token) if tokenizer is not None and isinstance(token, str) else None
        if found is not None:
            return frozenset([found])
    return frozenset()


def stream_text(tokenizer: Tokenizer, token_ids: Iterator[int]) -> Iterator[str]:
    """Yields the text of a token stream piece by piece, never half a character."""
    seen: list[int] = []
    shown = ""
    for token in token_ids:
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith("\ufffd") and text.startswith(shown):
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(seen) if seen else ""
    if len(rest) > len(shown):
        yield rest[len(shown) :]
