"""The command `kvfuse`: parses, calls, prints; decides nothing.

Everything heavy is imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

# Importing a group of commands adds it to the application, in the order in which `--help` lists them.
from kvfuse import cli_models, cli_runs, cli_evaluate  # isort: skip
from kvfuse.cli_app import app

__all__ = ["app", "cli_evaluate", "cli_models", "cli_runs", "main"]


def main() -> None:
    """Runs the command line; the entry point of the `kvfuse` script."""
    app()
