"""Steps token streams through a decoder, whether its caches are graph I/O or live inside kvfuse's op.

Dims: B batch size (1 but for `step_rows`), S new tokens, P past tokens, V vocabulary size.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from kvfuse.errors import ModelError, SequenceError
from kvfuse.sequence import SequenceView
from kvfuse.session import PAST_LENGTH_INPUT, SEQUENCE_INPUT, InferenceSession

METADATA_KEY = "kvfuse"

# Longer prompts are fed in pieces: the logits of one run are S x V floats.
PREFILL_CHUNK = 512

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}
_CACHE_PREFIX = re.compile(r"^(?:input\.|output\.)?(?:past_key_values|present_key_values|past|present)[._]?")
_LENGTH_WORDS = re.compile(r"past|seq|len|total")


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place in a decoder's token stream: the tokens so far, and the caches that are graph inputs."""

    length: int
    start: int | None
    pasts: Mapping[str, Any]


class Decoder:
    """A decoder with its running token count.

    Args:
        session: the loaded model.
        caches: past input name -> present output name where known; the rest is paired by name, then by order.

    Raises:
        ModelError: an input is none that a decoder of token ids has.
    """

    def __init__(self, session: InferenceSession, caches: Mapping[str, str] | None = None) -> None:
        self.session = session
        self.length = 0
        self._start: int | None = 0  # where the next run starts anew; None: it goes on
        self._inputs = {value.name: value for value in session.get_inputs()}
        self._resettable = PAST_LENGTH_INPUT in {v.name for v in session.get_overridable_initializers()}
        outputs = [value.name for value in session.get_outputs()]
        self._caches = pair_caches(list(self._inputs), outputs, caches or {})
        kept = [name for name in outputs if name not in self._caches.values()]
        self._logits = "logits" if "logits" in kept else next(iter(kept), "")
        self._presents = list(self._caches.values())
        self._pasts: Mapping[str, Any] = {}
        unknown = sorted(self._inputs.keys() - self._caches.keys() - _PLAIN_INPUTS.keys())
        if unknown or "input_ids" not in self._inputs or not self._logits:
            found = (
                f"input {unknown[0]!r}" if unknown else f"inputs {sorted(self._inputs)} and outputs {outputs}"
            )
            raise ModelError(
                f"[decoder] expected inputs {sorted(_PLAIN_INPUTS)}, caches and logits; found {found}"
            )
        self.reset()

    @property
    def vocabulary_size(self) -> int | None:
        """V where the graph declares it."""
        shape = next(v.shape for v in self.session.get_outputs() if v.name == self._logits)
        return shape[-1] if shape and isinstance(shape[-1], int) else None

    def reset(self) -> None:
        """Forgets all tokens."""
        self.length, self._start = 0, 0
        self._pasts = {name: self._empty_past(name) for name in self._caches}

    def rewind(self, length: int) -> None:
        """Forgets the tokens from `length` on; the next step goes on from there.

        Raises:
            ModelError: the model keeps caches as graph inputs.
            SequenceError: `length` is negative or beyond the tokens so far.
        """
        if self._caches or not self._resettable:
            raise ModelError(
                "[decoder] expected a model whose caches are all inside kvfuse's op; found others"
            )
        if not 0 <= length <= self.length:
            raise SequenceError(f"[rewind] expected a length from 0 to {self.length}; found {length}")
        self.length = self._start = length

    def mark(self) -> Mark:
        """Remembers where the decoder is, for `back_to`."""
        return Mark(self.length, self._start, self._pasts)

    def back_to(self, mark: Mark) -> None:
        """Forgets the tokens since `mark`; the next step goes on from there.

        For caches inside kvfuse's op this is a rollback: it leaves no trace within the slack that the exact
        window keeps.
        """
        self.length, self._pasts = mark.length, mark.pasts
        self._start = mark.length if self._resettable else mark.start

    def step(self, token_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.floating[Any]]:
        """Runs the model on S >= 1 new tokens and returns their logits [S, V], or [1, V]: the last's."""
        return self.observe(token_ids, ())[0]

    def observe(
        self, token_ids: Sequence[int] | NDArray[np.int64], names: Sequence[str]
    ) -> tuple[NDArray[np.floating[Any]], list[NDArray[Any]]]:
        """Does what `step` does, and returns the graph outputs `names` beside the logits."""
        # The caches stay OrtValues: the model's own copies are its affair, ours would be added to its time.
        logits, *others = self.session.run_with_ort_values(
            [self._logits, *self._presents, *names], self.feeds(token_ids)
        )
        presents = others[: len(self._presents)]
        self._pasts = dict(zip(self._caches, presents, strict=True))
        self._start = None
        self.length += len(token_ids)
        array: NDArray[Any] = logits.numpy()
        return array.reshape(-1, array.shape[-1]), [value.numpy() for value in others[len(presents) :]]

    def feeds(self, token_ids: Sequence[int] | NDArray[np.int64]) -> dict[str, Any]:
        """What `step` would feed for these tokens, as OrtValues by input name."""
        ids = np.asarray(token_ids, np.int64)[np.newaxis]  # 1 S
        feeds = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(self._plain_input(name, ids, self.length))
            for name in self._inputs
            if name not in self._caches
        }
        if self._resettable and self._start is not None:
            feeds[PAST_LENGTH_INPUT] = onnxruntime.OrtValue.ortvalue_from_numpy(np.array([self._start]))
        return {**feeds, **self._pasts}

    def step_rows(
        self, token_ids: NDArray[np.int64], sequences: Sequence[SequenceView], past: int
    ) -> NDArray[np.floating[Any]]:
        """Runs one batch whose rows live in sequences of their own; the decoder's token count is not touched.

        Args:
            token_ids: [B, S], S >= 1.
            sequences: one per row, each holding `past` tokens.
            past: tokens before these.

        Returns:
            The last token's logits [B, V].

        Raises:
            ModelError: the model keeps caches as graph inputs.
        """
        if self._caches or not self._resettable:
            raise ModelError(
                "[decoder] expected a model whose caches are all inside kvfuse's op; found others"
            )
        feeds = {name: self._plain_input(name, token_ids, past) for name in self._inputs}
        feeds[SEQUENCE_INPUT] = np.array([sequence.id for sequence in sequences], np.int64)
        (logits,) = self.session.run([self._logits], feeds)
        last: NDArray[Any] = logits.reshape(token_ids.shape[0], -1, logits.shape[-1])[:, -1]
        return last

    def prefill(self, token_ids: Sequence[int]) -> NDArray[np.floating[Any]]:
        """Runs the model on a prompt, in pieces when it is long, and returns the last token's logits [V]."""
        for chunk in chunks(token_ids):
            logits = self.step(chunk)
        last: NDArray[np.floating[Any]] = logits[-1]
        return last

    def plain_input(self, name: str, token_ids: NDArray[np.int64]) -> NDArray[Any]:
        """What `step` would feed to the input `name`, which is no cache, with these tokens."""
        return self._plain_input(name, token_ids[np.newaxis], self.length)

    def _plain_input(self, name: str, ids: NDArray[np.int64], past: int) -> NDArray[Any]:
        value = self._inputs[name]
        array = _PLAIN_INPUTS[name](ids, past)
        if array.ndim == 2 and array.shape[0] != ids.shape[0]:
            array = np.repeat(array, ids.shape[0], axis=0)
        rank = len(value.shape or ())
        if rank < array.ndim and array.size == array.shape[-1]:
            array = array.reshape(array.shape[-1:] if rank else ())
        elif rank > array.ndim:  # some models give position_ids a leading axis of rotary sections
            lead = [dim if isinstance(dim, int) else 1 for dim in value.shape[: rank - array.ndim]]
            array = np.broadcast_to(array, (*lead, *array.shape))
        return np.ascontiguousarray(array, dtype=_dtype(value))

    def _empty_past(self, name: str) -> Any:
        value = self._inputs[name]
        batch = (self._inputs["input_ids"].shape or [None])[0]
        shape: list[int] = []
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, int) or (isinstance(dim, str) and dim.isdigit()):
                shape.append(int(dim))
            elif dim is not None and (dim == batch or "batch" in dim):
                shape.append(1)
            elif dim is None or _LENGTH_WORDS.search(dim) or 0 not in shape:
                shape.append(0)
            else:
                raise ModelError(
                    f"[{name}] expected one growing axis; found axis {axis} of unknown size {dim!r}"
                )
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, _dtype(value)))


# What an input of this name holds for new tokens `ids` [1, S] after P = `past` tokens.
_PLAIN_INPUTS: dict[str, Callable[[NDArray[np.int64], int], NDArray[Any]]] = {
    "input_ids": lambda ids, past: ids,
    "attention_mask": lambda ids, past: np.ones((1, past + ids.shape[1]), np.int64),
    "position_ids": lambda ids, past: np.arange(past, past + ids.shape[1], dtype=np.int64)[np.newaxis],
    "cache_position": lambda ids, past: np.arange(past, past + ids.shape[1], dtype=np.int64),
    "past_sequence_length": lambda ids, past: np.array([past], np.int64),
    "use_cache_branch": lambda ids, past: np.array([past > 0]),
}


def open_decoder(
    path: str | Path, caches: Mapping[str, str] | None = None, device: str | None = None
) -> Decoder:
    """Loads a decoder, original or rewritten, with the caches of a rewritten one on `device`.

    Raises:
        OptionError: the device is unknown.
        DeviceError: the device does not run here.
        ModelError: the file cannot be loaded, or is no decoder of token ids.
    """
    if not Path(path).is_file():
        raise ModelError(f"[{path}] expected a model file; found none")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # whatever goes wrong is raised, once
    try:
        session = InferenceSession(str(path), options, device=device)
    except Exception as error:  # onnxruntime's exceptions have no common base
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        first_line = str(error).strip().splitlines()[0]
        raise ModelError(f"[{path}] expected a model that onnxruntime loads; found: {first_line}") from error
    return Decoder(session, caches)


def cache_names(path: str | Path) -> dict[str, str]:
    """Reads original past input -> present output name of every cache that a rewritten model took in.

    Looks at the model's metadata only, no external weights are read.

    Raises:
        ModelError: the file is missing or no ONNX model.
    """
    text = _metadata(path).get(METADATA_KEY)
    pairs: dict[str, str] = {}
    for cache in json.loads(text)["caches"] if text else ():
        for side in ("key", "value"):
            if cache.get(f"past_{side}") and cache.get(f"present_{side}"):
                pairs[cache[f"past_{side}"]] = cache[f"present_{side}"]
    return pairs


def _metadata(path: str | Path) -> dict[str, str]:
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ModelError(f"[{path}] expected an ONNX model; found: {error}") from error
    return {entry.key: entry.value for entry in model.metadata_props}


def pair_caches(inputs: Sequence[str], outputs: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """Pairs cache inputs with cache outputs: as `known` says, else by name, else by order."""
    pairs = {past: present for past, present in known.items() if past in inputs and present in outputs}
    free = [name for name in inputs if name not in pairs and name not in _PLAIN_INPUTS]
    left = [name for name in outputs if name not in pairs.values() and name != "logits"]
    by_stem = {_CACHE_PREFIX.sub("", name): name for name in left if _CACHE_PREFIX.match(name)}
    for past in free:
        present = by_stem.get(_CACHE_PREFIX.sub("", past)) if _CACHE_PREFIX.match(past) else None
        if present is not None:
            pairs[past] = present
    free = [name for name in free if name not in pairs]
    left = [name for name in left if name not in pairs.values()]
    if free and len(free) == len(left):
        pairs.update(zip(free, left, strict=True))
    return pairs


def chunks(token_ids: Sequence[int]) -> list[Sequence[int]]:
    """Cuts a prompt into pieces of at most PREFILL_CHUNK tokens.

    Raises:
        ModelError: the prompt is empty.
    """
    if not len(token_ids):
        raise ModelError("[prompt] expected at least one token; found none")
    return [token_ids[start : start + PREFILL_CHUNK] for start in range(0, len(token_ids), PREFILL_CHUNK)]


def _dtype(value: Any) -> type[np.generic]:
    if value.type not in _DTYPES:
        raise ModelError(f"[{value.name}] expected one of {sorted(_DTYPES)}; found {value.type}")
    return _DTYPES[value.type]
