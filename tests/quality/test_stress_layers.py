"""Layers that break plain 4-bit caches: the default format holds, and for the reason that it is made for."""

import dataclasses
import functools

import numpy as np
import pytest
from reference import OpConfig, attend_row, plain_attention

from benchmarks.stress_layers import LAYERS, Layer, plain_outliers, shape_of
from kvfuse.auto.attention import Attention
from kvfuse.auto.rewritten import EXACT
from kvfuse.formats import PRESETS

SIZE = 64
DEFAULT, INT4 = PRESETS["default"], PRESETS["int4"]
PLAIN = dataclasses.replace(INT4, rotation="none")
# The promise for every layer that is like a real one; what unrotated 4-bit rows do to the hard ones.
BOUND, BROKEN = 0.15, 0.4
# The last two are hard in another way: 4-bit values are all their error, or nothing is.
KEYS_BREAK = [
    "constant_offset",
    "moving_offset",
    "outliers_8",
    "outliers_20",
    "massive_first_token",
    "strong_sinks",
]
REALISTIC = [*KEYS_BREAK, "low_entropy", "usual"]


@functools.cache
def layer(name: str) -> Layer:
    return LAYERS[name](SIZE)


@functools.cache
def attention(name: str) -> Attention:
    return layer(name).attention


@functools.cache
def exact(name: str) -> np.ndarray:
    return attention(name).output(EXACT)


@pytest.mark.parametrize("name", REALISTIC)
def test_the_default_format_holds(name):
    assert attention(name).error(DEFAULT, exact(name)) <= BOUND


@pytest.mark.parametrize("name", KEYS_BREAK)
def test_and_the_layer_is_as_hard_as_it_says(name):
    assert attention(name).error(PLAIN, exact(name)) >= BROKEN


def test_the_usual_layer_is_spread_as_a_real_one_is():
    # SmolLM2-135M: first tokens 0.24, newest 64 tokens 0.42, 6 to 104 effective tokens (see the generator).
    shape = shape_of(layer("usual"))
    assert 0.1 <= shape.sink <= 0.4
    assert 0.3 <= shape.newest <= 0.6
    assert 6 <= shape.effective_tokens <= 104


@pytest.mark.parametrize(
    ("name", "base", "without"),
    [
        # Centring takes an offset away.
        ("constant_offset", DEFAULT, {"key_center": "none"}),
        # Rotation spreads an outlier channel; groups of 32 confine it, so that it shows without them.
        ("outliers_20", dataclasses.replace(DEFAULT, group_size=0), {"rotation": "none"}),
        # A massive token would be in its block's mean.
        ("massive_first_token", DEFAULT, {"n_sink": 0}),
        ("strong_sinks", DEFAULT, {"n_sink": 0}),
    ],
)
def test_each_part_of_the_default_has_its_layer(name, base, without):
    lacking = dataclasses.replace(base, **without)
    assert attention(name).error(lacking, exact(name)) >= 1.5 * attention(name).error(base, exact(name))


@pytest.mark.parametrize("chosen", [DEFAULT, INT4], ids=["default", "int4"])
@pytest.mark.parametrize("name", ["constant_offset", "massive_first_token", "outliers_20"])
def test_the_error_is_the_formats_and_not_the_kernels(name, chosen):
    """The float64 model of the op makes the same error, on the last four queries of the whole history."""
    data, steps = layer(name), 4
    config = OpConfig(**chosen.attributes(), scale=SIZE**-0.5)
    expected = attend_row(config, data.query[:, -steps:], data.key, data.value)
    float_output = plain_attention(
        data.query[None, :, -steps:], data.key[None], data.value[None], scale=SIZE**-0.5, causal=True
    )[0]
    found = attention(name).output(chosen)[0, :, -steps:]
    size = np.linalg.norm(float_output)
    # The kernel keeps softmax weights in 16 bits and float32 sums, which leaves less than 1e-4 of the output;
    # the smallest error of a format here is 2.3e-3 of it.
    assert np.linalg.norm(found - expected) <= 5e-4 * size
    error = np.linalg.norm(expected - float_output)
    assert error >= 2e-3 * size


def test_outlier_channels_on_random_numbers():
    """Random keys of 128 channels, two of them scaled by 8, queries of 1.5: rotation is what saves them.

    There is nothing for a window or a sink to hold on to, and the values cancel: the hardest case for keys.
    """
    hard = plain_outliers(128).attention
    floats = hard.output(EXACT)
    window = {"n_recent": 128}
    keys_only = dataclasses.replace(INT4, value_bits=16, **window)
    assert hard.error(keys_only, floats) <= 0.25
    assert hard.error(dataclasses.replace(INT4, codes="full", **window), floats) <= 0.25
    assert hard.error(dataclasses.replace(PLAIN, **window), floats) >= 0.75
    assert hard.error(DEFAULT, floats) <= 0.2
    # What `auto` gives such a layer is within the bound of the others.
    assert hard.error(dataclasses.replace(DEFAULT, key_bits=8), floats) <= BOUND
