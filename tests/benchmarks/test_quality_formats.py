"""The simulations behind `make quality`: rules on numbers worked out by hand, kvfuse's against its model."""

import numpy as np
import pytest
from reference import OpConfig, attend

torch = pytest.importorskip("torch", reason="torch is not installed (make quality installs it)")

from benchmarks import quality_formats as formats  # noqa: E402
from benchmarks.quality_torch import Seen, TorchDecoder, rotate  # noqa: E402
from benchmarks.quality_torch import attend as torch_attend  # noqa: E402
from kvfuse.formats import PRESETS, KvFormat  # noqa: E402
from models.tiny_decoder import random_weights, settings  # noqa: E402


def row(*values, size=32):
    return torch.tensor([*values, *[0.0] * (size - len(values))])[None]


def test_rules_by_hand():
    # q4_0: scale -8/-8 = 1, codes floor(x + 8.5) - 8: halves go up, +8 does not exist.
    assert formats.q4_0(row(-8.0, 2.5, -2.5, 7.9))[0, :4].tolist() == [-8.0, 3.0, -2.0, 7.0]
    # The sign of the extreme value is that of the scale: +8 is exact, -8 is cut to -7.
    assert formats.q4_0(row(8.0, -7.9))[0, :2].tolist() == [8.0, -7.0]
    # Symmetric: scale 7/7, halves to even.
    assert formats.symmetric(row(7.0, 2.5, -1.5, -7.0), 4, 0, False)[0, :4].tolist() == [7.0, 2.0, -2.0, -7.0]
    # Affine: from -1 to 14 in steps of 1; zero is code 1.
    assert formats.affine(row(-1.0, 14.0, 3.4), 4, 0)[0, :3].tolist() == [-1.0, 14.0, 3.0]
    # Static, one scale a channel over all tokens: 14/7 = 2, halves to even, and 1/7 for the second.
    x = torch.tensor([[[14.0, 1.0], [3.0, 0.4]]])
    np.testing.assert_allclose(formats.static(x, 4, True)[0], [[14.0, 1.0], [4.0, 3 / 7]], rtol=1e-6)
    assert formats.q8_0(row(127.0, 2.5))[0, :2].tolist() == [127.0, 2.0]


def test_the_transform_is_its_own_inverse():
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32))
    torch.testing.assert_close(formats.hadamard(formats.hadamard(x)), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(formats.hadamard(torch.eye(4)), torch.tensor(
        [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2)  # fmt: skip


@pytest.mark.parametrize("chosen", [
    *(PRESETS[name] for name in ("default", "int4", "int4-g64", "k8v4", "int8")),
    KvFormat(n_recent=16), KvFormat(n_recent=0, block=32, n_sink=3, codes="full", rotation="none"),
    KvFormat(key_bits=16, value_bits=4), KvFormat(value_bits=16, n_sink=1),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("window", [0, 70])
def test_simulated_formats_are_the_specifications(chosen, window):
    random = np.random.default_rng(1)
    query, key, value = (random.standard_normal((heads, 150, 64)).astype(np.float32) for heads in (4, 2, 2))
    seen = formats.Simulated(chosen).store(0, *map(torch.from_numpy, (query, key, value)))
    got = torch_attend(*map(torch.from_numpy, (query, key, value)), seen, 0.125, window).numpy()
    config = OpConfig(**chosen.attributes(), scale=0.125, window_left=window - 1 if window else -1)
    want = attend(config, query[None], key[None], value[None])[0]
    # Codes are the same but where a sum of 64 f32 terms rounds to the other side of a tie.
    differing = np.abs(got - want).max(axis=-1) > 1e-4
    assert differing.mean() < 0.02
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)


def test_the_torch_decoder_is_the_models(monkeypatch):
    import sys
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "models"))
    import numpy_decoder
    import numpy_gemma3
    from test_gemma3 import TINY, weights

    assert sys.modules["numpy_gemma3"] is numpy_gemma3
    tokens = [int(i) for i in np.random.default_rng(2).integers(0, 40, 14)]
    config, _ = settings()
    for reference, sizes, drawn in (
        (numpy_decoder.logits, config, random_weights(config)),
        (numpy_gemma3.logits, TINY, weights()),
    ):
        decoder = TorchDecoder(sizes, drawn.__getitem__)
        got = np.concatenate(list(decoder.logits(decoder.hidden(tokens))))
        # Sums of up to 48 terms of size 1 in f32, a few layers deep.
        np.testing.assert_allclose(got, reference(sizes, drawn.__getitem__, tokens), rtol=0, atol=2e-5)


def test_a_store_that_changes_nothing_changes_nothing():
    config, _ = settings()
    decoder = TorchDecoder(config, random_weights(config).__getitem__)
    plain = decoder.hidden([1, 2, 3, 4, 5])
    same = decoder.hidden([1, 2, 3, 4, 5], lambda layer, q, k, v: Seen(q, k, v))
    assert torch.equal(plain, same)
    assert not torch.equal(rotate(plain[None], 100.0), plain[None])
