"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from kvfuse.library import native

PACKAGES = ("kvfuse", "onnxruntime", "openvino", "numpy")


def describe() -> dict[str, Any]:
    """Processor, kernel, cache sizes in bytes, load, and versions, as JSON holds them."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "kernel": native().kernel_name(),
        "l2_bytes": _cache_bytes(2),
        "l3_bytes": _cache_bytes(3),
        "load": os.getloadavg()[0],
        "versions": versions,
    }


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    lines = _lines("/proc/meminfo")
    found = next((line for line in lines if line.startswith("MemAvailable")), None)
    return int(found.split()[1]) * 1024 if found else 8 << 30


def _processor() -> str:
    line = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ":")
    return line.split(":", 1)[1].strip() or platform.processor() or platform.machine()


def _cache_bytes(level: int) -> int:
    """Size of one core's cache of a level, 0 where it is not known."""
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (folder / "level").read_text().strip() == str(level):
            return int((folder / "size").read_text().strip().rstrip("K")) * 1024
    return 0


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []
