"""`format="auto"`: each layer's format, from the weights or from a probe, written into the model."""

import json

import numpy as np
import onnx
import pytest

import kvfuse
from benchmarks.offset_model import insert_add
from kvfuse.auto.choice import expected_perplexity_increase, kl_budget
from kvfuse.formats import PRESETS
from models.tiny_decoder import build

DEFAULT = PRESETS["default"]
IDS = np.random.default_rng(5).integers(0, 64, 320)
HEADS, SIZE = 2, 16  # kv heads and head size of the tiny decoder


def nodes(model: onnx.ModelProto) -> dict[str, dict]:
    """The attributes of every op by layer."""
    found = {}
    for node in model.graph.node:
        if node.op_type == "QuantizedKvSdpa":
            values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            found[values["layer"].decode()] = values
    return found


def with_key_bias(spelling: str, layer: int, channels: list[int], size: float) -> onnx.ModelProto:
    """A tiny decoder whose key projection in one layer adds `size` to two channels of every head."""
    model = build(spelling)
    weights = f"model.layers.{layer}.self_attn.k_proj.weight"
    product = next(n for n in model.graph.node if n.op_type == "MatMul" and weights in n.input[1].split("+"))
    key = np.zeros((HEADS, SIZE), np.float32)
    key[:, channels] = size
    bias = key.reshape(-1)
    if "+" in product.input[1]:  # query, key and value side by side: 4, 2 and 2 heads
        bias = np.concatenate([np.zeros(4 * SIZE, np.float32), bias, np.zeros(2 * SIZE, np.float32)])
    insert_add(model, product, bias, "key_bias")
    return model


def test_without_any_bias_the_weights_say_nothing_against_the_default():
    report = kvfuse.rewrite(build(), format="auto")
    assert {entry.format for entry in report.choice.layers} == {DEFAULT}
    assert {entry.reason for entry in report.choice.layers} == {"no constant part of the keys in the graph"}
    assert report.model == kvfuse.rewrite(build(), format="default").model or nodes(report.model) == nodes(
        kvfuse.rewrite(build(), format="default").model
    )


@pytest.mark.parametrize("spelling", ["decomposed", "attention", "group_query_attention"])
def test_a_strong_bias_in_fast_rotary_pairs_gets_8_bit_keys(spelling):
    """Pair 1 turns by 0.3 radians a token: no mean of 64 tokens takes that away."""
    report = kvfuse.rewrite(with_key_bias(spelling, 1, [1, 9], 30.0), format="auto")
    plain, biased = report.choice.layers
    assert (plain.format, plain.key_offset) == (DEFAULT, None)
    assert biased.format.key_bits == 8
    assert biased.format.value_bits == 4
    assert biased.key_offset > 0.2
    assert nodes(report.model)["1"]["key_bits"] == 8
    assert nodes(report.model)["0"]["key_bits"] == 4


@pytest.mark.parametrize("spelling", ["decomposed", "attention", "group_query_attention"])
def test_a_strong_bias_in_slow_pairs_is_what_centring_is_for(spelling):
    """Pair 7 turns by 0.0003 radians a token: in a block it is a constant."""
    report = kvfuse.rewrite(with_key_bias(spelling, 1, [7, 15], 30.0), format="auto")
    assert report.choice.layers[1].format == DEFAULT
    assert 0.02 < report.choice.layers[1].key_offset < 0.15  # 4-bit keys without an offset: 0.08


def test_without_centring_that_bias_needs_8_bits_too():
    report = kvfuse.rewrite(with_key_bias("decomposed", 1, [7, 15], 30.0), format="auto", key_center="none")
    assert report.choice.layers[1].format.key_bits == 8


def test_a_small_bias_changes_nothing():
    report = kvfuse.rewrite(with_key_bias("decomposed", 1, [1, 9], 0.3), format="auto")
    assert report.choice.layers[1].format == DEFAULT


@pytest.fixture(scope="module")
def probed() -> kvfuse.RewriteReport:
    """A random decoder is hard to please: its logits are noise, and its layers are alike."""
    return kvfuse.rewrite(build(head_dim=64), format="auto", probe=IDS, target=0.0005)


def test_the_choice_meets_its_target_and_shows_the_evidence(probed):
    choice = probed.choice
    assert choice.met
    assert choice.damage.kl <= kl_budget(0.0005)
    assert expected_perplexity_increase(choice.damage.kl) <= 0.0005
    assert choice.tokens == len(IDS)
    assert choice.damage.positions == len(IDS) // 2 - 1
    for entry in choice.layers:
        assert 0 < entry.base_key_error < 1
        assert 0 < entry.value_error < 1
    told = json.loads(json.dumps(probed.to_dict(), allow_nan=False))
    assert told["choice"]["layers"][0]["format"] == probed.choice.layers[0].format.attributes()
    assert [site["format"]["key_bits"] for site in told["sites"]] == [
        entry.format.key_bits for entry in choice.layers
    ]


def test_the_choice_is_in_the_nodes_the_metadata_and_the_bytes(probed):
    written = nodes(probed.model)
    for layer, chosen in probed.choice.formats.items():
        for name, value in chosen.attributes().items():
            assert written[layer][name] == (value.encode() if isinstance(value, str) else value)
    record = json.loads(next(p.value for p in probed.model.metadata_props if p.key == "kvfuse"))
    for layer, chosen in probed.choice.formats.items():
        assert {**record["options"], **record["layer_options"].get(layer, {})} == chosen.attributes()
    sizes = [chosen.bytes_per_token(2, 64, 64) for chosen in probed.choice.formats.values()]
    assert probed.bytes_per_token_after == sum(sizes)
    assert probed.choice.bits_per_element == pytest.approx(8 * sum(sizes) / (2 * 2 * 2 * 64))


def test_the_same_probe_gives_the_same_choice(probed):
    again = kvfuse.rewrite(build(head_dim=64), format="auto", probe=list(IDS), target=0.0005)
    assert again.choice.layers == probed.choice.layers


def test_a_loose_target_is_cheap_and_a_tight_one_dear():
    loose, tight = (
        kvfuse.rewrite(build(head_dim=64), format="auto", probe=IDS, target=target).choice
        for target in (0.5, 1e-5)
    )
    assert loose.bits_per_element < tight.bits_per_element
    assert {entry.format.group_size for entry in loose.layers} == {64}


def test_an_impossible_target_is_said_to_be_missed():
    choice = kvfuse.rewrite(build(), format="auto", probe=IDS, target=1e-14).choice
    assert choice.met is False
    assert {entry.format.key_bits for entry in choice.layers} == {16}
    assert "NOT within" in choice.summary()


def test_given_options_hold_for_every_layer():
    report = kvfuse.rewrite(
        build(head_dim=64), format="auto", probe=IDS, target=1e-6, key_bits=4, n_recent=32, block=32
    )
    for entry in report.choice.layers:
        assert (entry.format.key_bits, entry.format.n_recent, entry.format.block) == (4, 32, 32)


def test_without_logits_each_layers_own_error_decides():
    model = build(head_dim=64)
    model.graph.output[0].name = "scores"
    for node in model.graph.node:
        for position, name in enumerate(node.output):
            if name == "logits":
                node.output[position] = "scores"
    choice = kvfuse.rewrite(model, format="auto", probe=IDS).choice
    assert choice.damage is choice.met is None
    assert all(max(entry.key_error, entry.value_error) <= 0.1 for entry in choice.layers)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A model on disk whose layers have different formats, and its original."""
    folder = tmp_path_factory.mktemp("mixed")
    onnx.save(with_key_bias("decomposed", 1, [1, 9], 30.0), folder / "original.onnx")
    report = kvfuse.rewrite(folder / "original.onnx", folder / "auto.onnx", format="auto")
    assert len(set(report.choice.formats.values())) == 2
    return folder


def step(session, ids, past):
    feeds = {
        "input_ids": np.asarray(ids)[None],
        "attention_mask": np.ones((1, past + len(ids)), np.int64),
        "position_ids": np.arange(past, past + len(ids))[None],
    }
    return session.run(["logits"], feeds)[0][0]


def test_layers_of_different_formats_are_chunk_invariant(mixed):
    ids = IDS[:200]
    whole = step(kvfuse.InferenceSession(mixed / "auto.onnx"), ids, 0)
    session, parts = kvfuse.InferenceSession(mixed / "auto.onnx"), []
    for start, end in ((0, 150), *((i, i + 1) for i in range(150, 200))):
        parts.append(step(session, ids[start:end], start))
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-4)


def test_their_state_can_be_saved_and_goes_on(mixed):
    session = kvfuse.InferenceSession(mixed / "auto.onnx")
    step(session, IDS[:200], 0)
    frozen = session.sequences[0].freeze()
    expected = step(session, IDS[200:210], 200)
    other = kvfuse.InferenceSession(mixed / "auto.onnx")
    with kvfuse.KvSequence.unfreeze(frozen) as sequence:
        feeds = {
            "input_ids": IDS[None, 200:210],
            "attention_mask": np.ones((1, 210), np.int64),
            "position_ids": np.arange(200, 210)[None],
            "kv_sequence": np.array([sequence.id]),
        }
        np.testing.assert_allclose(other.run(["logits"], feeds)[0][0], expected, atol=1e-5)


def test_their_caches_move_in_and_out(mixed):
    session = kvfuse.InferenceSession(mixed / "auto.onnx")
    step(session, IDS[:200], 0)
    past = session.export_past()
    other = kvfuse.InferenceSession(mixed / "auto.onnx")
    other.import_past(past)
    assert other.past_length == 200


def test_they_can_be_unfused(mixed):
    kvfuse.unfuse(mixed / "auto.onnx", mixed / "restored.onnx")
    restored, original = (onnx.load(mixed / name).graph.input for name in ("restored.onnx", "original.onnx"))
    assert [value.name for value in restored] == [value.name for value in original]


def test_external_data_is_read_in_place(tmp_path):
    model = build(head_dim=64)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    before = sorted(path.name for path in tmp_path.iterdir())
    report = kvfuse.rewrite(tmp_path / "m.onnx", dry_run=True, format="auto", probe=IDS, target=0.0005)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    inside = kvfuse.rewrite(build(head_dim=64), format="auto", probe=IDS, target=0.0005)
    assert report.choice.formats == inside.choice.formats


def test_a_probe_may_be_files_or_arrays(tmp_path):
    np.save(tmp_path / "ids.npy", IDS)
    np.savez(tmp_path / "inputs.npz", input_ids=IDS[None])
    full = {
        "input_ids": IDS[None],
        "attention_mask": np.ones((1, len(IDS)), np.int64),
        "position_ids": np.arange(len(IDS))[None],
    }
    choices = [
        kvfuse.rewrite(build(), format="auto", probe=probe, target=0.001).choice
        for probe in (IDS, tmp_path / "ids.npy", str(tmp_path / "inputs.npz"), full)
    ]
    for choice in choices[1:]:
        assert choice.formats == choices[0].formats
        # Chunks and one run add floats in another order.
        assert choice.damage.kl == pytest.approx(choices[0].damage.kl, rel=0.05)


class Letters:
    """A tokenizer of single bytes."""

    def encode(self, text):
        return [byte % 64 for byte in text.encode()]


def test_a_probe_may_be_text(tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 8
    (tmp_path / "probe.txt").write_text(text)
    first = kvfuse.rewrite(build(), format="auto", probe=text, tokenizer=Letters())
    second = kvfuse.rewrite(build(), format="auto", probe=tmp_path / "probe.txt", tokenizer=Letters())
    assert first.choice.layers == second.choice.layers
    assert second.choice.probe == str(tmp_path / "probe.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "auto", "probe": IDS[:255]}, r"\[probe\] expected at least 256 tokens; found 255"),
        (
            {"format": "auto", "probe": {"input_ids": IDS[None, :9]}},
            r"\[probe\] expected at least 256 tokens",
        ),
        ({"format": "auto", "probe": "some text"}, r"\[probe\] expected a tokenizer for a text; found none"),
        ({"format": "auto", "probe": [0.5] * 300}, r"\[probe\] expected integer token ids; found float64"),
        ({"format": "auto", "probe": IDS, "target": 0.0}, r"\[target\] expected a relative increase above 0"),
        ({"format": "auto", "target": 0.01}, r"\[target\] expected a probe to measure by; found none"),
        ({"format": "default", "probe": IDS}, r"\[probe\] expected format 'auto' with it"),
        ({"target": 0.01}, r"\[target\] expected format 'auto' with it"),
        ({"guard": "loud"}, r"\[guard\] expected one of warn, off; found 'loud'"),
        ({"format": "auto", "key_bits": 5}, r"\[key_bits\] expected one of 4, 8, 16; found 5"),
        (
            {"format": "auto", "probe": {"input_ids": IDS[None], "x": IDS}},
            r"\[probe\] expected arrays for .*; found also 'x'",
        ),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(kvfuse.OptionError, match=message):
        kvfuse.rewrite(build(), **options)


def test_a_file_that_is_not_there_is_not_taken_for_text(tmp_path):
    with pytest.raises(kvfuse.OptionError, match=r"\[probe\] expected a text or an existing file"):
        kvfuse.rewrite(build(), format="auto", probe=tmp_path / "none.txt")
