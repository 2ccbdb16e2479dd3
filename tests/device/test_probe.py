"""What every device must compute bit for bit, asked with the small kernels of metal/probe.metal."""

import struct

import numpy as np
import pytest

from kvfuse import _native

DEVICES = [
    pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=reason))
    for name, reason in _native.device_choices()
]
pytestmark = pytest.mark.parametrize("device", DEVICES)
THREADS = 64


def launch(device, kernel, *arguments, rows, count, dtype=np.int32, groups=None, constants=None):
    out = np.zeros((rows, count), dtype)
    passed = [*arguments, out, struct.pack("<if", count, 0.0)]
    groups = groups or [-(-count // THREADS)]
    _native.device_launch(device, kernel, passed, groups, THREADS, constants or {})
    return out


def edge_floats(dtype, kind):
    """Every exponent and both signs, ties and the ends of the range."""
    bits = np.random.default_rng(5).integers(0, 2**kind, 3000, dtype=f"u{kind // 8}")
    return bits.view(dtype)[np.isfinite(bits.view(dtype))]


@np.errstate(all="ignore")
def test_floats(device):
    a, b, c = (np.resize(np.roll(edge_floats(np.float32, 32), turn), 2048) for turn in (0, 17, 400))
    # Half of the triples have results of one size, where contraction would show.
    a[::2], b[::2] = np.random.default_rng(1).standard_normal((2, 1024), np.float32)
    c[::2] = -a[::2] * b[::2]
    out = launch(device, "probe_floats", a, b, c, rows=8, count=2048, dtype=np.float32)
    np.testing.assert_array_equal(out[0], a * b + c)
    assert np.all(out[0][::2] == 0)
    # fma: the product is exact in f64, and so is the sum where both are of one size: then f64 rounds once.
    exact = a[::2].astype(np.float64) * b[::2]
    np.testing.assert_array_equal(out[1][::2], (exact + c[::2]).astype(np.float32))
    np.testing.assert_array_equal(out[2], a / b)
    np.testing.assert_array_equal(out[3], np.sqrt(a))
    np.testing.assert_array_equal(out[4], np.rint(a))
    np.testing.assert_array_equal(out[5], np.minimum(a, b))
    np.testing.assert_array_equal(out[6], np.maximum(a, b))
    np.testing.assert_array_equal(out[7], a * c + b * a)


@np.errstate(all="ignore")
def test_halves(device):
    a, b = (np.resize(np.roll(edge_floats(np.float16, 16), turn), 2048) for turn in (0, 17))
    ties = np.arange(2048, dtype=np.uint16).view(np.float16).astype(np.float32) * np.float32(1.0005)
    c = np.resize(np.concatenate([edge_floats(np.float32, 32)[:500], ties]), 2048)
    c[:8] = [1 + 2**-11, 1 + 3 * 2**-11, 65519.9, 65520, 2**-25, 3 * 2**-26, -(2**-24), 1e-30]
    out = launch(device, "probe_halves", a, b, c, rows=7, count=2048, dtype=np.float16)
    for row, expected in enumerate((a + b, a - b, a * b, a / b, a * b + a, c.astype(np.float16), a)):
        np.testing.assert_array_equal(out[row], expected.astype(np.float16), err_msg=str(row))


def test_ties_and_tables(device):
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 8388607.5, 1e30, -0.0], np.float32)
    for select, expected in ((0, values * 3), (1, np.rint(values)), (2, np.resize([0.5, 1.5, 2.5, -0.5], 8))):
        out = np.zeros(8, np.float32)
        arguments = [values, out, struct.pack("<if", 8, 3.0)]
        _native.device_launch(device, "probe_scale", arguments, [1], 32, {0: select})
        np.testing.assert_array_equal(out.view(np.int32), expected.astype(np.float32).view(np.int32))


def test_integers(device):
    edges = np.array([0, 1, -1, 2**31 - 1, -(2**31), 127, -128, 0x7F80FF01, 0x01FF807F], np.int64)
    random = np.random.default_rng(3).integers(-(2**31), 2**31, 500)
    a = np.concatenate([edges, random]).astype(np.int32)
    b = np.roll(a, 5)
    out = launch(device, "probe_integers", a, b, rows=14, count=a.size)
    x, y = a.view(np.uint32), b.view(np.uint32)
    bytes_a, bytes_b = (v.view(np.int8).reshape(-1, 4).astype(np.int32) for v in (a, b))
    binary = [format(value, "032b") for value in x]
    nibble = (x >> 4) & 15
    # A byte product keeps its 16 bits, as a short: -128 * -128 = 16384 fits.
    expected = [
        (x + y).view(np.int32),
        (x * y).view(np.int32),
        a >> (y & 31).astype(np.int32),
        (x >> (y & 31)).view(np.int32),
        [text.count("1") for text in binary],
        [len(text) - len(text.lstrip("0")) for text in binary],
        [len(text) - len(text.rstrip("0")) for text in binary],
        np.where(nibble > 7, nibble.astype(np.int64) - 16, nibble),
        nibble,
        bytes_a[:, 0],
        np.sum(bytes_a * bytes_b, axis=1),
        (a.astype(np.int64) * b) >> 32,
        a,
        bytes_a[:, 3] + bytes_a[:, 1],
    ]
    for row, values in enumerate(expected):
        if row == 12:  # through a float: a device may make a signalling NaN a quiet one
            keep = ~np.isnan(a.view(np.float32))
            np.testing.assert_array_equal(out[row][keep], a[keep])
        else:
            np.testing.assert_array_equal(out[row], values, err_msg=str(row))


def test_lanes(device):
    a = np.random.default_rng(4).integers(-50, 50, 128).astype(np.int32)
    out = launch(device, "probe_lanes", a, rows=18, count=128).reshape(18, 4, 32)
    rows, lane = a.reshape(4, 32), np.arange(32)
    every = np.ones((1, 32), np.int32)
    expected = [
        rows[:, lane ^ 5],
        rows[:, np.where(lane < 3, lane, lane - 3)],
        rows[:, np.where(lane > 28, lane, lane + 3)],
        rows[:, lane * 7 % 32],
        rows[:, 9:10] * every,
        rows[:, :1] * every,
        rows.sum(1, keepdims=True) * every,
        rows.max(1, keepdims=True) * every,
        rows.min(1, keepdims=True) * every,
        np.bitwise_or.reduce(rows, axis=1)[:, None] * every,
        np.bitwise_and.reduce(rows, axis=1)[:, None] * every,
        np.bitwise_xor.reduce(rows, axis=1)[:, None] * every,
        rows.cumsum(1) - rows,
        (rows > 40).any(1)[:, None] * every,
        (rows > -40).all(1)[:, None] * every,
        rows[:, lane ^ 31],
        np.ones((4, 1), np.int32) * (lane == 0),
        (lane ^ 1) + 1000 * (np.arange(4)[:, None] * 32 + (lane ^ 1)),
    ]
    for row, values in enumerate(expected):
        np.testing.assert_array_equal(out[row], values, err_msg=str(row))


def test_positions(device):
    shape = (2, 3, 2)  # groups in z, y, x
    count = 12 * THREADS
    out = launch(device, "probe_positions", rows=7, count=count, groups=[2, 3, 2]).reshape(7, *shape, THREADS)
    z, y, x, thread = np.indices((*shape, THREADS))
    for row, expected in enumerate((x, y, z, thread, thread % 32, thread // 32, np.full_like(x, 32))):
        np.testing.assert_array_equal(out[row], expected, err_msg=str(row))


@pytest.mark.parametrize("threads", [32, 128, 1024])
def test_sum_over_a_threadgroup(device, threads):
    values = np.random.default_rng(6).integers(-1000, 1000, 3 * threads).astype(np.int32)
    out = np.zeros(3, np.int32)
    _native.device_launch(device, "probe_sum", [values, out], [3], threads)
    np.testing.assert_array_equal(out, values.reshape(3, threads).sum(1))
