"""Formats: presets, single options on top of them, and the bytes they take."""

import pytest
from rich.console import Console

import kvfuse
from kvfuse.formats import PRESETS, KvFormat, describe_presets, make_format
from models import tiny_decoder


def test_the_default_preset_is_the_one_that_was_measured():
    assert PRESETS["default"].attributes() == {
        "n_recent": 64, "block": 64, "n_sink": 4, "key_bits": 4, "value_bits": 4, "group_size": 32,
        "codes": "full", "rotation": "hadamard", "key_center": "block",
    }  # fmt: skip


def test_int4_is_what_the_op_does_without_attributes():
    assert PRESETS["int4"].attributes() == {
        "n_recent": 0, "block": 1, "n_sink": 0, "key_bits": 4, "value_bits": 4, "group_size": 0,
        "codes": "symmetric", "rotation": "hadamard", "key_center": "none",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "bits"),
    [
        # Of a head of 64: bits, and scales of 32 or 16 bits for 64 or 32 channels. A mean key of 16
        # bits a channel is shared by 64 keys: 0.25 for a key's element, half of that for keys and values.
        ("default", 4 + 16 / 32 + 0.125),
        ("int4", 4 + 32 / 64),
        ("int4-g64", 4 + 16 / 64),
        ("int4-g32", 4 + 16 / 32),
        ("k8v4", 6 + 16 / 32 + 0.125),
        ("int8", 8 + 16 / 32),
        ("exact", 32),
    ],
)
def test_bits_per_element_of_the_presets(preset, bits):
    assert PRESETS[preset].bits_per_element(64) == bits
    # Keys and values of one head: 128 elements.
    assert f"{preset} ({bits * 16:g} bytes, {bits:g} bits): " in describe_presets(64)


def test_every_preset_has_a_sentence():
    assert [sentence.split(" ")[0] for sentence in describe_presets().split("; ")] == list(PRESETS)


def test_inspect_says_what_each_preset_takes():
    found = kvfuse.inspect(tiny_decoder.build(head_dim=64))
    # Two layers of two kv heads.
    expected = {name: 4 * chosen.bytes_per_token(1, 64, 64) for name, chosen in PRESETS.items()}
    assert found.presets == found.to_dict()["presets"] == expected
    assert found.presets["default"] == found.bytes_per_token_after
    assert found.presets["exact"] == found.bytes_per_token_before
    console = Console(record=True, width=160, force_terminal=False)
    found.render(console)
    assert all(name in console.export_text(clear=False) for name in PRESETS)


def test_single_options_replace_those_of_the_preset():
    chosen = make_format("default", {"n_recent": 4096, "key_bits": 8})
    assert (chosen.n_recent, chosen.key_bits, chosen.block) == (4096, 8, 64)
    assert make_format(chosen, {}) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_bits": 5}, r"\[key_bits\] expected one of 4, 8, 16; found 5"),
        ({"value_bits": True}, r"\[value_bits\] expected one of 4, 8, 16; found True"),
        ({"codes": "odd"}, r"\[codes\] expected one of symmetric, full; found 'odd'"),
        ({"group_size": 16}, r"\[group_size\] expected one of 0, 32, 64; found 16"),
        ({"rotation": "fourier"}, r"\[rotation\] expected one of hadamard, none"),
        ({"n_recent": -1}, r"\[n_recent\] expected an integer from 0 to \d+; found -1"),
        ({"n_recent": 1.5}, r"\[n_recent\] expected an integer from 0 to \d+; found 1\.5"),
        ({"block": 0}, r"\[block\] expected an integer from 1"),
        ({"block": 1}, r"\[key_center\] expected block > 1"),
        ({"bits": 4}, r"\[bits\] expected one of the options block, "),
    ],
)
def test_a_wrong_option_is_named_with_what_was_expected(options, message):
    with pytest.raises(kvfuse.OptionError, match=message):
        make_format("default", options)


def test_an_unknown_preset_is_named():
    with pytest.raises(
        kvfuse.OptionError, match=r"\[format\] expected one of default, int4, int4-g64, .*; found 'int5'"
    ):
        make_format("int5", {})


@pytest.mark.parametrize(
    ("options", "sizes", "expected"),
    [
        # The plain form: 2 * (head_dim * bits / 8 + 4) per kv head.
        ({}, (3, 64, 64), 3 * 2 * (32 + 4)),
        ({"key_bits": 8}, (1, 64, 64), (64 + 4) + (32 + 4)),
        ({"key_bits": 16, "value_bits": 16}, (2, 64, 64), 2 * 2 * 128),
        # An odd head size takes half a byte more; 80 channels are three groups of at most 32.
        ({}, (1, 7, 7), 2 * (4 + 4)),
        ({"group_size": 32}, (1, 80, 80), 2 * (40 + 6)),
        ({}, (1, 64, 24), (32 + 4) + (12 + 4)),
        # One half mean per channel and block of 64 keys.
        ({"group_size": 32, "block": 64, "key_center": "block"}, (1, 64, 64), 2 * (32 + 4) + 2 * 64 / 64),
    ],
)
def test_bytes_per_token(options, sizes, expected):
    assert KvFormat(**options).bytes_per_token(*sizes) == expected
