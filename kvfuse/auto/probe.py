"""A short run of the original model: the operands of every attention, and what a choice costs in the logits.

The run is made by the rewritten model in its exact mode, which equals the original float graph.
Dims: B batch size, T tokens of the probe, V vocabulary size, N scored positions.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from kvfuse.decoder import Decoder
from kvfuse.errors import ModelError, OptionError
from kvfuse.formats import KvFormat
from kvfuse.generate import Tokenizer
from kvfuse.session import InferenceSession
from kvfuse.verify import divergence

from .attention import OPERANDS, Attention
from .rewritten import EXACT, Rewritten, attributes_of, op_nodes

Progress = Callable[[str, int, int], None]
ProbeLike = str | os.PathLike[str] | Sequence[int] | NDArray[Any] | Mapping[str, NDArray[Any]]

# Fewer tokens say little: the second half is measured, and the first tokens are exact anyway.
MIN_TOKENS = 256
# A longer text is cut here: more tokens cost time and change little.
MAX_TOKENS = 2048
_CHUNK = 128
_LOGIT_BYTES = 256 << 20  # reference logits held at once
_CAPTURE_BYTES = 1 << 30  # operands of the layers that one run captures
_STANDARD_ERROR_TOKENS = 32  # neighbouring tokens are correlated: the error comes from means over this many


@dataclasses.dataclass(frozen=True)
class Probe:
    """What the model is run on: token ids, or arrays for its inputs by name.

    Attributes:
        source: Where it comes from, for the report.
        token_ids: int64 [T], or None.
        inputs: Arrays of the whole run, without caches, or None.
    """

    source: str
    token_ids: NDArray[np.int64] | None = None
    inputs: Mapping[str, NDArray[Any]] | None = None

    @property
    def tokens(self) -> int | None:
        """T, where it is known before the run."""
        if self.token_ids is not None:
            return len(self.token_ids)
        ids = (self.inputs or {}).get("input_ids")
        return None if ids is None else int(ids.shape[-1])


def read_probe(probe: ProbeLike | Probe, tokenizer: Tokenizer | None = None) -> Probe:
    """Makes a probe of a text, a file, token ids or input arrays.

    Args:
        probe: A text or the path of a text file (needs `tokenizer`), the path of a .npy file of token ids or
            of a .npz file of input arrays, token ids, or input arrays by name.
        tokenizer: Turns text into token ids.

    Raises:
        OptionError: It is none of these, or too short.
    """
    found = _read(probe, tokenizer)
    if found.tokens is not None and found.tokens < MIN_TOKENS:
        raise OptionError(f"[probe] expected at least {MIN_TOKENS} tokens; found {found.tokens}")
    return found


def _read(probe: ProbeLike | Probe, tokenizer: Tokenizer | None) -> Probe:
    if isinstance(probe, Probe):
        return probe
    if isinstance(probe, Mapping):
        return Probe("input arrays", inputs={name: np.asarray(array) for name, array in probe.items()})
    if not isinstance(probe, (str, os.PathLike)):
        return _ids("token ids", np.asarray(probe))
    path = Path(probe)
    text = os.fspath(probe)
    try:
        is_file = path.is_file()
    except OSError:  # a text that is too long for a name
        is_file = False
    if not is_file and isinstance(probe, os.PathLike):
        raise OptionError(f"[probe] expected a text or an existing file; found {path}")
    if is_file:
        try:
            if path.suffix == ".npz":
                with np.load(path) as arrays:
                    return Probe(str(path), inputs=dict(arrays.items()))
            if path.suffix == ".npy":
                return _ids(str(path), np.load(path))
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise OptionError(f"[probe] expected a text, .npy or .npz file; found {path}: {error}") from error
    if tokenizer is None:
        raise OptionError("[probe] expected a tokenizer for a text; found none (or give token ids)")
    return _ids(str(path) if is_file else "text", np.asarray(tokenizer.encode(text)[:MAX_TOKENS]))


def _ids(source: str, ids: NDArray[Any]) -> Probe:
    if ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise OptionError(f"[probe] expected integer token ids; found {ids.dtype} of shape {list(ids.shape)}")
    return Probe(source, token_ids=ids.reshape(-1)[:MAX_TOKENS].astype(np.int64))


@dataclasses.dataclass(frozen=True)
class Damage:
    """What a choice costs on the second half of the probe, against the float model.

    Attributes:
        kl: Mean KL divergence of the next token's distribution, nats.
        kl_p99: Its 99th percentile.
        loss: Mean change of the negative log likelihood of the probe's own next token, nats.
        loss_error: Its standard error.
        top1: Share of positions where both prefer the same token.
        positions: How many were compared.
    """

    kl: float
    kl_p99: float
    loss: float
    loss_error: float
    top1: float
    positions: int


class ProbeRun:
    """Runs one probe through a rewritten model, in its exact mode and with other formats.

    Args:
        rewritten: The model.
        probe: The probe.
        progress: Called with (phase, done, total).

    Raises:
        ModelError: The model cannot be run on the probe.
    """

    def __init__(self, rewritten: Rewritten, probe: Probe, progress: Progress | None = None) -> None:
        self._rewritten, self._probe = rewritten, probe
        self._report = progress or (lambda phase, done, total: None)
        self._nodes = op_nodes(rewritten.model)
        self._reference: NDArray[np.float32] | None = None
        self._positions: NDArray[np.int64] = np.zeros(0, np.int64)
        exact = self._rewritten.open(dict.fromkeys(self._nodes, EXACT))
        self._feeds = self._all_feeds(exact)
        self.tokens = self._length()
        if self.tokens < MIN_TOKENS:
            raise OptionError(f"[probe] expected at least {MIN_TOKENS} tokens; found {self.tokens}")
        self._reference = self._logits(exact, "probe: original")

    @property
    def scored(self) -> bool:
        """Whether the model has logits that a choice can be measured by."""
        return self._reference is not None

    def attentions(self) -> Iterator[tuple[str, Attention]]:
        """Every layer's op with the operands of the original's run."""
        layers, done, largest = list(self._nodes), 0, _CAPTURE_BYTES
        while done < len(layers):
            size = max(1, _CAPTURE_BYTES // largest)  # one at first, whose size tells
            group = layers[done : done + size]
            captured = self._capture(group)
            largest = max(1, *(sum(a.nbytes for a in found.operands.values()) for found in captured))
            yield from zip(group, captured, strict=True)
            done += len(group)
            self._report("probe: layers", done, len(layers))

    def damage(self, formats: Mapping[str, KvFormat]) -> Damage:
        """What these formats cost; only where `scored`."""
        if self._reference is None:
            raise ModelError("[probe] expected a model with logits; found none")
        logits = self._logits(self._rewritten.open(formats), "probe: choice")
        if logits is None:
            raise ModelError("[probe] expected the same outputs with every format; found no logits")
        kl = np.nan_to_num(
            np.concatenate([divergence(a, b) for a, b in _rows(self._reference, logits)]), nan=np.inf
        )
        top1 = float(np.mean(self._reference.argmax(-1) == logits.argmax(-1)))
        loss = self._loss(logits) - self._loss(self._reference)
        blocks = [part.mean() for part in np.array_split(loss, max(2, len(loss) // _STANDARD_ERROR_TOKENS))]
        error = float(np.std(blocks, ddof=1) / np.sqrt(len(blocks)))
        return Damage(
            float(kl.mean()), float(np.quantile(kl, 0.99)), float(loss.mean()), error, top1, len(kl)
        )

    def _length(self) -> int:
        if self._probe.tokens is not None:
            return self._probe.tokens
        captured = self._capture(list(self._nodes)[:1])
        return captured[0].tokens

    def _all_feeds(self, session: InferenceSession) -> dict[str, Any]:
        """Everything that one run over the whole probe is fed."""
        inputs = dict(self._probe.inputs or {})
        ids = self._probe.token_ids
        if ids is None and "input_ids" in inputs and inputs["input_ids"].shape[0] == 1:
            ids = inputs["input_ids"].reshape(-1)
        needed = {value.name for value in session.get_inputs()}
        unknown = sorted(inputs.keys() - needed)
        if unknown:
            raise OptionError(f"[probe] expected arrays for {sorted(needed)}; found also {unknown[0]!r}")
        feeds: dict[str, Any] = {}
        if needed - inputs.keys():
            if ids is None:
                raise OptionError(f"[probe] expected arrays for {sorted(needed)}; found {sorted(inputs)}")
            feeds = Decoder(session).feeds(ids)
        arrays = {name: onnxruntime.OrtValue.ortvalue_from_numpy(a) for name, a in inputs.items()}
        start = {"kv_past_length": onnxruntime.OrtValue.ortvalue_from_numpy(np.array([0]))}
        return feeds | arrays | start

    def _capture(self, layers: Sequence[str]) -> list[Attention]:
        values = {}
        for layer in layers:
            for name, value in zip(OPERANDS, self._nodes[layer].inputs, strict=False):
                if value is not None and name != "slots":
                    values[f"kvfuse.probe.{layer}.{name}"] = value
        session = self._rewritten.open(dict.fromkeys(self._nodes, EXACT), values)
        arrays = [v.numpy() for v in session.run_with_ort_values(list(values), self._feeds)]
        named = dict(zip(values, arrays, strict=True))
        return [
            Attention(
                attributes_of(self._nodes[layer]),
                {
                    name: named[f"kvfuse.probe.{layer}.{name}"]
                    for name in OPERANDS
                    if f"kvfuse.probe.{layer}.{name}" in named
                },
            )
            for layer in layers
        ]

    def _logits(self, session: InferenceSession, phase: str) -> NDArray[np.float32] | None:
        """Logits [N, V] of the scored positions; None where the model has none."""
        names = {value.name: value for value in session.get_outputs()}
        if "logits" not in names or len(names["logits"].shape or ()) != 3:
            return None
        if self._probe.inputs is not None:
            logits = session.run_with_ort_values(["logits"], self._feeds)[0].numpy()
            rows = logits[:, self._choose(logits.shape[-1])]
            return np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]), np.float32)
        ids = self._probe.token_ids
        assert ids is not None
        decoder, kept = Decoder(session), []
        for start in range(0, len(ids), _CHUNK):
            logits = decoder.step(ids[start : start + _CHUNK])
            wanted = self._choose(logits.shape[-1]) - start
            kept.append(np.asarray(logits[wanted[(wanted >= 0) & (wanted < len(logits))]], np.float32))
            self._report(phase, decoder.length, len(ids))
        return np.concatenate(kept)

    def _choose(self, vocabulary: int) -> NDArray[np.int64]:
        """The scored positions [N]: spread over the second half, each with a next token."""
        if not self._positions.size:
            count = min(self.tokens - 1 - self.tokens // 2, max(64, _LOGIT_BYTES // (4 * vocabulary)))
            self._positions = np.unique(
                np.linspace(self.tokens // 2, self.tokens - 2, count).astype(np.int64)
            )
        return self._positions

    def _loss(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """Negative log likelihood [N] of the next tokens; zeros where the probe has no token ids."""
        ids = self._probe.token_ids
        if ids is None and self._probe.inputs is not None and "input_ids" in self._probe.inputs:
            ids = self._probe.inputs["input_ids"]
        if ids is None:
            return np.zeros(len(logits))
        targets = np.atleast_2d(ids)[:, self._positions + 1].reshape(-1)
        loss = np.zeros(len(logits))
        for row, (values, target) in enumerate(zip(logits, targets, strict=True)):
            wide = values.astype(np.float64)
            loss[row] = wide.max() + np.log(np.exp(wide - wide.max()).sum()) - wide[target]
        return loss


def _rows(
    first: NDArray[np.float32], second: NDArray[np.float32]
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Pieces of both as float64, few rows at once."""
    for start in range(0, len(first), 32):
        rows = slice(start, start + 32)
        yield first[rows].astype(np.float64), second[rows].astype(np.float64)
