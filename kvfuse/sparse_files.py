"""Copies and compares files of weights without touching their holes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 8 << 20  # bytes read at once where the system cannot copy by itself


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two files are equal; holes that both have are not read."""
    size = one.stat().st_size
    if other.stat().st_size != size:
        return False
    with one.open("rb") as left, other.open("rb") as right:
        parts = [list(_data_ranges(file.fileno(), size)) for file in (left, right)]
        for begin, end in parts[0] if parts[0] == parts[1] else [*parts[0], *parts[1]]:
            for start in range(begin, end, _CHUNK):
                count = min(_CHUNK, end - start)
                if os.pread(left.fileno(), count, start) != os.pread(right.fileno(), count, start):
                    return False
    return True


def _data_ranges(file: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts [begin, end) of a file that are no holes; all of it where the system does not tell."""
    if not hasattr(os, "SEEK_DATA"):
        yield 0, size
        return
    end = 0
    while end < size:
        try:
            begin = os.lseek(file, end, os.SEEK_DATA)
        except OSError:
            return  # only a hole is left
        end = os.lseek(file, begin, os.SEEK_HOLE)
        yield begin, end


def copy_sparse(source: Path, target: Path) -> None:
    """Copies file contents without reading them into Python, keeping holes where the system shows them."""
    if not hasattr(os, "copy_file_range") or not hasattr(os, "SEEK_DATA"):
        shutil.copyfile(source, target)
        return
    size = source.stat().st_size
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.truncate(size)
        for position, end in _data_ranges(reader.fileno(), size):
            while position < end:
                position += _copy_range(reader.fileno(), writer.fileno(), position, end - position)


def _copy_range(source: int, target: int, offset: int, count: int) -> int:
    """Copies up to `count` bytes at the same offset; by the kernel where it can."""
    try:
        copied = os.copy_file_range(source, target, count, offset, offset)
        if copied:
            return copied
    except OSError:
        pass
    data = os.pread(source, min(count, _CHUNK), offset)
    if not data:
        raise OSError(5, "the external data ended while it was copied")
    return os.pwrite(target, data, offset)
