"""Every kernel that this machine can run gives what the reference gives, for every head count and tail."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_runs import FORMATS, HEADS, LENGTH, SIZES, case_name
from numpy.typing import NDArray
from reference import OpConfig, unpack

from kvfuse import _native

Arrays = Mapping[str, NDArray[Any]]
CASES = [case_name(*case) for case in itertools.product(HEADS, SIZES, FORMATS)]
KERNELS = [name for name, reason in _native.kernels() if not reason and name != "reference"]
TILE = 64
# What integer weights cost, as documented in tile_attend.h: a weight times its value's scale is off by at
# most this much of the largest such product in its tile and group of channels.
PLANE = 1 / 65024

pytestmark = pytest.mark.skipif(not KERNELS, reason="this machine runs the reference kernel only")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arrays]:
    """Kernel -> its arrays; each ran in a process of its own, because a process chooses once."""
    folder, found = tmp_path_factory.mktemp("kernels"), {}
    here = Path(__file__).parent
    paths = [os.environ.get("PYTHONPATH", ""), str(here), str(here.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    for kernel in ("reference", *KERNELS):
        path = folder / f"{kernel}.npz"
        command = [sys.executable, str(here / "kernel_runs.py"), str(path)]
        subprocess.run(command, env=environment | {"KVFUSE_KERNEL": kernel}, check=True, timeout=600)
        with np.load(path) as arrays:
            found[kernel] = dict(arrays)
        assert found[kernel]["kernel"] == kernel
    return found


def float_tolerance(case: str) -> float:
    """Relative error of a weight, and so of an output.

    1e-6 where all scores come from integers. The keys that `groups` uses exactly have scores that are sums of
    D float products: partial sums reach |q| |k| = D, a rounding is 2^-24 of that, and the scale 1 / sqrt(D)
    leaves 2^-24 sqrt(D), of which two orders of addition with a few roundings each may differ by four. The
    error of a score is the relative error of its weight.
    """
    size = int(case.split(", ")[1])
    return 1e-6 + (4 * 2.0**-24 * np.sqrt(size) if case.endswith("groups") else 0.0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_states_are_the_same_bytes(results: dict[str, Arrays], kernel: str) -> None:
    names = [name for name in results["reference"] if ":state." in name]
    assert len(names) == 4 * len(CASES)
    for name in names:
        assert results[kernel][name].tobytes() == results["reference"][name].tobytes(), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_integer_scores_are_the_same(results: dict[str, Arrays], kernel: str) -> None:
    """One unit of an integer score is 2e-5 of a weight and more here, far beyond what roundings make.

    Those are `float_tolerance` and, for small weights, that of the exponent x = log(weight): it is first a
    difference and then a product in floats, each off by 2^-24 |x|.
    """
    for case in CASES:
        found, expected = results[kernel][f"{case}:weights"], results["reference"][f"{case}:weights"]
        exponents = np.abs(np.log(np.maximum(expected, 1e-12)))
        tolerance = (float_tolerance(case) + 2.0**-23 * exponents) * expected + 1e-12
        assert (np.abs(found - expected) <= tolerance).all(), case
        assert expected.sum(axis=-1) == pytest.approx(1, abs=LENGTH * 2.0**-24), case


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("part", ["exact", "chunk"])
def test_outputs_of_exact_weights(results: dict[str, Arrays], kernel: str, part: str) -> None:
    for case in CASES:
        found, expected = results[kernel][f"{case}:{part}"], results["reference"][f"{case}:{part}"]
        error = np.linalg.norm(found - expected, axis=-1)
        assert (error <= float_tolerance(case) * np.linalg.norm(expected, axis=-1)).all(), case


@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_of_integer_weights_are_within_the_documented_term(
    results: dict[str, Arrays], kernel: str
) -> None:
    for case in CASES:
        expected = results["reference"][f"{case}:exact"]
        error = np.linalg.norm(results[kernel][f"{case}:integer"] - expected, axis=-1)  # H LENGTH
        floats = float_tolerance(case) * np.linalg.norm(expected, axis=-1)
        assert (error <= plane_bound(results["reference"], case) + floats).all(), case


def plane_bound(arrays: Arrays, case: str) -> NDArray[np.float64]:
    """The most that integer weights change an output by, as a norm [H, LENGTH], from state and weights.

    Per channel: sum over tiles of PLANE * max(weight * scale) * sum of |code|. The rotation of the output
    keeps norms. Values that a query uses exactly do not count.
    """
    name = case.split(", ")[2]
    config, weights = FORMATS[name], arrays[f"{case}:weights"].astype(np.float64)  # H LENGTH T
    scales = arrays[f"{case}:state.value_scales"].astype(np.float64)  # K n G
    size = int(case.split(", ")[1])
    codes = np.abs(unpack(arrays[f"{case}:state.value_codes"], config.value_bits, size).astype(np.float64))
    heads = np.arange(weights.shape[0]) // (weights.shape[0] // scales.shape[0])
    groups = np.arange(size) // (config.group_size or size)
    low = low_bit(config)[:, : scales.shape[1]]  # LENGTH n
    total = np.zeros((*weights.shape[:2], size))
    for begin in range(0, scales.shape[1], TILE):
        part = slice(begin, min(begin + TILE, scales.shape[1]))
        products = weights[:, :, part, np.newaxis] * np.abs(scales)[heads, np.newaxis, part]  # H LENGTH n G
        largest = np.where(low[:, part, np.newaxis], products, 0).max(axis=2)  # H LENGTH G
        sums = np.einsum("pt,htd->hpd", low[:, part].astype(np.float64), codes[heads, part])
        total += PLANE * largest[..., groups] * sums
    return np.asarray(np.linalg.norm(total, axis=-1))


def low_bit(config: OpConfig) -> NDArray[np.bool_]:
    """Which keys [T] the query at each position [LENGTH] sees in low bits."""
    query, key = np.arange(LENGTH)[:, np.newaxis], np.arange(LENGTH)
    low = np.asarray(key <= query)
    if config.block > 1:
        low &= (key // config.block + 1) * config.block <= query - config.n_recent + 1
    return low & (key >= config.n_sink)
