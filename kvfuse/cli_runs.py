"""The commands that run models: verify, generate, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfuse.cli_app import EPILOG, FAILED, AsJson, app, show, show_json
from kvfuse.errors import OptionError

if TYPE_CHECKING:
    from kvfuse.generate import Generation, Tokenizer

TokenizerPath = Annotated[
    Path | None, typer.Option("--tokenizer", help="A tokenizer.json; by default the one beside the model.")
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="Where the caches live: cpu (the default), metal, cuda or emulated."),
]


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
    device: DeviceName = None,
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
            device=device,
            progress=progress.update,
        )
    show(result, as_json)
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
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, token by token."""
    from kvfuse.decoder import open_decoder
    from kvfuse.generate import Generation, find_eos_ids, find_tokenizer

    loaded = None if token_ids else find_tokenizer(model, tokenizer)
    ids = _parse_ids(prompt) if loaded is None else loaded.encode(prompt)
    eos_ids = find_eos_ids(model, loaded)
    run = Generation(open_decoder(model, device=device), ids, max_new_tokens, temperature, seed, eos_ids)
    if as_json:
        made = list(run)
        show_json(_generation_dict(run, None if loaded is None else loaded.decode(made)))
    else:
        _stream(run, prompt, loaded)


@app.command(epilog=EPILOG)
def doctor(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Run the kernels of every device; print one line for each.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check this installation: versions, the compiled library, its kernels, and a self-test against NumPy."""
    from kvfuse.doctor import diagnose, diagnose_devices

    diagnosis = diagnose_devices() if selftest else diagnose()
    show(diagnosis, as_json)
    if diagnosis.problems:
        raise typer.Exit(FAILED)


state = typer.Typer(no_args_is_help=True, help="Look at saved sequences.", epilog=EPILOG)
app.add_typer(state, name="state")


@state.callback()
def _state() -> None:
    pass  # keeps `show` a command of its own


@state.command("show", epilog=EPILOG)
def state_show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What KvSequence.save wrote.")],
    as_json: AsJson = False,
) -> None:
    """Check a saved sequence and show what is inside."""
    from kvfuse.state import read_state

    show(read_state(file), as_json)


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
