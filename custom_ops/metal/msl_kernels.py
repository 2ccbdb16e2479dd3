"""What a Metal program declares to its host: kernels with their parameters, function constants."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from msl_tokens import Token


@dataclass
class Parameter:
    """One parameter of a kernel: argument number `index`, or a position when that is -1."""

    type: str  # as written, without the name: "device const float *"
    name: str
    index: int = -1
    position: str = ""

    @property
    def reference(self) -> bool:
        """Whether the host passes a value and not a buffer."""
        return self.type.endswith("&")

    @property
    def pointee(self) -> str:
        """The type behind the pointer or reference, without address space and const."""
        return re.sub(r"\b(device|constant|const)\b", "", self.type[:-1]).strip()

    @property
    def writable(self) -> bool:
        """Whether the kernel may write there."""
        return not re.search(r"\b(constant|const)\b", self.type)


@dataclass
class Kernel:
    """A kernel function, `template_names` empty unless it is a template."""

    name: str
    parameters: list[Parameter]
    token: Token  # the word `kernel`
    end: Token  # the brace that closes its body
    template_header: str = ""
    template_names: list[str] = field(default_factory=list)
    max_threads: int = 0  # 0: the source does not say

    @property
    def arguments(self) -> list[Parameter]:
        """What the host passes, in the order of the indices."""
        return sorted((p for p in self.parameters if p.index >= 0), key=lambda p: p.index)


@dataclass
class Constant:
    """A function constant; `values` are those its comment declares: `// values: 0, 1`."""

    name: str
    type: str
    index: int
    first: Token
    last: Token
    values: tuple[int, ...]


@dataclass
class Instance:
    """What the host calls `name`: a kernel, or one instance of a template."""

    name: str
    kernel: str
    template_arguments: str = ""
