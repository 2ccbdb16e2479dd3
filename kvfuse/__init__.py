"""kvfuse: low-bit KV caches inside one stateful onnxruntime op.

Everything here is loaded on first use, so that `import kvfuse` costs nothing and `kvfuse --help` stays quick:
neither onnxruntime nor onnx nor numpy is imported until one of the names below is touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfuse.errors import (
        DeviceError,
        KVFuseError,
        LibraryError,
        ModelError,
        OptionError,
        PrecisionWarning,
        RefusedError,
        SequenceError,
    )
    from kvfuse.graph_diff import diff
    from kvfuse.library import library_path, register
    from kvfuse.pipeline import inspect, rewrite
    from kvfuse.provider import DeviceInfo, devices
    from kvfuse.report import RewriteReport
    from kvfuse.restore import unfuse
    from kvfuse.sequence import KvSequence, memory_in_use, reorder, set_memory_limit
    from kvfuse.session import InferenceSession

    __version__: str

# public name -> the module that defines it
_HOMES = {
    "DeviceError": "kvfuse.errors",
    "DeviceInfo": "kvfuse.provider",
    "InferenceSession": "kvfuse.session",
    "KVFuseError": "kvfuse.errors",
    "KvSequence": "kvfuse.sequence",
    "LibraryError": "kvfuse.errors",
    "ModelError": "kvfuse.errors",
    "OptionError": "kvfuse.errors",
    "PrecisionWarning": "kvfuse.errors",
    "RefusedError": "kvfuse.errors",
    "RewriteReport": "kvfuse.report",
    "SequenceError": "kvfuse.errors",
    "devices": "kvfuse.provider",
    "diff": "kvfuse.graph_diff",
    "inspect": "kvfuse.pipeline",
    "library_path": "kvfuse.library",
    "memory_in_use": "kvfuse.sequence",
    "register": "kvfuse.library",
    "reorder": "kvfuse.sequence",
    "rewrite": "kvfuse.pipeline",
    "set_memory_limit": "kvfuse.sequence",
    "unfuse": "kvfuse.restore",
}

__all__ = [
    "DeviceError",
    "DeviceInfo",
    "InferenceSession",
    "KVFuseError",
    "KvSequence",
    "LibraryError",
    "ModelError",
    "OptionError",
    "PrecisionWarning",
    "RefusedError",
    "RewriteReport",
    "SequenceError",
    "__version__",
    "devices",
    "diff",
    "inspect",
    "library_path",
    "memory_in_use",
    "register",
    "reorder",
    "rewrite",
    "set_memory_limit",
    "unfuse",
]


def __getattr__(name: str) -> object:
    """Loads a public name on first use (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("kvfuse")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'kvfuse' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Names the public surface and nothing else."""
    return list(__all__)
