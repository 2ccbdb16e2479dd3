"""Formats: presets, single options on top of them, and the bytes they take."""

import pytest

import kvfuse
from kvfuse.formats import PRESETS, KvFormat, make_format


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
        kvfuse.OptionError, match=r"\[format\] expected one of default, int4, int8; found 'int5'"
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
