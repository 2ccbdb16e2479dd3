"""Finds the compiled library and registers it with onnxruntime.

Sequences live in a table inside `libkvfuse_ops`. Python reaches it through `kvfuse._native`, which links to
the library beside it, so onnxruntime must be handed that very file: a copy elsewhere would be a second
library with a table of its own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kvfuse.errors import LibraryError

if TYPE_CHECKING:
    import onnxruntime

_SUFFIXES = {"darwin": ".dylib", "win32": ".dll"}
_HINT = "kvfuse was installed without its compiled part, reinstall it with a C++ compiler at hand"

# One lock for each SessionOptions that has the library, dropped with the options: onnxruntime takes a second
# registration without a word and then refuses to create any session from them.
_registered: weakref.WeakKeyDictionary[object, threading.Lock] = weakref.WeakKeyDictionary()
_registered_guard = threading.Lock()


def library_path() -> str:
    """Returns the absolute path of the shared library that holds the kvfuse ops.

    Any onnxruntime binding can load it (`SessionOptions.register_custom_ops_library` in Python).

    Raises:
        LibraryError: the library was not built.
    """
    name = "libkvfuse_ops" + _SUFFIXES.get(sys.platform, ".so")
    spec = importlib.util.find_spec("kvfuse._native")
    if spec is None or spec.origin is None:
        raise LibraryError(f"[library] expected the compiled module kvfuse._native; found none ({_HINT})")
    path = Path(spec.origin).resolve().with_name(name)
    if not path.is_file():
        raise LibraryError(f"[library] expected {name} beside kvfuse._native; found none at {path} ({_HINT})")
    return str(path)


@functools.cache
def native() -> ModuleType:
    """Returns the compiled module `kvfuse._native`.

    Raises:
        LibraryError: the module was not built or cannot be loaded here.
    """
    folder = Path(library_path()).parent
    if sys.platform == "win32":
        os.add_dll_directory(str(folder))
    try:
        return importlib.import_module("kvfuse._native")
    except ImportError as error:
        raise LibraryError(
            f"[library] expected a loadable kvfuse._native in {folder}; found: {error}"
        ) from error


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Registers the kvfuse ops with `session_options`; doing so again for the same object is harmless.

    Raises:
        LibraryError: the library was not built, or onnxruntime does not accept it.
    """
    registration_lock(session_options)


def registration_lock(session_options: onnxruntime.SessionOptions, provided: bool = False) -> threading.Lock:
    """Registers the ops with `session_options` once and returns the lock that guards the object's entries.

    Args:
        session_options: onnxruntime's.
        provided: the options have kvfuse's execution provider, which brings the ops.

    Raises:
        LibraryError: the library was not built, or onnxruntime does not accept it.
    """
    with _registered_guard:
        lock = _registered.get(session_options)
        if lock is None:
            path = library_path()
            try:
                if not provided:
                    session_options.register_custom_ops_library(path)
            except Exception as error:  # onnxruntime's exceptions have no common base
                raise LibraryError(
                    f"[library] expected onnxruntime to load {path}; found: {error}"
                ) from error
            lock = _registered[session_options] = threading.Lock()
        return lock
