"""What is inside a saved sequence."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvfuse.sequence import KvSequence

if TYPE_CHECKING:
    from rich.console import Console

_FORMAT = (
    *("kv_num_heads", "head_dim", "value_head_dim", "key_bits", "value_bits", "group_size", "full_codes"),
    *("rotation", "key_center", "n_recent", "block", "n_sink", "window_left"),
)


@dataclass(frozen=True)
class LayerState:
    """One layer: its key, its format as stored, and where its tokens are.

    Attributes:
        layer: The state key.
        format: The numbers of the format, by attribute name.
        low_bit: Tokens [begin, end) that are stored as codes.
        exact_begin: Tokens from here on are stored as floats.
        nbytes: Bytes of the layer's tensors in the file.
    """

    layer: str
    format: dict[str, int]
    low_bit: tuple[int, int]
    exact_begin: int
    nbytes: int


@dataclass(frozen=True)
class StateFile:
    """A saved sequence; the file's checksum and all its fields have been checked."""

    path: str
    format_version: int
    fingerprint: str
    checksum: str
    length: int
    nbytes: int
    layers: tuple[LayerState, ...]
    passed: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {key: value for key, value in asdict(self).items() if key != "passed"}

    def render(self, console: Console) -> None:
        """Prints a table; layers of one format share a row."""
        from rich.table import Table

        table = Table(title=f"{self.path}: {self.length} tokens, {self.nbytes:,} bytes", title_justify="left")
        for name in ("layers", "heads x size", "bits k/v", "low-bit tokens", "exact from", "bytes each"):
            table.add_column(name, overflow="fold")
        rows: dict[tuple[str, ...], list[str]] = {}
        for layer in self.layers:
            shown = layer.format
            cells: tuple[str, ...] = (
                f"{shown['kv_num_heads']} x {shown['head_dim']}/{shown['value_head_dim']}",
                f"{shown['key_bits']}/{shown['value_bits']}",
                f"{layer.low_bit[0]}..{layer.low_bit[1]}",
                str(layer.exact_begin),
                f"{layer.nbytes:,}",
            )
            rows.setdefault(cells, []).append(layer.layer)
        for cells, names in rows.items():
            label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
            table.add_row(label, *cells)
        console.print(table)
        console.print(f"format {self.format_version}, model {self.fingerprint}, checksum {self.checksum}")


def read_state(path: str | os.PathLike[str]) -> StateFile:
    """Checks a saved sequence and describes it.

    Raises:
        SequenceError: The file cannot be read, or its bytes are no state; the sentence names the field.
    """
    KvSequence.load(path).close()  # all checks are the library's
    from safetensors import safe_open

    with safe_open(os.fspath(path), framework="numpy") as stored:
        fields = stored.metadata()
        sizes: dict[str, int] = {}
        for name in stored.keys():  # noqa: SIM118 (not a mapping)
            array = stored.get_tensor(name)
            prefix = name.split(".", 1)[0]
            sizes[prefix] = sizes.get(prefix, 0) + array.nbytes
    layers = tuple(
        LayerState(
            layer=fields[f"{i}.layer"],
            format={name: int(fields[f"{i}.{name}"]) for name in _FORMAT},
            low_bit=(int(fields[f"{i}.begin"]), int(fields[f"{i}.encoded_end"])),
            exact_begin=int(fields[f"{i}.exact_begin"]),
            nbytes=sizes.get(str(i), 0),
        )
        for i in range(int(fields["layers"]))
    )
    return StateFile(
        path=os.fspath(path),
        format_version=int(fields["format_version"]),
        fingerprint=fields["fingerprint"],
        checksum=fields["checksum"],
        length=int(fields["length"]),
        nbytes=os.path.getsize(path),
        layers=layers,
    )
