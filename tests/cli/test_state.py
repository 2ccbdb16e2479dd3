"""`kvfuse state show`: what is inside a saved sequence."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import kvfuse
from kvfuse.cli import app
from models import tiny_decoder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    session = kvfuse.InferenceSession(
        kvfuse.rewrite(tiny_decoder.build("decomposed")).model.SerializeToString()
    )
    ids = np.arange(150)[None] % 64
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(150)[None]}
    path = tmp_path_factory.mktemp("state") / "talk.kv"
    with kvfuse.KvSequence() as sequence:
        session.run(None, feeds | {"kv_sequence": np.array([sequence.id])})
        sequence.save(path)
    return path


def test_json_tells_everything(saved):
    result = CliRunner().invoke(app, ["state", "show", str(saved), "--json"])
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert (shown["length"], shown["nbytes"]) == (150, saved.stat().st_size)
    assert [layer["layer"] for layer in shown["layers"]] == ["0", "1"]
    for layer in shown["layers"]:
        # The default preset: blocks of 64 whose last token is 64 or more away are low-bit.
        assert (layer["low_bit"], layer["exact_begin"]) == ([0, 64], 64)
        assert layer["format"]["key_bits"] == 4


def test_the_table_groups_layers_of_one_format(saved):
    result = CliRunner().invoke(app, ["state", "show", str(saved)])
    assert result.exit_code == 0
    assert "150 tokens" in result.stdout
    assert "0 … 1 (2)" in result.stdout


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "other"])
def test_damage_is_one_sentence(saved, tmp_path, damage):
    path = tmp_path / "bad.kv"
    data = bytearray(saved.read_bytes())
    if damage == "cut":
        del data[-1:]
    elif damage == "flipped":
        data[-5] ^= 1
    elif damage == "other":
        data = bytearray(b"not a state at all")
    if damage != "missing":
        path.write_bytes(data)
    result = CliRunner().invoke(app, ["state", "show", str(path)])
    assert result.exit_code == 2
    assert "expected" in result.stderr
    assert "found" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
