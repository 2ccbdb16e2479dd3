"""The commands that read and write graphs: rewrite, unfuse, inspect, diff."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfuse.cli_app import EPILOG, FAILED, AsJson, app, console, show
from kvfuse.errors import OptionError, RefusedError
from kvfuse.formats import describe_presets

if TYPE_CHECKING:
    from kvfuse.generate import Tokenizer


@app.command(epilog=EPILOG)
def rewrite(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The model to rewrite.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT", help="Where to write.")
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="PRESET",
            help=f"Named cache format, or auto: chosen layer by layer. {describe_presets()}. "
            "Bytes are those of one token of one kv head of 64 channels, bits those of one element.",
        ),
    ] = "default",
    target: Annotated[
        str | None, typer.Option(help="auto: allowed increase of perplexity, such as 1% or 0.01.")
    ] = None,
    probe: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="auto: choose by a run on this text (or text file, .npy of token ids, .npz of inputs).",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="auto: a tokenizer.json for the text; by default the one beside the model."),
    ] = None,
    key_bits: Annotated[int | None, typer.Option(help="Bits of a stored key element: 4, 8 or 16.")] = None,
    value_bits: Annotated[
        int | None, typer.Option(help="Bits of a stored value element: 4, 8 or 16.")
    ] = None,
    codes: Annotated[str | None, typer.Option(help="4-bit codes: symmetric or full.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Channels per scale: 0 (all), 32 or 64.")] = None,
    rotation: Annotated[str | None, typer.Option(help="hadamard or none.")] = None,
    n_recent: Annotated[int | None, typer.Option(help="Newest tokens used in exact floats.")] = None,
    block: Annotated[int | None, typer.Option(help="Tokens that turn low-bit together.")] = None,
    n_sink: Annotated[int | None, typer.Option(help="First tokens kept exact for ever.")] = None,
    key_center: Annotated[str | None, typer.Option(help="none or block.")] = None,
    guard: Annotated[
        str, typer.Option(help="warn: a running model names layers whose keys are too coarse; off.")
    ] = "warn",
    require_all: Annotated[bool, typer.Option("--require-all", help="Fail if any site is refused.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report only, write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing OUT.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite a model so that its caches live inside kvfuse's op.

    Options override the preset, one by one.
    """
    if output is None and not dry_run:
        raise OptionError("[output] expected -o OUT, or --dry-run; found neither")
    if output is not None and not dry_run:
        _require_free(output, force)
    from kvfuse.pipeline import rewrite as run_rewrite
    from kvfuse.progress import Progress

    named = {
        "key_bits": key_bits,
        "value_bits": value_bits,
        "codes": codes,
        "group_size": group_size,
        "rotation": rotation,
        "n_recent": n_recent,
        "block": block,
        "n_sink": n_sink,
        "key_center": key_center,
    }
    overrides = {name: value for name, value in named.items() if value is not None}
    try:
        with Progress(hidden=as_json) as progress:
            report = run_rewrite(
                source,
                output,
                format=preset,
                target=None if target is None else _share(target),
                probe=probe,
                tokenizer=_tokenizer(source, probe, tokenizer),
                guard=guard,
                require_all=require_all,
                dry_run=dry_run,
                progress=progress.update,
                **overrides,
            )
    except RefusedError as error:
        if error.report is not None:
            show(error.report, as_json)
        raise
    show(report, as_json)


def _share(text: str) -> float:
    """`1%` or `0.01` as a number."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        return float(number) / (100 if percent else 1)
    except ValueError as error:
        raise OptionError(f"[target] expected a share such as 1% or 0.01; found {text!r}") from error


def _tokenizer(source: Path, probe: str | None, tokenizer: Path | None) -> Tokenizer | None:
    """What a probe that is text needs; arrays need none."""
    if probe is None or Path(probe[:255]).suffix in (".npy", ".npz"):
        return None
    from kvfuse.generate import find_tokenizer

    return find_tokenizer(source, tokenizer)


def _require_free(output: Path, force: bool) -> None:
    if output.exists() and not force:
        raise OptionError(f"[output] expected a path that is free, or --force; found {output}")


@app.command(epilog=EPILOG)
def unfuse(
    source: Annotated[Path, typer.Argument(metavar="REWRITTEN", help="A model that kvfuse rewrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Where to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing OUT.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give a rewritten model its original inputs and outputs back, with float caches and plain ONNX ops."""
    _require_free(output, force)
    from kvfuse.restore import unfuse as run_unfuse

    show(run_unfuse(source, output), as_json)


@app.command(epilog=EPILOG)
def inspect(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The model to look at.")],
    as_json: AsJson = False,
) -> None:
    """Show the cache sites of a model, what a rewrite would do to each, and the cache bytes per token."""
    from kvfuse.pipeline import inspect as run_inspect

    show(run_inspect(source), as_json)


@app.command(epilog=EPILOG)
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A model, say the original.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another, say the rewritten one.")],
    golden: Annotated[
        Path | None,
        typer.Option("--golden", metavar="FILE", help="Pass when the difference is the one in FILE."),
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Write the golden FILE.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is different between two models.

    The order of nodes and the names of inner values say nothing; what changes alike is shown once.
    """
    if update and golden is None:
        raise OptionError("[update] expected --golden FILE with --update; found none")
    from kvfuse.golden import check_golden
    from kvfuse.graph_diff import diff as run_diff

    found = run_diff(first, second)
    if golden is not None:
        check = check_golden(found, golden, update=update)
        show(check, as_json)
        passed = check.passed
    else:
        if not (as_json or found.equal):
            console().print(f"--- {first}\n+++ {second}", markup=False, highlight=False, soft_wrap=True)
        show(found, as_json)
        passed = found.equal
    if not passed:
        raise typer.Exit(FAILED)
