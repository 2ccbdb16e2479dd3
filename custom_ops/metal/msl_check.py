"""Words of a Metal program: those that every writer spells anew, and those that the shims do not know."""

from __future__ import annotations

import re

from msl_tokens import Token
from msl_words import ATOMICS, BUILTINS, FORBIDDEN, KEYWORDS, SCALARS, SWIZZLES, VECTORS

_FLOAT = re.compile(r"(\d[\d']*\.[\d']*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+")
_HALF = re.compile(r"(?!0x)(.*)[hH]")


def common_words(code: list[Token]) -> None:
    """Literals without a suffix are float in Metal; swizzles become calls."""
    for i, token in enumerate(code):
        if token.kind == "number":
            half = _HALF.fullmatch(token.text)
            if _FLOAT.fullmatch(token.text):
                token.out = token.text + "f"
            elif half:
                value = half.group(1)
                token.out = f"half({value if '.' in value or 'e' in value else value + '.0'}f)"
        elif token.text in SWIZZLES and i and code[i - 1].text == "." and code[i + 1].text != "(":
            if code[i + 1].text == "=" and code[i + 2].text != "=":
                token.fail("a swizzle that is read, not written")
            token.out = token.text + "()"


def check_words(code: list[Token], declared: set[str]) -> None:
    """Refuses calls of what neither the program nor the shims have, and C++ that Metal lacks."""
    known = BUILTINS | SCALARS | VECTORS | ATOMICS | KEYWORDS | declared
    for i, token in enumerate(code):
        following = code[i + 1].text if i + 1 < len(code) else ""
        before = code[i - 1] if i else None
        if token.text == "[" and token.out and following in ("&", "=", "]"):
            subscript = before and (before.kind == "name" or before.text in "])>")
            if not subscript:
                token.fail("no lambda")
        if token.kind != "name" or not token.out:
            continue
        if token.text in FORBIDDEN:
            token.fail("a word of the Metal Shading Language that the shims know")
        declares = before and before.kind == "name" and before.text not in KEYWORDS | {"kernel"}
        if following == "(" and token.text not in known and not declares:
            token.fail("a function of this program or a Metal builtin that the shims know")
