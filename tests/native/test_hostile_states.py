"""States whose checksum is right and whose content is not: refused by the field, or usable like any other.

The fuzzer (tools/fuzz_unfreeze.sh) does this at random and a million times; here each number of each header
takes each edge value once.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("ops", "")]

from op_graph import Graph  # noqa: E402 - found through the line above
from op_harness import OpSession, random_history, sequences  # noqa: E402
from reference import OpConfig  # noqa: E402

import kvfuse  # noqa: E402
from kvfuse import _native  # noqa: E402

CONFIGS = {
    "plain": OpConfig(),
    "eight": OpConfig(key_bits=8, value_bits=8, n_recent=2, n_sink=1),
    "half": OpConfig(key_bits=16, value_bits=16),
    "centred": OpConfig(block=2, key_center="block", n_recent=1, n_sink=1, codes="full", group_size=32),
    "window": OpConfig(window_left=2, n_recent=1),
}
EDGES = (
    "",
    "0",
    "1",
    "-1",
    "2",
    "3",
    "5",
    "7",
    "8",
    "16",
    "32",
    "63",
    "64",
    "65",
    "65536",
    "2147483648",
    "1099511627776",
    "9" * 30,
)


def frozen(config: OpConfig, layers: int = 1) -> bytes:
    session = OpSession(Graph(tuple(replace(config, layer=f"layers.{index}") for index in range(layers))))
    with sequences(1) as handles:
        session.run(
            *random_history(1, 5, num_heads=2, kv_heads=1, head_dim=8).part(0, 5), kv_sequence=handles
        )
        return bytes(_native.freeze_sequence(handles[0]))


def split(state: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(state[:8], "little")
    return state[8 : 8 + size], state[8 + size :]


def join(header: bytes, data: bytes) -> bytes:
    """A container with the right length and checksum (FNV-1a, 64 bits, over zeros in its own place)."""
    start = header.index(b'"checksum":"') + len(b'"checksum":"')
    header = header[:start] + b"0" * 16 + header[start + 16 :]
    checksum = 0xCBF29CE484222325
    for byte in header + data:
        checksum = (checksum ^ byte) * 0x100000001B3 % 2**64
    header = header[:start] + f"{checksum:016x}".encode() + header[start + 16 :]
    return len(header).to_bytes(8, "little") + header + data


def unfreeze(state: bytes) -> bool:
    """Whether a state is accepted: then it freezes, forks and rolls back; else it leaves nothing behind."""
    live, used = _native.live_sequences(), kvfuse.memory_in_use()
    try:
        sequence = kvfuse.KvSequence.unfreeze(state)
    except kvfuse.SequenceError as error:
        sentence, accepted = str(error), False
    else:
        with sequence, kvfuse.KvSequence.unfreeze(sequence.freeze()) as again, sequence.fork() as fork:
            assert again.freeze() == sequence.freeze() == fork.freeze()
            again.truncate(0)
            assert len(fork) == len(sequence)
        sentence, accepted = "", True
    assert accepted or re.match(r"\[\w+\] expected .*; found ", sentence, re.DOTALL), sentence
    assert (_native.live_sequences(), kvfuse.memory_in_use()) == (live, used)
    return accepted


def test_the_checksum_here_is_the_librarys() -> None:
    state = frozen(CONFIGS["centred"])
    assert join(*split(state)) == state
    assert unfreeze(state)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_at_every_edge(name: str) -> None:
    header, data = split(frozen(CONFIGS[name]))
    numbers = [
        found for found in re.finditer(rb"-?\d+", header) if found.start() > header.index(b'"0.begin"')
    ]
    accepted = []
    for found in numbers:
        for edge in EDGES:
            changed = header[: found.start()] + edge.encode() + header[found.end() :]
            if changed != header and unfreeze(join(changed, data)):
                accepted.append((header[: found.start()].rpartition(b'"')[0][-24:], edge))
    # A few fields may have other values that fit the same tensors: another window, another rotation, ...
    assert len(numbers) > 60
    assert len(accepted) < len(numbers) * len(EDGES) / 10


@pytest.mark.parametrize("name", CONFIGS)
def test_any_tensor_bytes_are_numbers_like_others(name: str) -> None:
    """The data has no invalid values but scales that are no halves: anything else is taken as it is."""
    header, data = split(frozen(CONFIGS[name]))
    for filler in (b"\x00", b"\xff", b"\x7f", b"\x80", b"\x00\x00\x80\x7f"):
        unfreeze(join(header, (filler * len(data))[: len(data)]))


def test_claims_are_checked_before_memory_is_taken() -> None:
    """A kilobyte that claims terabytes of tokens is refused at once, by the offsets of its tensors."""
    header, data = split(frozen(CONFIGS["plain"]))
    huge = str(2**40).encode()
    for field in (
        b"length",
        b"0.encoded_end",
        b"0.exact_begin",
        b"0.kv_num_heads",
        b"0.head_dim",
        b"0.n_recent",
    ):
        claimed = re.sub(rb'"' + field + rb'":"\d+"', b'"' + field + b'":"' + huge + b'"', header)
        assert claimed != header
        unfreeze(join(claimed, data))
    shape = re.sub(rb'"shape":\[1,5,', b'"shape":[1,' + huge + b",", header)
    assert shape != header
    assert not unfreeze(join(shape, data))


def test_layers_are_named_once() -> None:
    header, data = split(frozen(CONFIGS["plain"], layers=2))
    doubled = header.replace(b'"1.layer":"layers.1"', b'"1.layer":"layers.0"')
    with pytest.raises(kvfuse.SequenceError, match=r"each layer once; found 'layers\.0' twice"):
        kvfuse.KvSequence.unfreeze(join(doubled, data))
    fewer = header.replace(b'"layers":"2"', b'"layers":"1"')
    assert fewer != header
    with pytest.raises(kvfuse.SequenceError, match=r"expected .*; found"):
        kvfuse.KvSequence.unfreeze(join(fewer, data))


@pytest.mark.parametrize("depth", [10, 100_000])
def test_nested_json_is_refused(depth: int) -> None:
    header = b"[" * depth + b"]" * depth
    with pytest.raises(kvfuse.SequenceError, match=r"\[state\] expected '{' in the header; found"):
        kvfuse.KvSequence.unfreeze(len(header).to_bytes(8, "little") + header)
