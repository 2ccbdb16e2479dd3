"""Token sequences: the state of one conversation through all layers of a rewritten model."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from types import ModuleType, TracebackType

from kvfuse.errors import SequenceError
from kvfuse.library import native


@contextlib.contextmanager
def _sequence_errors() -> Iterator[None]:
    """Turns the compiled module's ValueError, which already carries the sentence, into a SequenceError."""
    try:
        yield
    except ValueError as error:
        raise SequenceError(str(error)) from error


class SequenceView:
    """Looks at a sequence that somebody else owns, such as the sequences of an `InferenceSession`.

    Every member raises SequenceError once the sequence is gone.
    """

    def __init__(self, sequence_id: int) -> None:
        self._native: ModuleType = native()
        self._id = sequence_id

    @property
    def id(self) -> int:
        """The handle: what goes into the input `kv_sequence`, as int64 [1] or one per batch row [B]."""
        return self._id

    def __len__(self) -> int:
        """Counts the tokens that every layer has stored."""
        with _sequence_errors():
            return int(self._native.sequence_length(self._id))

    def __bool__(self) -> bool:
        """Is always true: an empty sequence is still a sequence."""
        return True

    def truncate(self, length: int) -> None:
        """Forgets every token from position `length` on.

        Raises:
            SequenceError: `length` is negative or beyond the stored tokens, or the sequence is running.
        """
        with _sequence_errors():
            self._native.truncate_sequence(self._id, length)

    @property
    def nbytes(self) -> int:
        """The bytes held by all layers together."""
        return sum(self.nbytes_by_layer().values())

    def nbytes_by_layer(self) -> dict[str, int]:
        """Returns the bytes held by each layer, under the layer keys of the rewritten graph."""
        with _sequence_errors():
            return dict(self._native.sequence_nbytes(self._id))

    def key_error(self) -> dict[str, float]:
        """The error that low-bit keys make in each layer's attention output, from a look at the first ones.

        It is relative to the output, with the values exact: 0.01 is very good, 0.1 is where 8-bit keys begin
        to pay, above 0.25 the layer is known to fail (and the run has warned). Layers that were not looked at
        are missing: their first low-bit tokens are still to come, their guard is off, or the state was
        unfrozen.
        """
        with _sequence_errors():
            errors = self._native.sequence_key_errors(self._id)
        return {layer: error for layer, error in errors.items() if not math.isnan(error)}

    @property
    def exact_begin(self) -> int:
        """The first position whose exact floats are still held by every layer.

        Truncating to this length or more leaves nothing behind that a run without the dropped tokens would
        not have had; below it, tokens that have already turned low-bit stay so.
        """
        with _sequence_errors():
            return int(self._native.sequence_exact_begin(self._id))

    def reset(self) -> None:
        """Forgets every token; the sequence may then serve another model."""
        self.truncate(0)

    def fork(self) -> KvSequence:
        """Returns a second sequence with the same tokens.

        The two share their pages until one of them writes to one, so the cost is O(pages), not O(tokens).
        During a run the copy is of what the sequence held before it.
        """
        with _sequence_errors():
            return KvSequence._adopt(int(self._native.fork_sequence(self._id)))

    def freeze(self) -> bytes:
        """Returns the state as a safetensors container with a checksum, independent of kernel and machine."""
        with _sequence_errors():
            return bytes(self._native.freeze_sequence(self._id))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `freeze()` to a file, which is replaced in one step or left as it was.

        Raises:
            SequenceError: the sequence is gone, or the file cannot be written.
        """
        with _sequence_errors():
            self._native.save_sequence(self._id, os.fspath(path))

    def set_limits(self, max_tokens: int | None = None, max_bytes: int | None = None) -> None:
        """Limits what the sequence may hold; a run that would pass a limit raises SequenceError.

        Args:
            max_tokens: tokens; None for no limit.
            max_bytes: bytes of pages over all layers; None for no limit.
        """
        with _sequence_errors():
            limits = _limit("max_tokens", max_tokens), _limit("max_bytes", max_bytes)
            self._native.set_sequence_limits(self._id, *limits)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self._id})"


class KvSequence(SequenceView):
    """Owns one token sequence; works with any session of any rewritten model, one model per sequence.

    ```python
    with kvfuse.KvSequence() as sequence:
        session.run(None, {"input_ids": ids, "kv_sequence": np.array([sequence.id])})
    ```

    Its memory is freed by `close()`, at the end of a `with` block, or with the object.
    """

    def __init__(self) -> None:
        self._own(int(native().create_sequence()))

    def _own(self, sequence_id: int) -> None:
        super().__init__(sequence_id)
        self._destroy = weakref.finalize(self, self._native.destroy_sequence, sequence_id)

    @classmethod
    def _adopt(cls, sequence_id: int) -> KvSequence:
        """Takes over a sequence that the library has made."""
        sequence = cls.__new__(cls)
        sequence._own(sequence_id)
        return sequence

    @classmethod
    def unfreeze(cls, data: bytes) -> KvSequence:
        """Returns a new sequence with a state that `freeze` gave.

        The bytes are not trusted: all of them are checked before anything is made. Whether they fit a model
        is checked by the first run with it.

        Raises:
            SequenceError: the bytes are damaged or no state; the sentence names the field.
        """
        with _sequence_errors():
            return cls._adopt(int(native().unfreeze_sequence(data)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KvSequence:
        """Returns a new sequence with a state that `save` wrote.

        Raises:
            SequenceError: the file cannot be read, or its bytes are no state.
        """
        with _sequence_errors():
            return cls._adopt(int(native().load_sequence(os.fspath(path))))

    def close(self) -> None:
        """Frees the sequence; closing twice is harmless.

        Raises:
            SequenceError: the sequence cannot be freed now.
        """
        with _sequence_errors():
            self._destroy()

    def __enter__(self) -> KvSequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reorder(sequences: Sequence[KvSequence], index: Sequence[int]) -> list[KvSequence]:
    """Selects and copies sequences in one step, as beam search does after each token.

    Args:
        sequences: different sequences.
        index: for each wanted sequence, the position in `sequences` that it goes on from.

    Returns:
        One sequence for each of `index`. The first use of a sequence is that very object, later uses are
        forks; sequences without a use are closed.

    Raises:
        SequenceError: a sequence is gone or given twice, or an index is out of range; nothing has changed.
    """
    by_id = {sequence.id: sequence for sequence in sequences}
    with _sequence_errors():
        ids = native().reorder_sequences([sequence.id for sequence in sequences], [int(i) for i in index])
    result = [by_id[i] if i in by_id else KvSequence._adopt(i) for i in ids]
    for sequence in sequences:
        if sequence.id not in ids:
            sequence._destroy.detach()  # the library has destroyed it
    return result


def set_memory_limit(max_bytes: int | None) -> None:
    """Limits the bytes of all caches in this process; None lifts the limit.

    A run that would pass it raises SequenceError, and its sequences are as before.
    """
    native().set_process_limit(_limit("max_bytes", max_bytes))


def memory_in_use() -> int:
    """Returns the bytes of all caches in this process, pages shared by forks once."""
    return int(native().process_nbytes())


def _limit(name: str, value: int | None) -> int:
    """The library's number for a limit: -1 for none."""
    if value is not None and value < 0:
        raise SequenceError(f"[{name}] expected a limit of 0 or more, or None; found {value}")
    return -1 if value is None else value
