"""Finds what a Metal program declares: functions, kernels, constants, threadgroup memory."""

from __future__ import annotations

import re

from msl_check import check_words, common_words
from msl_kernels import Constant, Instance, Kernel, Parameter
from msl_tokens import Token
from msl_words import ATTRIBUTES, POSITIONS

_OPEN, _CLOSE = "([{", ")]}"


class Program:
    """A parsed program. Tokens of attributes are emptied here; all other editing is left to the writers."""

    def __init__(self, all_tokens: list[Token]):
        self.all = all_tokens
        self.code = [t for t in all_tokens if not t.blank]
        self.kernels: list[Kernel] = []
        self.constants: list[Constant] = []
        self.instances: list[Instance] = []
        self.functions: list[Token] = []  # first token of every function that is no kernel
        self.globals: list[tuple[Token, list[Token]]] = []  # `constant`, and const or constexpr beside it
        self.shared: list[list[Token]] = []  # threadgroup variables, from `threadgroup` to before `;`
        self.names: set[str] = set()
        self.uses: dict[str, set[str]] = {}  # function or macro -> names in its body
        self.enumerators: dict[str, int] = {}
        for token in all_tokens:
            macro = re.match(r"\s*#\s*define\s+(\w+)\(", token.text) if token.kind == "directive" else None
            if macro:
                self.names.add(macro.group(1))
                self.uses[macro.group(1)] = set(re.findall(r"\w+", token.text[macro.end() :]))
        self._scope(0, len(self.code), in_struct=False)
        common_words(self.code)
        check_words(self.code, self.names)

    def _closing(self, i: int) -> int:
        """Index of the bracket that closes the one at i."""
        depth = 0
        for j in range(i, len(self.code)):
            depth += (self.code[j].text in _OPEN) - (self.code[j].text in _CLOSE)
            if depth == 0:
                return j
        raise self.code[i].error("a closing bracket")

    def _after_angles(self, i: int) -> int:
        """Index after the `>` that closes the `<` at i."""
        depth = 0
        for j in range(i, len(self.code)):
            depth += (self.code[j].text == "<") - (self.code[j].text == ">")
            if depth == 0:
                return j + 1
        raise self.code[i].error("a closing '>'")

    def _text(self, i: int, end: int) -> str:
        return " ".join(t.text for t in self.code[i:end])

    def _attributes(self, i: int, end: int) -> tuple[list[int], dict[str, str]]:
        """Indices that are no part of a `[[…]]`, and the attributes: name -> text in parentheses."""
        plain, found = [], {}
        while i < end:
            if self.code[i].text == "[" and i + 1 < end and self.code[i + 1].text == "[":
                close = self._closing(i)
                name = self.code[i + 2]
                if name.text not in ATTRIBUTES:
                    name.fail(f"one of the attributes {', '.join(sorted(ATTRIBUTES))}")
                found[name.text] = self._text(i + 4, close - 2) if self.code[i + 3].text == "(" else ""
                for token in self.code[i : close + 1]:
                    token.out = ""
                i = close + 1
            else:
                plain.append(i)
                i += 1
        return plain, found

    def _scope(self, i: int, end: int, in_struct: bool) -> None:
        while i < end:
            i = self._declaration(i, end, in_struct)

    def _declaration(self, i: int, end: int, in_struct: bool) -> int:
        start, header, template_names = i, "", []
        word = self.code[i].text
        if word in (";", "}"):
            return i + 1
        if in_struct and word in ("public", "private") and self.code[i + 1].text == ":":
            return i + 2
        if word == "namespace":
            while self.code[i].text != "{":
                i += 1
            close = self._closing(i)
            self._scope(i + 1, close, False)
            return close + 1
        if word == "template":
            if self.code[i + 1].text != "<":
                return self._instance(i)
            after = self._after_angles(i + 1)
            header = self._text(i, after)
            template_names = self._template_names(i + 2, after - 1)
            self.names.update(template_names)
            i = after
            word = self.code[i].text
        if word == "enum":
            self._enumerators(i)
        if word in ("using", "typedef", "static_assert", "enum"):
            while self.code[i].text != ";":
                if self.code[i].kind == "name" and self.code[i + 1].text in ("=", ";", "{", ":"):
                    self.names.add(self.code[i].text)
                i = self._closing(i) + 1 if self.code[i].text in _OPEN else i + 1
            if self.code[start].text == "using" and self._text(start, i) == "using namespace metal":
                for token in self.code[start : i + 1]:
                    token.out = ""
            return i + 1
        if word in ("struct", "union", "class") and self.code[i + 2].text in ("{", ";", ":"):
            self.names.add(self.code[i + 1].text)
            while self.code[i].text not in ("{", ";"):
                i += 1
            if self.code[i].text == ";":
                return i + 1
            close = self._closing(i)
            self._scope(i + 1, close, True)
            return close + 1
        return self._function_or_variable(start, i, end, in_struct, header, template_names)

    def _enumerators(self, i: int) -> None:
        """Values of `enum Name { A = 1, B }`, which attributes may name: `[[buffer(B)]]`."""
        while self.code[i].text not in ("{", ";"):
            i += 1
        value = 0
        for j in range(i + 1, self._closing(i) if self.code[i].text == "{" else i):
            if self.code[j].kind == "number":
                value = int(self.code[j].text, 0)
            if self.code[j + 1].text in (",", "}"):
                name = self.code[j] if self.code[j].kind == "name" else self.code[j - 2]
                self.enumerators[name.text] = value
                value += 1

    def _number(self, text: str, token: Token) -> int:
        """An index in an attribute: a number or an enumerator."""
        if not text.isdigit() and text not in self.enumerators:
            token.fail("a number or the name of an enumerator in an attribute")
        return int(text) if text.isdigit() else self.enumerators[text]

    def _template_names(self, i: int, end: int) -> list[str]:
        names, depth = [], 0
        for j in range(i, end):
            depth += (self.code[j].text in "(<") - (self.code[j].text in ")>")
            following = self.code[j + 1].text
            if self.code[j].kind == "name" and depth == 0 and (following in (",", "=") or j + 1 == end):
                names.append(self.code[j].text)
        return names

    def _function_or_variable(
        self, start: int, i: int, end: int, in_struct: bool, header: str, template_names: list[str]
    ) -> int:
        parenthesis = -1
        j = i
        while j < end and self.code[j].text not in (";", "{", "="):
            if (
                self.code[j].text == "("
                and parenthesis < 0
                and self.code[j - 1].text not in ("alignas", "decltype")
            ):
                parenthesis = j
            if self.code[j].text == "operator":  # `operator=` and `operator()` name a function
                j = next(k for k in range(j + 2, end) if self.code[k].text == "(")
                parenthesis = j
            j = self._closing(j) + 1 if self.code[j].text in "([" else j + 1
        if j >= end:
            self.code[i].fail("a declaration that ends")
        if parenthesis < 0:
            return self._variable(i, j, in_struct)
        plain, attributes = self._attributes(i, parenthesis)
        self.names.add(self.code[parenthesis - 1].text)
        if "kernel" in attributes or any(self.code[k].text == "kernel" for k in plain):
            kernel_end = self._kernel(i, parenthesis, j, header, template_names)
            limit = attributes.get("max_total_threads_per_threadgroup")
            self.kernels[-1].max_threads = self._number(limit, self.code[i]) if limit else 0
            return kernel_end
        self.functions.append(self.code[i])
        if self.code[j].text == "{":
            close = self._closing(j)
            self._body(self.code[parenthesis - 1].text, j, close, in_kernel=False)
            return close + 1
        return self._skip(j)

    def _skip(self, i: int) -> int:
        while self.code[i].text != ";":
            i = self._closing(i) + 1 if self.code[i].text in _OPEN else i + 1
        return i + 1

    def _variable(self, i: int, j: int, in_struct: bool) -> int:
        end = self._skip(j)
        if in_struct:
            return end
        plain, attributes = self._attributes(i, j)
        words = [self.code[k] for k in plain]
        space = next((t for t in words if t.text == "constant"), None)
        if space is None:
            self.code[i].fail("'constant' before a variable at program scope")
        if "function_constant" not in attributes:
            self.globals.append((space, [t for t in words if t.text in ("const", "constexpr", "static")]))
            return end
        name, type_word = words[-1], words[-2]
        if type_word.text not in ("int", "uint", "bool") or self.code[j].text != ";":
            type_word.fail("a function constant of type int, uint or bool without a value")
        after = self.all[self.all.index(self.code[j]) + 1 :][:2]
        values = next(
            (re.search(r"values:\s*([-\d, ]+)", t.text) for t in after if t.kind == "comment"), None
        )
        self.constants.append(
            Constant(
                name.text,
                type_word.text,
                self._number(attributes["function_constant"], self.code[i]),
                self.code[i],
                self.code[j],
                tuple(int(v) for v in values.group(1).split(",")) if values else (),
            )
        )
        return end

    def _instance(self, i: int) -> int:
        """`template [[host_name("name")]] kernel decltype(f<64>) f<64>;`"""
        end = self._skip(i)
        plain, attributes = self._attributes(i, end - 1)
        if "host_name" not in attributes:
            self.code[i].fail('[[host_name("…")]] after template')
        words = [self.code[k].text for k in plain]
        match = re.fullmatch(
            r"template (?:kernel )?decltype \( (\w+) < (.*) > \) (\w+) < (.*) >", " ".join(words)
        )
        if not match or match.groups()[:2] != match.groups()[2:]:
            self.code[i].fail('template [[host_name("…")]] kernel decltype(f<…>) f<…>;')
        self.instances.append(Instance(attributes["host_name"].strip('"'), match.group(1), match.group(2)))
        for token in self.code[i:end]:
            token.out = ""
        return end

    def _kernel(self, i: int, parenthesis: int, j: int, header: str, template_names: list[str]) -> int:
        name = self.code[parenthesis - 1]
        if self.code[j].text != "{" or self.code[parenthesis - 2].text != "void":
            name.fail("a kernel of type void with its body")
        word = next((t for t in self.code[i:parenthesis] if t.text == "kernel" and t.out), self.code[i])
        close = self._closing(j)
        kernel = Kernel(
            name.text, self._parameters(parenthesis), word, self.code[close], header, template_names
        )
        indices = [p.index for p in kernel.arguments]
        if indices != list(range(len(indices))):
            name.fail(f"buffer indices 0 to {len(indices) - 1}, each once, in a kernel")
        self.kernels.append(kernel)
        if not header:
            self.instances.append(Instance(name.text, name.text))
        self._body(name.text, j, close, in_kernel=True)
        return close + 1

    def _parameters(self, parenthesis: int) -> list[Parameter]:
        close = self._closing(parenthesis)
        result, begin = [], parenthesis + 1
        depth = 0
        for i in range(parenthesis + 1, close + 1):
            depth += (self.code[i].text in "([{<") - (self.code[i].text in ")]}>")
            if i < close and not (self.code[i].text == "," and depth == 0):
                continue
            plain, attributes = self._attributes(begin, i)
            words = [self.code[k].text for k in plain]
            parameter = Parameter(" ".join(words[:-1]), words[-1])
            position = next((a for a in attributes if a in POSITIONS), "")
            if "buffer" in attributes:
                parameter.index = self._number(attributes["buffer"], self.code[begin])
                wanted = (
                    r"(const )?(device|constant)\b.*[*&]"
                    if not parameter.reference
                    else r"(const )?constant\b.*&"
                )
                if not re.fullmatch(wanted, parameter.type):
                    self.code[begin].fail(
                        "a pointer to device or constant memory, or a reference to constant memory"
                    )
            elif position:
                parameter.position = POSITIONS[position]
            else:
                self.code[begin].fail(
                    "[[buffer(n)]] or the attribute of a position at a parameter of a kernel"
                )
            result.append(parameter)
            begin = i + 1
        return result

    def _body(self, name: str, i: int, end: int, in_kernel: bool) -> None:
        self.uses.setdefault(name, set()).update(t.text for t in self.code[i:end] if t.kind == "name")
        depth = 0
        for j in range(i, end):
            depth += (self.code[j].text == "{") - (self.code[j].text == "}")
            if self.code[j].text != "threadgroup" or self.code[j - 1].text not in "{};":
                continue
            last = j
            while self.code[last].text not in (";", "=", "*", "&", "(", ","):
                last = self._closing(last) + 1 if self.code[last].text == "[" else last + 1
            if self.code[last].text in "*&(":
                continue  # a pointer
            if self.code[last].text != ";":
                self.code[last].fail("one threadgroup variable a declaration, without a value")
            if not in_kernel or depth != 1:
                self.code[j].fail("threadgroup variables in the outermost block of a kernel only")
            self.shared.append(self.code[j:last])

    def constants_of(self, kernel: str) -> list[Constant]:
        """The function constants that a kernel or anything it calls reads."""
        reached, ahead = set(), {kernel}
        while ahead:
            reached |= ahead
            ahead = set().union(*(self.uses.get(name, set()) for name in ahead)) - reached
        return [constant for constant in self.constants if constant.name in reached]
