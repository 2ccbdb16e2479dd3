"""Broken einsums, folded and grouped heads, sinks, functions and merged decoders: refused, or still the same.

KVFUSE_FUZZ multiplies the number of tries (default 1).
"""

import os
import random
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from decoder_graphs import HEADS, decoder
from equivalence import run
from merged_graphs import merged
from test_functions import core_decoder
from test_merged_decoder import conversation
from test_mutations import mutate
from test_products import einsum, folded, grouped, grouped_einsum, with_sink

import kvfuse

TRIES = int(os.environ.get("KVFUSE_FUZZ", "1"))
FORMS = {
    "einsum": lambda rng: einsum(query=rng.choice(["bhqd", "bqhd"])),
    "einsum in groups": lambda rng: grouped_einsum(),
    "folded": lambda rng: decoder(layer=folded, kv_heads=HEADS, mask_form=rng.choice(["plain", "bias"])),
    "grouped": lambda rng: grouped(biased=rng.choice([False, True])),
    "sink": lambda rng: with_sink(np.array([-1.0, 0.5, 2.0, 3.0]), stable=rng.choice([False, True])),
    "function": lambda rng: core_decoder(),
}


def twist_equation(node, rng):
    """Swaps two letters of an Einsum."""
    attribute = node.attribute[0]
    letters = list(attribute.s.decode())
    first, second = rng.sample([i for i, letter in enumerate(letters) if letter.isalpha()], 2)
    letters[first], letters[second] = letters[second], letters[first]
    attribute.s = "".join(letters).encode()


def outputs(path, layers, conversation_of, session):
    """What each run gives, or None when the mutant does not run or computes nothing finite."""
    try:
        rows = conversation_of(session(path))
    except Exception:  # an invalid mutant: onnxruntime's errors share no base class
        return None
    return rows if all(np.isfinite(row).all() for row in rows) else None


def logits(session):
    return [row["logits"] for row in run(session, (4, 1, 3), 2)]


def merged_logits(session):
    return [conversation(session, schedule=(4, 1, 3)), conversation(session, seed=1, schedule=(2, 1))]


def check(model, folder, layers, conversation_of):
    source, target = folder / "mutant.onnx", folder / "fused.onnx"
    onnx.save(model, source)
    report = kvfuse.rewrite(source, target, n_recent=4096)
    if not report.fused:
        assert target.read_bytes() == source.read_bytes()
        return
    expected = outputs(source, layers, conversation_of, onnxruntime.InferenceSession)
    if expected is None:
        return
    found = conversation_of(kvfuse.InferenceSession(target))
    for one, other in zip(expected, found, strict=True):
        assert np.abs(one - other).max() <= 5e-5 * max(1.0, np.abs(one).max())


@pytest.mark.parametrize("seed", range(20 * TRIES))
@pytest.mark.parametrize("form", FORMS)
def test_a_mutant_is_refused_or_computes_the_same(form, seed, tmp_path):
    rng = random.Random(seed)
    model = FORMS[form](rng)
    einsums = [node for node in model.graph.node if node.op_type == "Einsum"]
    if einsums and rng.random() < 0.4:
        twist_equation(rng.choice(einsums), rng)
    elif form == "function" and rng.random() < 0.7:
        function = model.functions[rng.randrange(2)]
        mutate(
            SimpleNamespace(graph=SimpleNamespace(node=function.node, initializer=model.graph.initializer)),
            rng,
        )
    else:
        mutate(model, rng)
    check(model, tmp_path, len(model.graph.output) // 2, logits)


@pytest.mark.parametrize("seed", range(30 * TRIES))
def test_a_mutant_of_a_merged_decoder_is_refused_or_computes_the_same(seed, tmp_path):
    rng = random.Random(seed)
    model = merged(cross=rng.choice([False, True]))
    choice = next(node for node in model.graph.node if node.op_type == "If")
    mutate(SimpleNamespace(graph=rng.choice(choice.attribute).g), rng)
    check(model, tmp_path, 2, merged_logits)
