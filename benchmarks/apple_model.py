"""A paper model of decode attention on Apple GPUs: bytes and operations per token, and the time they allow.

    python benchmarks/apple_model.py [--kernels custom_ops/metal/kernels.metal] [--update]

--update writes the tables into docs/apple_gpus.md, between its two marks.

Nothing here is measured on an Apple GPU. Bytes follow from the layout (custom_ops/metal/abi.h), operations
are read off the kernel text (metal_operations.py: an upper bound), rates are published ones (SOURCES). One
decode step, one query token, head_dim 128, all heads together filling the GPU; time is per query head. Not in
it: launches, the merge, the window of exact tokens, and how much of its peak a GPU reaches.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.metal_operations import Counting, Text  # noqa: E402 - found through the line above

KERNELS = ROOT / "custom_ops" / "metal" / "kernels.metal"
DOCUMENT = ROOT / "docs" / "apple_gpus.md"
MARKS = ("<!-- tables: benchmarks/apple_model.py --update -->", "<!-- end of tables -->")
# The text whose loops and branches `operations` describes: the first digits of its sha256.
COUNTED = "0795d58ed743"
HEAD_DIM, BLOCK = 128, 64
F16_BYTES = 2 * HEAD_DIM * 2  # of one token's key and value
SHARING = (1, 4)  # query heads of a kv head

SOURCES = (
    "memory bandwidth and GPU cores: Apple's announcements (M1: 68.25 GB/s, 8; M4: 120 GB/s, 10; M4 Pro:"
    " 273 GB/s, 20; M4 Max: 546 GB/s, 40)",
    "clock: M1 from Apple's 2.6 TFLOPS; M4 family 1.47 GHz as hmc-tech.com lists it (also 1.58 GHz there)",
    "128 lanes a core; one cycle for 32-bit add and multiply-add, 2 to 2.33 for a 32-bit integer multiply;"
    " 16-bit arithmetic is not faster: github.com/philipturner/metal-benchmarks (measured on M1 and A15)",
    "assumed, because nobody published them: 8 cycles for exp, 2 for a simd shuffle, 1 for anything else",
)
CYCLES = {"multiply": 2.33, "special": 8.0, "shuffle": 2.0}  # others 1

# Microseconds per head on an M4, as quoted in the request for these kernels; head_dim and the number of heads
# that ran together were not said. T = 512, 2048, 4096.
PUBLISHED = {"f16": (3.42, 13.77, 27.81), "int4, SIMD": (2.43, 11.12, 22.91)}
CONTEXTS = (512, 2048, 4096)


@dataclass(frozen=True)
class Chip:
    """One GPU: its name, bytes a second of memory, and lane operations a second."""

    name: str
    bandwidth: float
    cores: int
    clock: float

    @property
    def rate(self) -> float:
        """Operations of single lanes a second, at one a cycle."""
        return self.cores * 128 * self.clock


CHIPS = (
    Chip("M1", 68.25e9, 8, 2.6e12 / (8 * 128 * 2)),
    Chip("M4", 120e9, 10, 1.47e9),
    Chip("M4 Pro", 273e9, 20, 1.47e9),
    Chip("M4 Max", 546e9, 40, 1.47e9),
)
M4 = CHIPS[1]


@dataclass(frozen=True)
class Format:
    """How keys and values are stored: `bits` a code, `group_size` channels a scale (0: all)."""

    name: str
    bits: int
    group_size: int
    centered: bool = False

    @property
    def bytes(self) -> float:
        """Of one token of one kv head: codes and scales of both, and a share of the block's mean."""
        scales = 4 if self.group_size == 0 else 2 * HEAD_DIM // self.group_size
        mean = 2 * HEAD_DIM / BLOCK if self.centered else 0
        return 2 * (HEAD_DIM * self.bits // 8 + scales) + mean


FORMATS = (
    Format("default preset", 4, 32, centered=True),
    Format("plain 4 bits", 4, 0),
    Format("plain 8 bits", 8, 0),
)


def operations(text: Text, fmt: Format, queries: int, simd: bool) -> Counter[str]:
    """Returns the lane operations for one token of one kv head that `queries` query heads share."""
    grouped = fmt.group_size != 0
    groups = HEAD_DIM // fmt.group_size if grouped else 1
    chunks = HEAD_DIM * fmt.bits // 128  # of 16 bytes, per key
    counting = Counting(
        text,
        truths={
            "kVariant == 0": not simd,
            "kWide != 0": False,
            "half_index == 1": False,
            "half_index == 1 && kWide == 0": False,
            "cache . key . bits == 16": False,
            "cache . value . bits == 16": False,
            "cache . key . bits == 4": fmt.bits == 4,
            "kBits == 4": fmt.bits == 4,
            "kBits == 8": fmt.bits == 8,
            "bits == 4": fmt.bits == 4,
            "bits == 8": fmt.bits == 8,
            "cache . centered != 0": fmt.centered,
            "side . group_size == 0": not grouped,
            "side . group_size != 0": grouped,
            "group_size != 0": grouped,
            # Loops over channels have no rest; the values' first words are there already.
            "first + i < side . chunks": True,
            "at < kBits": True,
            "first != lanes . part": False,
            "g < slice_groups": True,
            # A new maximum is rare after the first tokens; every lane has channels; nothing special is on.
            "! simd_any ( score > softmax . maximum [ q ] )": True,
            "args . softcap > 0.0f": False,
            "args . biased != 0": False,
        },
        trips={
            "piece": 1,
            "q": queries,
            "g": groups,
            "key_dots.first": -(-chunks // 4),  # four at a time
            "add_values.first": fmt.bits // 4,
            "half_index": 1,
            "block": 1,
            "i": 4,
        },
    )
    return counting.function("attend_low")  # a pass scores one token in each of 32 lanes


def cycles(counted: Counter[str]) -> float:
    """Returns lane cycles."""
    return sum(count * CYCLES.get(kind, 1.0) for kind, count in counted.items() if kind != "free")


def microseconds(chip: Chip, tokens: int, token_bytes: float, token_cycles: float, share: float) -> float:
    """Returns the longer of the times for memory and for arithmetic, both at `share` of their peaks."""
    return 1e6 * tokens * max(token_bytes / chip.bandwidth, token_cycles / chip.rate) / share


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def heads(queries: int) -> str:
    """Returns how many query heads share a kv head, in words."""
    return "1 query head" if queries == 1 else f"{queries} query heads"


def operation_table(text: Text) -> str:
    """Returns operations per token and query head, by kind."""
    kinds = ("multiply", "multiply-add", "add", "bits", "convert", "compare", "load")
    rows = []
    for fmt in FORMATS:
        for queries in SHARING:
            for simd in (True, False):
                counted = operations(text, fmt, queries, simd)
                numbers = [fmt.bytes, *(counted[kind] for kind in kinds), counted.total(), cycles(counted)]
                each = [f"{number / queries:.0f}" for number in numbers]
                rows.append([fmt.name, str(queries), "SIMD" if simd else "scalar", *each])
    return table(["cache", "heads", "dot", "bytes", *kinds, "all", "cycles"], rows)


def published_share() -> float:
    """Returns the share of an M4's peak bandwidth that the published f16 figures come to, per added token."""
    microseconds_more = PUBLISHED["f16"][-1] - PUBLISHED["f16"][0]
    bytes_more = F16_BYTES * (CONTEXTS[-1] - CONTEXTS[0])
    return bytes_more / (microseconds_more * 1e-6) / M4.bandwidth


def time_table(text: Text) -> str:
    """Returns microseconds per query head on an M4 beside the published ones."""
    rows = [["published: " + name, *(f"{x:.2f}" for x in values)] for name, values in PUBLISHED.items()]
    for share in (1.0, published_share()):
        at = "peak" if share == 1 else f"{share:.0%} of it"
        rows.append(
            [f"model, {at}: f16", *(f"{microseconds(M4, t, F16_BYTES, 0, share):.2f}" for t in CONTEXTS)]
        )
        for fmt in FORMATS:
            for queries in SHARING:
                used = cycles(operations(text, fmt, queries, simd=True)) / queries
                times = [microseconds(M4, t, fmt.bytes / queries, used, share) for t in CONTEXTS]
                rows.append(
                    [f"model, {at}: {fmt.name}, {heads(queries)}", *(f"{time:.2f}" for time in times)]
                )
    return table(["M4", *(f"T = {t}" for t in CONTEXTS)], rows)


def chip_table(text: Text) -> str:
    """Returns what bounds the default preset on each GPU."""
    rows = []
    for chip in CHIPS:
        for queries in SHARING:
            f16 = 1e9 * F16_BYTES / queries / chip.bandwidth
            memory = 1e9 * FORMATS[0].bytes / queries / chip.bandwidth
            arithmetic = 1e9 * cycles(operations(text, FORMATS[0], queries, simd=True)) / queries / chip.rate
            bound = "memory" if memory > arithmetic else "arithmetic"
            rows.append([chip.name, str(queries), *(f"{x:.3f}" for x in (f16, memory, arithmetic)), bound])
    return table(["GPU", "heads", "f16, memory", "kvfuse, memory", "kvfuse, arithmetic", "bound by"], rows)


def kernel_text(path: Path) -> str:
    """Returns a kernel text with its parts in place, but for the layouts that host and kernels share."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        found = re.match(r'#include "(\w+\.h)"', line)
        part = found and found[1] != "abi.h"
        lines.append(kernel_text(path.parent / found[1]) if found and part else line)
    return "".join(lines)


def digest_of(source: str) -> str:
    """Returns the first digits of the sha256 of a kernel text."""
    return hashlib.sha256(source.encode()).hexdigest()[: len(COUNTED)]


def report(source: str) -> str:
    """Returns the model's tables as Markdown."""
    text = Text.read(source)
    digest = digest_of(source)
    return "\n\n".join(
        (
            "Operations of single lanes per token and query head, head_dim 128; `heads` query heads share a"
            f" kv head. Counted from a kernel text with sha256 {digest}….",
            operation_table(text),
            f"Microseconds per query head. {published_share():.0%} of the peak bandwidth is what the"
            " published f16 figures come to, if their head_dim was 128; the second half of the table grants"
            " the model the same share, of bandwidth and of arithmetic.",
            time_table(text),
            "Nanoseconds per token and query head, default preset, at the peaks:",
            chip_table(text),
            "Sources:\n\n" + "\n".join(f"- {line}" for line in SOURCES),
        )
    )


def update(path: Path, tables: str) -> None:
    """Puts the tables between the marks of a document."""
    before, _, rest = path.read_text(encoding="utf-8").partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        raise SystemExit(f"[apple model] expected {' … '.join(MARKS)} in {path}; found none")
    path.write_text(f"{before}{MARKS[0]}\n\n{tables}\n\n{MARKS[1]}{after}", encoding="utf-8")


def main() -> None:
    """Prints the report, or puts it into the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=Path, default=KERNELS, help="the Metal text to count")
    parser.add_argument("--update", action="store_true", help=f"write the tables into {DOCUMENT.name}")
    arguments = parser.parse_args()
    source = kernel_text(arguments.kernels)
    if digest_of(source) != COUNTED:
        print(
            f"[apple model] expected the kernel text {COUNTED}; found {digest_of(source)}: see that"
            " `operations` describes its loops and branches, and change COUNTED",
            file=sys.stderr,
        )
    tables = report(source)
    if arguments.update:
        update(DOCUMENT, tables)
    else:
        print(tables)


if __name__ == "__main__":
    main()
