"""`InferenceSession`: onnxruntime's own, with the kvfuse ops registered and its sequences at hand."""

from __future__ import annotations

import contextlib
import re
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime

from kvfuse.errors import LibraryError, ModelError, OptionError, PrecisionWarning, SequenceError
from kvfuse.library import library_path, native, registration_lock
from kvfuse.provider import add_device
from kvfuse.sequence import SequenceView

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfuse.past import PastIO

SESSION_KEY = "kvfuse.session"
SEQUENCE_INPUT = "kv_sequence"
PAST_LENGTH_INPUT = "kv_past_length"

# How onnxruntime wraps the sentence of a failing kernel; ours starts with `[where]`, which tells it from
# onnxruntime's own words about the same node.
_KERNEL_ERROR = re.compile(
    r"while running (?:KvCacheBegin|QuantizedKvSdpa) node\..*?Status Message:\s*(\[.*)", re.DOTALL
)


@contextlib.contextmanager
def kernel_errors(token: str | None = None) -> Iterator[None]:
    """Raises SequenceError for what a kvfuse kernel refused; lets every other error pass untouched.

    What the guards of the session with that token found is passed on as PrecisionWarning.
    """
    try:
        yield
    except Exception as error:  # onnxruntime's exceptions have no common base
        found = _KERNEL_ERROR.search(str(error))
        if found is None:
            raise
        raise SequenceError(found.group(1).strip()) from error
    for sentence in () if token is None else native().take_warnings(token):
        warnings.warn(sentence, PrecisionWarning, stacklevel=4)  # at the line that called `run`


@contextlib.contextmanager
def _duplicate_library() -> Iterator[None]:
    """Explains onnxruntime's refusal of options that had a kvfuse library before ours."""
    try:
        yield
    except Exception as error:  # onnxruntime's exceptions have no common base
        if "Domain already set in registry" not in str(error):
            raise
        raise LibraryError(
            "[library] expected SessionOptions without a kvfuse library; found one registered by path, "
            "perhaps a copy (leave the registration to kvfuse.register or InferenceSession, on new options)"
        ) from error


def _quiet_options() -> onnxruntime.SessionOptions:
    # onnxruntime would warn at each load that kv_sequence and kv_past_length can be overridden: they should.
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return options


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]  # onnxruntime is untyped
    """Drop-in for `onnxruntime.InferenceSession` that can run rewritten models.

    Takes the same arguments and runs any other model as well. Without `providers` the CPU provider is used,
    unless `sess_options` already name devices; without `sess_options` onnxruntime's warnings are off. A
    rewritten model keeps its caches in the session's own sequences, one per batch row, unless `kv_sequence`
    is fed. Running raises SequenceError where a kvfuse op refuses the call; the sequences are then as before.

    Args:
        path_or_bytes: the model.
        sess_options: onnxruntime's; a device is added to these, so give each session with one its own.
        providers: onnxruntime's; not together with a device, since onnxruntime would ignore the latter.
        provider_options: onnxruntime's.
        device: "cpu" (the default), or what keeps the caches and attends: "metal", "cuda" or "emulated".
            Everything else in the graph stays with the session's other providers.
        variant: the kernels of a device, "scalar" or "simd"; None takes the device's default.
        **kwargs: onnxruntime's.

    Raises:
        LibraryError: the compiled library is missing, or the model was bound to another copy of it.
        OptionError: the device or variant is unknown, or given together with providers.
        DeviceError: the device does not run here.
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | Path,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        device: str | None = None,
        variant: str | None = None,
        **kwargs: Any,
    ) -> None:
        options = _quiet_options() if sess_options is None else sess_options
        if variant is not None and device is None:
            raise OptionError(f"[variant] expected a device beside a variant; found {variant!r} alone")
        if device is not None:
            if providers is not None:
                raise OptionError(
                    "[device] expected no providers beside a device (add others to sess_options, with "
                    f"add_provider); found {list(providers)}"
                )
            add_device(options, device, variant)
            kwargs.setdefault("enable_fallback", 0)  # a device that fails is an error, not another device
        if providers is None and not options.has_providers():
            providers = ["CPUExecutionProvider"]
        self._options = options
        self._model = path_or_bytes
        self._past: PastIO | None = None
        with self._fresh_token(), _duplicate_library():
            super().__init__(path_or_bytes, options, providers, provider_options, **kwargs)
        self._check_binding()

    @contextlib.contextmanager
    def _fresh_token(self) -> Iterator[None]:
        """Names the session that is created inside, also when its options object serves several sessions."""
        with registration_lock(self._options):
            self._token = uuid.uuid4().hex
            self._options.add_session_config_entry(SESSION_KEY, self._token)
            yield

    def _check_binding(self) -> None:
        names = [value.name for value in self.get_overridable_initializers()]
        self._stateful = SEQUENCE_INPUT in names
        if self._stateful and native().default_sequences(self._token) is None:
            raise LibraryError(
                "[library] expected the model's ops to share the library of kvfuse._native; found that "
                f"{library_path()} is a second copy with sequences of its own"
            )

    def set_providers(
        self,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        """Re-creates the underlying session for other providers; its sequences start again."""
        with self._fresh_token():
            super().set_providers(providers, provider_options)
        self._check_binding()

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> Any:
        """Runs the model as onnxruntime does; a refusal by a kvfuse op raises SequenceError."""
        with kernel_errors(self._token):
            return super().run(output_names, input_feed, run_options)

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, Any],
        run_options: Any = None,
    ) -> Any:
        """Runs the model on OrtValues as onnxruntime does; raises SequenceError as `run` does."""
        with kernel_errors(self._token):
            return super().run_with_ort_values(output_names, input_dict_ort_values, run_options)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """Runs the model on bound buffers as onnxruntime does; raises SequenceError as `run` does."""
        with kernel_errors(self._token):
            super().run_with_iobinding(iobinding, run_options)

    @property
    def sequences(self) -> list[SequenceView]:
        """The session's own sequences, one per batch row run so far; empty for a model without kvfuse ops."""
        ids = native().default_sequences(self._token) if self._stateful else None
        return [SequenceView(sequence_id) for sequence_id in ids or ()]

    @property
    def past_length(self) -> int:
        """The tokens stored in the session's own sequences, 0 before the first run.

        Raises:
            SequenceError: the rows hold different numbers of tokens; `.sequences` tells them apart.
        """
        lengths = [len(sequence) for sequence in self.sequences]
        while lengths and lengths[-1] == 0:  # left over from a larger batch, before a reset
            lengths.pop()
        if len(set(lengths)) > 1:
            raise SequenceError(f"[past_length] expected rows of one length; found {lengths}")
        return lengths[0] if lengths else 0

    def import_past(self, past: Mapping[str, NDArray[Any]]) -> None:
        """Fills the session's own sequences with float caches, as a decoder with past inputs would be fed.

        Args:
            past: original past input name -> array in that input's layout, one for each cache that the
                rewriting took in; f32 or f16, [B, ...] with one length for all rows.

        Raises:
            SequenceError: a cache is missing, unknown or of another shape; the sequences are as before.
            ModelError: the model was not rewritten by kvfuse.
        """
        caches = self._past_io()
        batch = caches.batch_size(past)
        handles = native().default_sequences(self._token, batch)
        caches.load(past, handles[:batch])
        for handle in handles[batch:]:
            native().truncate_sequence(handle, 0)

    def export_past(self) -> dict[str, NDArray[Any]]:
        """Reads the session's own sequences as the original graph's past inputs.

        Returns:
            original past input name -> array in its own layout and dtype. Tokens in the exact windows are as
            they went in, the others what their codes stand for; those that a sliding window has freed are
            zeros.

        Raises:
            SequenceError: the rows hold different numbers of tokens.
            ModelError: the model was not rewritten by kvfuse.
        """
        caches, length = self._past_io(), self.past_length
        handles = [sequence.id for sequence in self.sequences if len(sequence)]
        if not handles:
            raise SequenceError("[export_past] expected sequences that have run; found none")
        return caches.save(handles, length)

    def _past_io(self) -> PastIO:
        from kvfuse.past import PastIO  # reads the model with the onnx package, which running does not need

        if not self._stateful:
            raise ModelError("[past] expected a model that kvfuse has rewritten; found none of its ops")
        if self._past is None:
            self._past = PastIO(self._model)
        return self._past

    def reset(self) -> None:
        """Empties the session's own sequences, so that the next run starts a new conversation."""
        for sequence in self.sequences:
            sequence.truncate(0)
