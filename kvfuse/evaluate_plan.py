"""What an evaluation asks of both models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvfuse.errors import OptionError
from kvfuse.evaluate_text import Needle, cut_windows, hide, make_needles
from kvfuse.generate import Tokenizer


@dataclasses.dataclass(frozen=True)
class Plan:
    """What both models are asked.

    Attributes:
        windows: Token ids to score, each window a text of its own.
        prompts: Prompts that are continued greedily by `greedy` tokens.
        haystack: Token ids with the needles inside.
        layer_tokens: How many tokens of the first window the layers are measured on; 0 = not at all.
    """

    windows: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...] = ()
    greedy: int = 0
    haystack: tuple[int, ...] = ()
    needles: tuple[Needle, ...] = ()
    layer_tokens: int = 0


def make_plan(
    text: str,
    tokenizer: Tokenizer,
    *,
    context: int = 1024,
    windows: int = 1,
    prompts: int = 4,
    greedy: int = 32,
    depths: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
    needle_context: int | None = None,
    layer_tokens: int = 512,
) -> Plan:
    """Turns a text into tokens to score, prompts to continue and a haystack.

    Args:
        text: long enough for `windows` windows of `context` tokens.
        tokenizer: of both models.
        context: tokens of a window.
        windows: how many, one after another.
        prompts: how many pieces of the first window are continued; each is half of it and at most 256
            tokens long.
        greedy: by how many tokens.
        depths: where the needles lie, 0 = at the start; empty for none.
        needle_context: tokens of the haystack; by default `context`.
        layer_tokens: at most this many tokens of the first window are used for the layers.

    Raises:
        OptionError: a size is out of range, or the text is too short.
    """
    if min(prompts, greedy, layer_tokens) < 0:
        raise OptionError(
            "[evaluate] expected prompts, greedy and layer tokens of 0 or more; "
            f"found {prompts}, {greedy} and {layer_tokens}"
        )
    cut = cut_windows(text, tokenizer, context, windows)
    length = max(1, min(256, context // 2))
    starts = [round(index * (context - length) / max(1, prompts - 1)) for index in range(prompts)]
    needles = make_needles(tokenizer, depths)
    haystack = hide(needles, cut[0], needle_context or context) if needles else []
    return Plan(
        windows=tuple(map(tuple, cut)),
        prompts=tuple(tuple(cut[0][start : start + length]) for start in starts) if greedy else (),
        greedy=greedy,
        haystack=tuple(haystack),
        needles=tuple(needles),
        layer_tokens=min(layer_tokens, context),
    )
