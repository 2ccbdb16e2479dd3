"""The command that measures quality: evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvfuse.cli_app import EPILOG, AsJson, app, show
from kvfuse.cli_runs import TokenizerPath


@app.command(epilog=EPILOG)
def evaluate(
    original: Annotated[Path, typer.Argument(metavar="ORIGINAL", help="The model before rewriting.")],
    rewritten: Annotated[
        list[Path], typer.Argument(metavar="REWRITTEN...", help="One or more models after rewriting.")
    ],
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="UTF-8 text; by default Python's language reference."),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    windows: Annotated[int, typer.Option(help="Windows of the text to score.")] = 1,
    prompts: Annotated[int, typer.Option(help="Prompts to continue greedily.")] = 4,
    greedy: Annotated[int, typer.Option(help="Greedy tokens after each prompt; 0 = none.")] = 32,
    needles: Annotated[int, typer.Option(help="Hidden sentences to find again, 0 to 8.")] = 5,
    layer_tokens: Annotated[
        int, typer.Option(help="Tokens for the errors by layer; 0 leaves the layers out.")
    ] = 512,
    tokenizer: TokenizerPath = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw a picture; needs matplotlib.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a rewritten model's cache format costs, on a text read through the cache.

    Perplexity, KL divergence and top-1 agreement with the original at every token, the first difference of
    greedy text, needles at several depths, the error of each layer's attention (keys, values, both), and
    bytes. The original's logits are kept in a temporary file: 4 bytes x context x vocabulary a window.
    """
    from kvfuse.evaluate import evaluate as run_evaluate
    from kvfuse.evaluate_plan import make_plan
    from kvfuse.evaluate_plot import plot as draw
    from kvfuse.evaluate_text import read_text
    from kvfuse.generate import find_tokenizer
    from kvfuse.progress import Progress

    loaded = find_tokenizer(original, tokenizer)
    depths = [(index + 0.5) / needles for index in range(needles)]
    plan = make_plan(
        read_text(text),
        loaded,
        context=context,
        windows=windows,
        prompts=prompts,
        greedy=greedy,
        depths=depths,
        layer_tokens=layer_tokens,
    )
    with Progress(hidden=as_json) as progress:
        found = run_evaluate(original, rewritten, plan, tokenizer=loaded, progress=progress.update)
    show(found, as_json)
    if plot is not None:
        draw(found, plot)
