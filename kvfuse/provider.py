"""The devices that rewritten models run on, and onnxruntime's execution provider for those that are no CPU.

The provider lives in the same library as the ops. It takes the QuantizedKvSdpa nodes of a graph and leaves
the rest to the other providers of the session.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfuse.errors import DeviceError, LibraryError, OptionError
from kvfuse.library import library_path, native, registration_lock

if TYPE_CHECKING:
    import onnxruntime

PROVIDER = "KvfuseExecutionProvider"
CPU = "cpu"
GPUS = ("metal", "cuda")
VARIANTS = ("scalar", "simd")

_registration = threading.Lock()
# What add_device has added to which options: a second provider of one name is refused in other words.
_chosen: weakref.WeakKeyDictionary[object, dict[str, str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class DeviceInfo:
    """A value of `device=`: whether it runs here and, where it does not, one sentence why."""

    name: str
    usable: bool
    reason: str | None = None


def devices() -> list[DeviceInfo]:
    """Lists every device that kvfuse knows, the CPU first.

    Raises:
        LibraryError: the compiled library is missing.
    """
    others = [DeviceInfo(name, not reason, reason or None) for name, reason in native().device_choices()]
    return [DeviceInfo(CPU, True), *others]


def require_device(name: str, variant: str | None = None) -> None:
    """Checks a device and, where one is named, a variant of its kernels.

    Raises:
        OptionError: a word is unknown, or the CPU was given a variant.
        DeviceError: the device does not run here.
        LibraryError: the compiled library is missing.
    """
    known = {device.name: device for device in devices()}
    if name not in known:
        raise OptionError(f"[device] expected one of {sorted(known)}; found {name!r}")
    if variant is not None and (variant not in VARIANTS or name == CPU):
        allowed = f"none for the {CPU}" if name == CPU else f"one of {list(VARIANTS)}"
        raise OptionError(f"[variant] expected {allowed}; found {variant!r}")
    if not known[name].usable:
        raise DeviceError(
            f"[device] expected a device that is usable here; found {name}: {known[name].reason}"
        )


def add_device(options: onnxruntime.SessionOptions, name: str, variant: str | None = None) -> None:
    """Adds the execution provider for one device to `options`; nothing for the CPU.

    Raises:
        OptionError: a word is unknown, or `options` cannot take a device.
        DeviceError: the device does not run here.
        LibraryError: the compiled library is missing, or onnxruntime does not accept it.
    """
    require_device(name, variant)
    if name == CPU:
        return
    chosen = {"device": name} | ({} if variant is None else {"variant": variant})
    if options in _chosen and _chosen[options] != chosen:
        raise OptionError(
            f"[device] expected new SessionOptions for {chosen}; found some that have {_chosen[options]}"
        )
    if options not in _chosen:
        options.add_provider_for_devices([_ep_device()], chosen)
        registration_lock(options, provided=True)
        _chosen[options] = chosen


def _ep_device() -> Any:
    """Registers the library as a provider once in this process and returns its onnxruntime device."""
    import onnxruntime

    with _registration:
        found = _find(onnxruntime)
        if found is None:
            try:
                onnxruntime.register_execution_provider_library(PROVIDER, library_path())
            except Exception as error:  # onnxruntime's exceptions have no common base
                raise LibraryError(
                    f"[library] expected onnxruntime to take {library_path()} as an execution provider; "
                    f"found: {error}"
                ) from error
            found = _find(onnxruntime)
        if found is None:
            raise DeviceError(
                "[device] expected onnxruntime to show a GPU or CPU device of this machine; found none"
            )
        return found


def _find(onnxruntime: Any) -> Any:
    # A library registered as "….virtual" shows a device as well, which would emulate by default: any serves,
    # since the device is always named.
    return next((d for d in onnxruntime.get_ep_devices() if d.ep_name == PROVIDER), None)
