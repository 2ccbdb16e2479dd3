"""The command `kvfuse`: parses, calls, prints; decides nothing.

Everything heavy is imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

from kvfuse.errors import KVFuseError, OptionError, RefusedError

if TYPE_CHECKING:
    from rich.console import Console

    from kvfuse.generate import Generation, Tokenizer

EPILOG = (
    "Exit codes: 0 all is well; 1 a check failed (a site was refused and --require-all was given, verify "
    "found a mismatch, doctor found a problem); 2 bad input or usage."
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
            _fail(error, FAILED)
        except (KVFuseError, OSError) as error:
            _fail(error, BAD_INPUT)
        except Exception as error:
            if not type(error).__module__.startswith("onnxruntime"):
                raise
            _fail(error, BAD_INPUT)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Rewrites the KV caches of ONNX decoders into low-bit caches inside one stateful onnxruntime op.",
    epilog=EPILOG,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
TokenizerPath = Annotated[
    Path | None, typer.Option("--tokenizer", help="A tokenizer.json; by default the one beside the model.")
]


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


@app.command(epilog=EPILOG)
def rewrite(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The model to rewrite.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT", help="Where to write.")
    ] = None,
    preset: Annotated[
        str, typer.Option("--format", metavar="PRESET", help="Named cache format.")
    ] = "default",
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
    if output is not None and output.exists() and not (force or dry_run):
        raise OptionError(f"[output] expected a path that is free, or --force; found {output}")
    from kvfuse.pipeline import rewrite as run_rewrite

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
    report = run_rewrite(source, output, format=preset, require_all=require_all, dry_run=dry_run, **overrides)
    _print(report, as_json)


@app.command(epilog=EPILOG)
def inspect(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The model to look at.")],
    as_json: AsJson = False,
) -> None:
    """Show the cache sites of a model, what a rewrite would do to each, and the cache bytes per token."""
    from kvfuse.pipeline import inspect as run_inspect

    _print(run_inspect(source), as_json)


@app.command(epilog=EPILOG)
def verify(
    original: Annotated[Path, typer.Argument(metavar="IN", help="The model before rewriting.")],
    rewritten: Annotated[Path, typer.Argument(metavar="OUT", help="The model after rewriting.")],
    tokens: Annotated[int, typer.Option(help="Greedy tokens to compare.")] = 32,
    prompt_length: Annotated[int, typer.Option(help="Tokens of a random prompt.")] = 64,
    text: Annotated[str | None, typer.Option(help="Use this prompt; needs a tokenizer.")] = None,
    tokenizer: TokenizerPath = None,
    seed: Annotated[int, typer.Option(help="Seed of the random prompt.")] = 0,
    max_error: Annotated[float | None, typer.Option(help="Largest allowed logit error.")] = None,
    max_mean_kl: Annotated[float | None, typer.Option(help="Largest allowed mean KL, in nats.")] = None,
    min_top1: Annotated[float | None, typer.Option(help="Smallest allowed top-1 agreement, 0 to 1.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the same tokens through a model before and after rewriting and compare the logits.

    Passes when the greedy tokens are identical; or, with any of --max-error, --max-mean-kl and --min-top1,
    when those given hold.
    """
    from kvfuse.generate import find_tokenizer
    from kvfuse.progress import Progress
    from kvfuse.verify import Limits
    from kvfuse.verify import verify as run_verify

    loaded = find_tokenizer(original, tokenizer) if text is not None or tokenizer is not None else None
    with Progress(hidden=as_json) as progress:
        result = run_verify(
            original,
            rewritten,
            text=text,
            tokenizer=loaded,
            prompt_length=prompt_length,
            tokens=tokens,
            seed=seed,
            limits=Limits(max_error, max_mean_kl, min_top1),
            progress=progress.update,
        )
    _print(result, as_json)
    if not result.passed:
        raise typer.Exit(FAILED)


@app.command(epilog=EPILOG)
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A decoder, original or rewritten.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    tokenizer: TokenizerPath = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to make at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above, tokens are sampled.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="PROMPT is token ids, such as '1 2 3'; no tokenizer is used.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, token by token."""
    from kvfuse.decoder import open_decoder
    from kvfuse.generate import Generation, find_eos_ids, find_tokenizer

    loaded = None if token_ids else find_tokenizer(model, tokenizer)
    ids = _parse_ids(prompt) if loaded is None else loaded.encode(prompt)
    eos_ids = find_eos_ids(model, loaded)
    run = Generation(open_decoder(model), ids, max_new_tokens, temperature, seed, eos_ids)
    if as_json:
        made = list(run)
        _print_json(_generation_dict(run, None if loaded is None else loaded.decode(made)))
    else:
        _stream(run, prompt, loaded)


@app.command(epilog=EPILOG)
def doctor(as_json: AsJson = False) -> None:
    """Check this installation: versions, the compiled library, its kernels, and a self-test against NumPy."""
    from kvfuse.doctor import diagnose

    diagnosis = diagnose()
    _print(diagnosis, as_json)
    if diagnosis.problems:
        raise typer.Exit(FAILED)


def main() -> None:
    """Runs the command line; the entry point of the `kvfuse` script."""
    app()


def _fail(error: Exception, code: int) -> NoReturn:
    typer.echo(f"kvfuse: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(code) from error


def _console() -> Console:
    from rich.console import Console

    # What goes to a file or a pipe has no window to fit: leave room for long node names.
    return Console(width=None if sys.stdout.isatty() else 160)


def _print(result: Any, as_json: bool) -> None:
    if as_json:
        _print_json(result.to_dict())
    else:
        result.render(_console())


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise OptionError(f"[prompt] expected token ids such as '1 2 3'; found {text!r}") from error


def _generation_dict(run: Generation, text: str | None) -> dict[str, Any]:
    return {
        "prompt_ids": list(run.prompt_ids),
        "token_ids": run.token_ids,
        "text": text,
        "finish_reason": run.finish_reason,
        "prefill_seconds": run.prefill_seconds,
        "decode_seconds": run.decode_seconds,
        "tokens_per_second": run.tokens_per_second,
    }


def _stream(run: Generation, prompt: str, tokenizer: Tokenizer | None) -> None:
    from kvfuse.generate import stream_text

    pieces = (f" {token}" for token in run) if tokenizer is None else stream_text(tokenizer, iter(run))
    typer.echo(prompt, nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
    if run.tokens_per_second:
        typer.echo(f"{len(run.token_ids)} tokens, {run.tokens_per_second:.1f} tokens/s", err=True)
