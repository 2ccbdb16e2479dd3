"""A progress bar for commands that take a while."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import TaskID


class Progress:
    """Shows one bar for each phase on stderr, on a terminal only, and leaves nothing behind."""

    def __init__(self, hidden: bool = False) -> None:
        console = Console(stderr=True)
        self._bars = Bars(console=console, disable=hidden or not console.is_terminal, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def update(self, phase: str, done: int, total: int) -> None:
        """Says that `done` of `total` steps of `phase` are made."""
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total)
        self._bars.update(self._tasks[phase], completed=done)

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
