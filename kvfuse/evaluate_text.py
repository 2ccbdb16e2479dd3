"""What an evaluation reads: text cut into windows, needles hidden in it, prompts to go on from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from kvfuse.errors import OptionError
from kvfuse.generate import Tokenizer

DEFAULT_TEXT = "Python's language reference (pydoc_data.topics of the running Python, PSF licence)"
_NEEDLES = (
    ("Osaka", "48213"),
    ("Lima", "90657"),
    ("Nairobi", "31984"),
    ("Quebec", "75026"),
    ("Zurich", "62840"),
    ("Dakar", "17395"),
    ("Hanoi", "84061"),
    ("Perth", "29578"),
)
_LONGEST = 16  # characters that one token is taken to stand for at most, to cut long texts before encoding


@dataclasses.dataclass(frozen=True)
class Needle:
    """A sentence to be remembered: at `depth` (0 to 1) of a text; the answer continues the question."""

    depth: float
    sentence: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


def read_text(path: Path | None = None) -> str:
    """Returns a file's text; without a file the long topics of Python's language reference.

    Raises:
        OptionError: the file is missing or no UTF-8 text.
    """
    if path is None:
        from pydoc_data.topics import topics

        chapters = [topics[name].strip() for name in sorted(topics) if len(topics[name]) > 3000]
        # Tables and rulers are runs of spaces and dashes, which any model predicts.
        return re.sub(r"\n{3,}", "\n\n", re.sub(r"[-=~*]{4,}|(?<= ) +", "", "\n\n".join(chapters)))
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"[text] expected a UTF-8 text file at {path}; found: {error}") from error


def cut_windows(text: str, tokenizer: Tokenizer, context: int, windows: int) -> list[list[int]]:
    """Cuts a text into windows of `context` tokens each, one after another.

    Every window starts with the tokens that the tokenizer puts before any text.

    Raises:
        OptionError: a size is out of range, or the text is too short.
    """
    if context < 2 or windows < 1:
        raise OptionError(
            f"[evaluate] expected a context of 2 or more and 1 window or more; found {context} and {windows}"
        )
    start = tokenizer.encode("")
    fresh = context - len(start)
    ids = tokenizer.encode(text[: fresh * windows * _LONGEST])[len(start) :]
    if fresh < 1 or len(ids) < fresh * windows:
        raise OptionError(
            f"[text] expected at least {fresh * windows} tokens for {windows} windows of {context}; "
            f"found {len(ids)}"
        )
    return [start + ids[fresh * index : fresh * (index + 1)] for index in range(windows)]


def make_needles(tokenizer: Tokenizer, depths: Sequence[float]) -> list[Needle]:
    """Makes one needle for each depth, no two alike.

    Raises:
        OptionError: a depth is not between 0 and 1, or there are more depths than needles.
    """
    if len(depths) > len(_NEEDLES) or not all(0 <= depth <= 1 for depth in depths):
        raise OptionError(
            f"[depths] expected up to {len(_NEEDLES)} numbers from 0 to 1; found {list(depths)}"
        )
    start = len(tokenizer.encode(""))

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text)[start:])

    needles = []
    for depth, (name, number) in zip(depths, _NEEDLES, strict=False):
        known = f" The secret number of {name} is"
        question = encode(f"\n\nQuestion: what is the secret number of {name}?\n\nAnswer:{known}")
        # The answer's tokens are those that follow the question when both are read as one text.
        whole = encode(f"\n\nQuestion: what is the secret number of {name}?\n\nAnswer:{known} {number}.")
        shared = next(
            (i for i, (a, b) in enumerate(zip(question, whole, strict=False)) if a != b), len(question)
        )
        needles.append(Needle(depth, encode(f"{known} {number}."), whole[:shared], whole[shared:]))
    return needles


def hide(needles: Sequence[Needle], window: Sequence[int], context: int) -> list[int]:
    """Returns the first tokens of `window` with every needle's sentence at its depth.

    With the longest question and answer after them they make `context` tokens.

    Raises:
        OptionError: the needles leave no room for the text, or the window is shorter than that.
    """
    asked = max((len(needle.question) + len(needle.answer) for needle in needles), default=0)
    room = context - asked - sum(len(needle.sentence) for needle in needles)
    if not 0 < room <= len(window):
        raise OptionError(
            f"[needles] expected room for 1 to {len(window)} tokens of text in {context}; found {room}"
        )
    text: list[int] = []
    done = 0
    for needle in sorted(needles, key=lambda one: one.depth):
        place = max(done, min(room, max(1, round(needle.depth * room))))
        text += [*window[done:place], *needle.sentence]
        done = place
    return text + list(window[done:room])
