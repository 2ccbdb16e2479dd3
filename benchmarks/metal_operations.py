"""Counts what a function of a Metal text does: the operations of one lane, read off the source.

No compiler: operators, calls and subscripts are counted as they are written, loops as often as they run, and
of branches the one that is taken. What a compiler would share between two expressions is counted twice, so
this is an upper bound.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"0[xX][0-9a-fA-F]+u?|\d+\.?\d*(?:[eE][-+]?\d+)?[fuh]?|[A-Za-z_]\w*|<<=?|>>=?|[-+*/&|^<>=!]=|&&|\|\||->|\S"
)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
SPACE = r"(?:device|constant|threadgroup|thread)\s+(?:const\s+)?\w+\s*[*&]"
MULTIPLY, ADD = {"*", "*="}, {"+", "-", "+=", "-="}
BITS = {"&", "|", "^", "<<", ">>", "&=", "|=", "^=", "<<=", ">>="}
COMPARE = {"<", ">", "<=", ">=", "==", "!=", "&&", "||", "?", "!"}
WIDTH = re.compile(r"(?:float|half|int|uint|short|ushort|char|uchar)([234])$")
# Calls that cost what is said, of what is said; those of zero only give bits another name.
CALLS = {
    "fma": ("multiply-add", 1),
    "exp": ("special", 1),
    "tanh": ("special", 1),
    "simd_shuffle_xor": ("shuffle", 1),
    "as_type": ("free", 0),
    "fabs": ("free", 0),
    "isfinite": ("compare", 1),
    "min": ("compare", 1),
    "max": ("compare", 1),
    "popcount": ("bits", 1),
}
CONVERSIONS = {"float", "int", "uint", "short", "ushort", "long", "half"}
# Arrays that a lane keeps in registers once loops over them are unrolled.
REGISTERS = {
    "a",
    "b",
    "begin",
    "dots",
    "end",
    "exact_from",
    "first",
    "maximum",
    "row",
    "scores",
    "second",
    "sum",
    "sums",
}
UNROLLED = {"i", "u", "q", "n", "g", "index"}  # known when the loop is unrolled or the call inlined
FREE = {
    "threadgroup_barrier",
    "simdgroup_barrier",
    "float2",
    "float4",
    "uint4",
    "sizeof",
    "if",
    "for",
    "while",
    "return",
}


@dataclass
class Text:
    """The functions of a Metal text: parameters and body as tokens; overloads by the order they stand in."""

    functions: dict[str, list[list[str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, source: str) -> Text:
        """Reads `source`; macros of the form `#define NAME(q) …` and `#define NAME …` are put in place."""
        source = COMMENT.sub(" ", source)
        macros = re.findall(r"^#define (\w+)(\((\w+)\))? (.+)$", source, re.MULTILINE)
        source = re.sub(r"^\s*#.*$", "", source, flags=re.MULTILINE)
        for name, _, parameter, body in reversed(macros):
            used = rf"\b{name}\b" + (r"\((\w+)\)" if parameter else "()")
            parts = re.split(used, source)
            bodies = [
                re.sub(rf"\b{parameter}\b", argument, body) if parameter else body for argument in parts[1::2]
            ]
            source = "".join(text for pair in zip(parts[::2], [*bodies, ""], strict=True) for text in pair)
        source = re.sub(r'_Pragma\s*\("[^"]*"\)', "", source)
        # Casts and declarations of pointers and references do nothing; template arguments compare nothing.
        source = re.sub(rf"\(\s*{SPACE}\s*\)", "", source)
        source = re.sub(rf"\b{SPACE}(?=\s*\w)", "", source)
        for _ in range(2):  # templates within templates
            source = re.sub(r"\b([A-Za-z_]\w*)<[\w\s,]*>", r"\1", source)
        text = cls()
        tokens = TOKEN.findall(source)
        for i, token in enumerate(tokens):
            if token != "(" or i == 0 or not re.fullmatch(r"[A-Za-z_]\w*", tokens[i - 1]):
                continue
            end = closing(tokens, i)
            if (
                end + 1 < len(tokens)
                and tokens[end + 1] == "{"
                and i > 1
                and tokens[i - 2] not in {"=", "(", ","}
            ):
                body = tokens[end + 1 : closing(tokens, end + 1) + 1]
                text.functions.setdefault(tokens[i - 1], []).append(body)
        return text


def closing(tokens: list[str], start: int) -> int:
    """Returns the index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(tokens)):
        depth += (tokens[i] in "([{") - (tokens[i] in ")]}")
        if depth == 0:
            return i
    raise ValueError(f"expected a closing bracket after {' '.join(tokens[start : start + 8])}; found none")


def statement_end(tokens: list[str], i: int) -> int:
    """Returns the index behind the statement that begins at `i`."""
    if tokens[i] == "{":
        return closing(tokens, i) + 1
    if tokens[i] in {"if", "for"}:
        end = statement_end(tokens, closing(tokens, i + 1) + 1)
        if tokens[i] == "if" and end < len(tokens) and tokens[end] == "else":
            end = statement_end(tokens, end + 1)
        return end
    while tokens[i] != ";":
        i = closing(tokens, i) + 1 if tokens[i] in "([{" else i + 1
    return i + 1


@dataclass
class Counting:
    """Counts functions of a text under assumptions.

    Attributes:
        text: the functions.
        truths: conditions, spelled as in the source with one space between tokens, and whether they hold;
            those that are not listed are assumed to hold, and cost their comparisons.
        trips: how often a loop runs, by `function.variable` or its variable alone; those with two literal
            bounds need no entry.
        overloads: which definition of a name is meant, when there are several.
    """

    text: Text
    truths: dict[str, bool] = field(default_factory=dict)
    trips: dict[str, float] = field(default_factory=dict)
    overloads: dict[str, int] = field(default_factory=dict)
    inside: str = ""  # the function that is being counted

    def function(self, name: str) -> Counter[str]:
        """Returns the operations of one call."""
        outside, self.inside = self.inside, name
        counted, _ = self.block(self.text.functions[name][self.overloads.get(name, 0)][1:-1])
        self.inside = outside
        return counted

    def block(self, tokens: list[str]) -> tuple[Counter[str], bool]:
        """Returns the operations of statements, and whether they end in return, continue or break."""
        total: Counter[str] = Counter()
        i = 0
        while i < len(tokens):
            counted, i, ended = self.statement(tokens, i)
            total += counted
            if ended:
                return total, True
        return total, False

    def statement(self, tokens: list[str], i: int) -> tuple[Counter[str], int, bool]:
        """Returns the operations of the statement at `i`, the index behind it, and whether it is the last."""
        if tokens[i] == "{":
            end = closing(tokens, i)
            counted, ended = self.block(tokens[i + 1 : end])
            return counted, end + 1, ended
        if tokens[i] == "if":
            return self.branch(tokens, i)
        if tokens[i] == "for":
            return self.loop(tokens, i)
        end = statement_end(tokens, i)
        words = tokens[i : end - 1]
        return self.expression(words), end, words[:1] in (["return"], ["continue"], ["break"])

    def branch(self, tokens: list[str], i: int) -> tuple[Counter[str], int, bool]:
        """Counts one side of an `if`: the one taken, or the first and the condition when that is not told."""
        end = closing(tokens, i + 1)
        condition = tokens[i + 2 : end]
        known = self.truths.get(" ".join(condition))
        first, after = end + 1, statement_end(tokens, end + 1)
        second, last = 0, after
        if after < len(tokens) and tokens[after] == "else":
            second, last = after + 1, statement_end(tokens, after + 1)
        if known is False:
            counted, _, ended = self.statement(tokens, second) if second else (Counter[str](), 0, False)
        else:
            counted, _, ended = self.statement(tokens, first)
        if known is None:
            counted, ended = counted + self.expression(condition), False
        return counted, last, ended

    def loop(self, tokens: list[str], i: int) -> tuple[Counter[str], int, bool]:
        """Counts the body as often as it runs; the loop itself is unrolled, or lost beside its body."""
        end = closing(tokens, i + 1)
        header = " ".join(tokens[i + 2 : end])
        body, after, _ = self.statement(tokens, end + 1)
        bounds = re.fullmatch(r"int (\w+) = (\d+) ; \w+ < (\d+) ; \+ \+ \w+", header)
        halving = re.fullmatch(r"int (\w+) = (\d+) ; \w+ > 0 ; \w+ /= 2", header)
        variable = header.split()[1]
        known = self.trips.get(f"{self.inside}.{variable}", self.trips.get(variable))
        if known is not None:
            times = known
        elif bounds:
            times = float(int(bounds[3]) - int(bounds[2]))
        elif halving:
            times = float(int(halving[2]).bit_length())
        else:
            raise ValueError(f"expected how often 'for ({header})' runs; found nothing")
        return Counter({kind: count * times for kind, count in body.items()}), after, False

    def expression(self, words: list[str]) -> Counter[str]:
        """Counts operators, calls and loads; arithmetic of literals and loop variables costs nothing."""
        width = next((int(found[1]) for word in words[:3] if (found := WIDTH.match(word))), 1)
        if any(word in {"fma", "weighted4"} for word in words) or words[:2] == ["return", "float4"]:
            width = 1  # spelled out lane by lane
        words = fold(words)
        total: Counter[str] = Counter()
        for i, word in enumerate(words):
            following = words[i + 1] if i + 1 < len(words) else ""
            before = words[i - 1] if i else ""
            binary = before not in {"", "(", ",", "=", "return", "?", ":", "["} and not is_operator(before)
            if following == "(" and word in self.text.functions and word not in CALLS:
                total += self.function(word)
            elif following == "(" and word in CALLS:
                kind, cost = CALLS[word]
                total[kind] += cost * (1 if kind in {"multiply-add", "special", "shuffle"} else width)
            elif following == "(" and (word in CONVERSIONS or WIDTH.match(word)):
                total["convert"] += (
                    int(found[1]) if (found := WIDTH.match(word)) and word not in FREE else (word not in FREE)
                )
            elif word == "[" and binary and before not in REGISTERS | {"]"}:
                total["load"] += 1
            elif word in MULTIPLY and binary:
                total["multiply"] += width
            elif word in ADD and binary:
                total["add"] += width
            elif word in BITS and binary:
                total["bits"] += width
            elif word in COMPARE and (binary or word == "!"):
                total["compare"] += 1
        return +total


def is_operator(word: str) -> bool:
    """Whether what follows `word` is an operand."""
    return word in MULTIPLY | ADD | BITS | COMPARE


def fold(words: list[str]) -> list[str]:
    """Replaces brackets that hold only literals, unrolled loop variables and arithmetic by one literal."""
    for i, word in enumerate(words):
        if word != "(" or (
            i > 0 and re.fullmatch(r"[A-Za-z_]\w*", words[i - 1]) and words[i - 1] != "return"
        ):
            continue
        end = closing(words, i)
        if all(re.fullmatch(r"\d+u?|[-+*/]", x) or x in UNROLLED for x in words[i + 1 : end]):
            return fold([*words[:i], "0", *words[end + 1 :]])
    return words
