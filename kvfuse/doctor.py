"""What `kvfuse doctor` tells: versions, the compiled library, its kernels, and whether they compute right."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass, field
from typing import Any

from kvfuse.errors import LibraryError
from kvfuse.library import library_path, native
from kvfuse.provider import devices

_PACKAGES = ("kvfuse", "onnxruntime", "onnx", "onnx-ir", "onnxscript", "numpy", "tokenizers")


@dataclass
class Diagnosis:
    """The state of this installation; healthy when `problems` is empty."""

    python: str = field(default_factory=platform.python_version)
    platform: str = field(default_factory=platform.platform)
    packages: dict[str, str | None] = field(default_factory=dict)
    library: str | None = None
    ort_api: int | None = None
    kernel: str | None = None
    kernels: list[dict[str, str | bool]] = field(default_factory=list)
    devices: list[dict[str, str | bool | None]] = field(default_factory=list)
    selftest: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns what `kvfuse doctor --json` prints."""
        return vars(self) | {"healthy": not self.problems}

    def render(self, console: Any) -> None:
        """Prints tables on a `rich.console.Console`."""
        from rich.markup import escape
        from rich.table import Table

        facts = Table(show_header=False, box=None)
        facts.add_column(no_wrap=True)
        facts.add_column(overflow="fold")
        facts.add_row("python", f"{self.python} on {self.platform}")
        for name, version in self.packages.items():
            facts.add_row(name, version or "not installed")
        facts.add_row("library", escape(self.library or "not built"))
        facts.add_row("onnxruntime API", str(self.ort_api or "unknown"))
        for kernel in self.kernels:
            chosen = "in use" if kernel["name"] == self.kernel else "available"
            state = chosen if kernel["available"] else f"not available: {escape(str(kernel['reason']))}"
            facts.add_row(f"kernel {kernel['name']}", state)
        for device in self.devices:
            state = "available" if device["usable"] else f"not available: {escape(str(device['reason']))}"
            facts.add_row(f"device {device['name']}", state)
        if self.kernel not in (None, "reference"):
            sizes = "multiples of 8 (8-bit sides: of 4) are fast; others take about 30 times as long"
            facts.add_row("head sizes", sizes)
        for case in self.selftest:
            verdict = "passed" if case["passed"] else "FAILED"
            error, tolerance = f"{case['max_abs_error']:.2g}", f"{case['tolerance']:.0e}"
            facts.add_row(f"self-test, {case['name']}", f"{verdict} (error {error}, allowed {tolerance})")
        console.print(facts)
        for problem in self.problems:
            console.print(f"problem: {problem}", style="red", markup=False, highlight=False)
        if not self.problems:
            console.print("healthy", style="green")


def diagnose() -> Diagnosis:
    """Looks at everything; what is wrong goes into `problems`, nothing is raised."""
    found = Diagnosis(packages={name: _version(name) for name in _PACKAGES})
    try:
        found.library = library_path()
        module = native()
    except LibraryError as error:
        found.problems.append(str(error))
        return found
    found.kernels = [
        {"name": name, "available": not reason, "reason": reason} for name, reason in module.kernels()
    ]
    try:
        found.kernel = module.kernel_name()
    except ValueError as error:  # KVFUSE_KERNEL names none that runs here
        found.problems.append(str(error))
        return found
    found.devices = [vars(device) for device in devices()]
    _selftest(found)
    found.ort_api = module.ort_api_version() or None  # known once a session has loaded the library
    return found


@dataclass
class DeviceDiagnosis:
    """Whether the kernels of each device compute right; healthy when `problems` is empty."""

    devices: list[dict[str, str | bool | None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns what `kvfuse doctor --selftest --json` prints."""
        return vars(self) | {"healthy": not self.problems}

    def render(self, console: Any) -> None:
        """Prints one line per device on a `rich.console.Console`."""
        for device in self.devices:
            verdict = "ok" if device["passed"] else f"FAILED: {device['reason']}"
            if not device["usable"]:
                verdict = f"not available: {device['reason']}"
            console.print(f"{device['name']}: {verdict}", markup=False, highlight=False, soft_wrap=True)
        for problem in self.problems[sum(device["passed"] is False for device in self.devices) :]:
            console.print(f"problem: {problem}", style="red", markup=False, highlight=False)


def diagnose_devices() -> DeviceDiagnosis:
    """Runs the self-test on every usable device; what is wrong goes into `problems`, nothing is raised."""
    found = DeviceDiagnosis()
    try:
        known = devices()
    except LibraryError as error:
        found.problems.append(str(error))
        return found
    from kvfuse.device_selftest import check_device

    for device in known:
        verdict: dict[str, str | bool | None] = vars(device) | {"passed": None}
        if device.usable:
            try:
                reason = check_device(device.name)
            except Exception as error:  # a diagnosis reports whatever broke
                reason = f"could not run: {str(error).strip()}"
            verdict |= {"passed": reason is None, "reason": reason}
            if reason is not None:
                found.problems.append(f"[self-test, {device.name}] {reason}")
        found.devices.append(verdict)
    return found


def _selftest(found: Diagnosis) -> None:
    from kvfuse.selftest import run_selftest

    try:
        results = run_selftest()
    except Exception as error:  # a diagnosis reports whatever broke
        found.problems.append(f"the self-test could not run: {str(error).strip()}")
        return
    for case in results:
        verdict = {"name": case.name, "passed": case.passed}
        found.selftest.append(verdict | {"max_abs_error": case.max_abs_error, "tolerance": case.tolerance})
        if not case.passed:
            allowed = f"{case.tolerance:.0e}; found {case.max_abs_error:.2g}"
            found.problems.append(f"[self-test, {case.name}] expected an error of at most {allowed}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
