"""Token sequences: the state of one conversation through all layers of a rewritten model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
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

    @property
    def exact_begin(self) -> int:
        """The first position whose exact floats are still held by every layer.

        Truncating to this length or more leaves nothing behind that a run without the dropped tokens would
        not have had; below it, tokens that have already turned low-bit stay so.
        """
        with _sequence_errors():
            return int(self._native.sequence_exact_begin(self._id))

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
        module = native()
        super().__init__(int(module.create_sequence()))
        self._destroy = weakref.finalize(self, module.destroy_sequence, self._id)

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
