"""The exceptions kvfuse raises; every message is one sentence: `[where] expected …; found …`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfuse.report import RewriteReport


class KVFuseError(Exception):
    """Base of every error that kvfuse raises on purpose."""


class ModelError(KVFuseError):
    """The model file cannot be read, is not a valid ONNX model, or cannot be written."""


class RefusedError(KVFuseError):
    """`require_all` was asked for and at least one cache site was refused; no output was written.

    Args:
        message: The sentence.
        report: What was found and refused; the `report` attribute.
    """

    def __init__(self, message: str, report: RewriteReport | None = None) -> None:
        super().__init__(message)
        self.report = report


class OptionError(KVFuseError):
    """An option value is unknown or out of range."""


class LibraryError(KVFuseError):
    """The compiled library cannot be found, loaded or registered."""


class SequenceError(KVFuseError):
    """A sequence handle is unknown, in use, or cannot do what was asked."""


class DeviceError(KVFuseError):
    """A device cannot be used on this machine."""


class PrecisionWarning(UserWarning):
    """A layer's cache format is known to be too coarse for its keys; the sentence names the one to use."""
