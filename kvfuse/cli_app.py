"""What all commands of `kvfuse` share: the application, its exit codes, and how results are printed."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

from kvfuse.errors import KVFuseError, RefusedError

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = (
    "Exit codes: 0 all is well; 1 a check failed (a site was refused and --require-all was given, diff found "
    "a difference, verify a mismatch, doctor a problem); 2 bad input or usage."
)
FAILED, BAD_INPUT = 1, 2


class _Group(typer.core.TyperGroup):
    """Reports expected errors as one sentence on stderr; only a bug in kvfuse shows a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `kvfuse inspect … | head`: the command line framework ends quietly
            raise
        except RefusedError as error:
            fail(error, FAILED)
        except (KVFuseError, OSError) as error:
            fail(error, BAD_INPUT)
        except Exception as error:
            if not type(error).__module__.startswith("onnxruntime"):
                raise
            fail(error, BAD_INPUT)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Rewrites the KV caches of ONNX decoders into low-bit caches inside one stateful onnxruntime op.",
    epilog=EPILOG,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"kvfuse {version('kvfuse')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def fail(error: Exception, code: int) -> NoReturn:
    """Ends the command with one sentence on stderr."""
    typer.echo(f"kvfuse: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(code) from error


def console() -> Console:
    """Where tables and text go."""
    from rich.console import Console

    # What goes to a file or a pipe has no window to fit: leave room for long node names.
    return Console(width=None if sys.stdout.isatty() else 160)


def show(result: Any, as_json: bool) -> None:
    """Prints a result that has `to_dict` and `render`."""
    if as_json:
        show_json(result.to_dict())
    else:
        result.render(console())


def show_json(value: dict[str, Any]) -> None:
    """Prints one JSON object."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))
