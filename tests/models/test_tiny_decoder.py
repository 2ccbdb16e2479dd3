"""Tiny decoders in every spelling against a NumPy float64 decoder, whole and in pieces."""

import numpy as np
import numpy_decoder
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from decoder_session import DecoderSession

from models import tiny_decoder
from models.config import BuildError
from models.decoder import build_decoder

SPELLINGS = ("decomposed", "attention", "group_query_attention")
ORT_VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
TOTAL = 13
# Logits have unit size and pass about ten f32 reductions over up to 64 terms: 10 · sqrt(64) · 2^-24 ≈ 5e-6.
ATOL = 1e-5

CASES = {spelling: {"spelling": spelling} for spelling in SPELLINGS}
CASES |= {f"{spelling}_window": {"spelling": spelling, "sliding_window": 4} for spelling in SPELLINGS}
CASES |= {f"{spelling}_softcap": {"spelling": spelling, "softcap": 0.8} for spelling in SPELLINGS}
CASES |= {f"{spelling}_one_kv_head": {"spelling": spelling, "kv_num_heads": 1} for spelling in SPELLINGS}
CASES |= {f"{spelling}_no_repeat": {"spelling": spelling, "kv_num_heads": 4} for spelling in SPELLINGS}
CASES |= {f"{spelling}_untied": {"spelling": spelling, "tie_embeddings": False} for spelling in SPELLINGS}
CASES |= {
    "eager": {"style": "eager"},
    "eager_window_softcap": {"style": "eager", "sliding_window": 3, "softcap": 0.8},
    "causal": {"mask": "causal", "attention_mask_input": False},
    "causal_unused_mask": {"mask": "causal"},
    "attention_causal": {"spelling": "attention", "mask": "causal", "attention_mask_input": False},
    "attention_causal_window": {"spelling": "attention", "mask": "causal", "sliding_window": 4},
    "wide_head": {"head_dim": 80, "num_layers": 1, "rope_theta": 100000.0},
    "three_layers": {"num_layers": 3, "num_heads": 9, "kv_num_heads": 3, "hidden_size": 40},
}


@pytest.fixture
def tokens():
    return np.random.default_rng(7).integers(0, 64, size=(2, TOTAL))


def run(options, tokens, chunks, attention_mask=None):
    """Returns onnxruntime's logits, row by row where GroupQueryAttention continues with several tokens."""
    session = DecoderSession(tiny_decoder.build(**options).SerializeToString())
    if options.get("spelling") == "group_query_attention" and max(chunks[1:], default=1) > 1:
        return np.concatenate([session.run(row[None], chunks) for row in tokens])
    return session.run(tokens, chunks, attention_mask)


def expected(options, row, **mask):
    """Returns the NumPy decoder's logits for one unpadded row."""
    config, form = tiny_decoder.settings(**options)
    weights = tiny_decoder.random_weights(config)
    mask = {"window": form.sliding_window, "softcap": form.softcap} | mask
    return numpy_decoder.logits(config, weights.__getitem__, row, **mask)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_checker_accepts_the_graph(options):
    onnx.checker.check_model(tiny_decoder.build(**options), full_check=True)


@pytest.mark.parametrize(
    "chunks", [[TOTAL], [1] * TOTAL, [5, 1, 3, 1, 1, 2]], ids=["prefill", "steps", "ragged"]
)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_logits_equal_the_numpy_decoder(options, chunks, tokens):
    if options.get("spelling") == "attention" and options.get("softcap") and ORT_VERSION < (1, 27):
        pytest.skip(
            "Attention of onnxruntime below 1.27 soft-caps after the mask, so that masked keys leak in"
        )
    got = run(options, tokens, chunks)
    want = [expected(options, row) for row in tokens]
    np.testing.assert_allclose(got, want, rtol=0, atol=ATOL)


def test_window_and_softcap_change_the_logits(tokens):
    plain = expected({}, tokens[0])
    assert np.abs(plain - expected({"sliding_window": 4}, tokens[0])).max() > 0.1
    assert np.abs(plain - expected({"softcap": 0.8}, tokens[0])).max() > 0.02


@pytest.mark.parametrize("chunks", [[TOTAL], [6, 1, 1, 5]], ids=["prefill", "ragged"])
@pytest.mark.parametrize(
    "options",
    [{}, {"style": "eager"}, {"spelling": "attention"}, {"sliding_window": 4}],
    ids=["sdpa", "eager", "attention", "window"],
)
def test_left_padding_is_invisible(options, chunks, tokens):
    padding = (0, 4)
    mask = np.array([[0] * n + [1] * (TOTAL - n) for n in padding])
    got = run(options, tokens, chunks, attention_mask=mask)
    for row, n in enumerate(padding):
        want = expected(options, tokens[row, n:])
        np.testing.assert_allclose(got[row, n:], want, rtol=0, atol=ATOL)
    assert np.isfinite(got).all()


def test_without_a_mask_only_single_steps_are_causal(tokens):
    options = {"mask": "none", "attention_mask_input": False}
    want = [expected(options, row) for row in tokens]
    np.testing.assert_allclose(run(options, tokens, [1] * TOTAL), want, rtol=0, atol=ATOL)
    both_ways = [expected(options, row, causal=False) for row in tokens]
    np.testing.assert_allclose(run(options, tokens, [TOTAL]), both_ways, rtol=0, atol=ATOL)
    assert np.abs(np.subtract(want, both_ways)).max() > 0.1


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_f16_stays_close_to_f32(spelling, tokens):
    got = run({"spelling": spelling, "dtype": "float16"}, tokens, [8, 1, 4])
    assert got.dtype == np.float16
    want = [expected({}, row) for row in tokens]
    # Per layer some fifteen roundings of values below 4 to 11 bits: 2 · 15 · 4 · 2^-12 ≈ 0.03.
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=0, atol=0.03)


def test_inputs_and_outputs_are_named_as_exporters_name_them():
    model = tiny_decoder.build()
    cache = [f"past_key_values.{layer}.{side}" for layer in (0, 1) for side in ("key", "value")]
    assert [i.name for i in model.graph.input] == ["input_ids", "attention_mask", "position_ids", *cache]
    presents = [name.replace("past_key_values", "present") for name in cache]
    assert [o.name for o in model.graph.output] == ["logits", *presents]
    assert [d.dim_param or d.dim_value for d in model.graph.input[3].type.tensor_type.shape.dim] == [
        "batch_size", 2, "past_sequence_length", 16,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spelling", "opsets", "operator"),
    [
        ("decomposed", {"": 18}, "Softmax"),
        ("attention", {"": 23}, "Attention"),
        ("group_query_attention", {"": 22, "com.microsoft": 1}, "GroupQueryAttention"),
    ],
)
def test_each_spelling_has_its_operator_once_per_layer(spelling, opsets, operator):
    model = tiny_decoder.build(spelling)
    assert {entry.domain: entry.version for entry in model.opset_import} == opsets
    assert [node.op_type for node in model.graph.node].count(operator) == 2


def test_group_query_attention_needs_no_position_ids():
    names = [i.name for i in tiny_decoder.build("group_query_attention").graph.input]
    assert "position_ids" not in names
    assert "attention_mask" in names


def test_causal_form_keeps_an_attention_mask_that_nothing_reads():
    graph = tiny_decoder.build(mask="causal").graph
    assert "attention_mask" in [i.name for i in graph.input]
    assert not [node.name for node in graph.node if "attention_mask" in node.input]


@pytest.mark.parametrize(("style", "masked"), [("sdpa", -np.inf), ("eager", np.finfo(np.float32).min)])
def test_style_decides_what_a_masked_score_becomes(style, masked):
    nodes = tiny_decoder.build(style=style).graph.node
    constants = {
        n.output[0]: onnx.numpy_helper.to_array(n.attribute[0].t) for n in nodes if n.op_type == "Constant"
    }
    wheres = [
        [constants[name] for name in n.input if name in constants] for n in nodes if n.op_type == "Where"
    ]
    assert [pair[1].item() for pair in wheres if len(pair) == 2] == [masked] * (2 if style == "sdpa" else 1)


def test_tied_embedding_is_stored_once():
    tied = {i.name for i in tiny_decoder.build().graph.initializer}
    untied = {i.name for i in tiny_decoder.build(tie_embeddings=False).graph.initializer}
    assert untied - tied == {"lm_head.weight"}


def test_equal_seeds_give_equal_bytes():
    first, again, other = (tiny_decoder.build(seed=seed).SerializeToString() for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spelling": "flash"}, r"\[spelling\] expected one of .*; found 'flash'"),
        ({"kv_num_heads": 3}, r"\[kv_num_heads\] expected a divisor of num_heads 4; found 3"),
        ({"head_dim": 15}, r"\[head_dim\] expected an even number; found 15"),
        ({"num_layers": 0}, r"\[num_layers\] expected at least 1; found 0"),
        ({"dtype": "bfloat16"}, r"\[dtype\] expected one of"),
        ({"attention_mask_input": False}, r"\[mask\] expected an attention_mask input"),
        ({"mask": "none", "sliding_window": 2}, r"\[mask\] expected no sliding window"),
        ({"spelling": "attention", "style": "eager"}, r"\[style\] expected spelling"),
        ({"spelling": "group_query_attention", "mask": "causal"}, r"\[mask\] expected \"padding\""),
        ({"colour": 1}, r"\[tiny_decoder\] expected fields of .*; found \['colour'\]"),
    ],
)
def test_impossible_options_are_errors(options, message):
    with pytest.raises(BuildError, match=message):
        tiny_decoder.build(**options)


def test_a_weight_of_the_wrong_shape_is_an_error(tmp_path):
    config, form = tiny_decoder.settings()
    weights = tiny_decoder.random_weights(config)
    weights["model.norm.weight"] = np.ones(5, np.float32)
    model = build_decoder(config, form, weights.__getitem__)
    with pytest.raises(BuildError, match=r"\[model.norm.weight\] expected shape \(32,\); found \(5,\)"):
        ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=0)


def test_command_line_writes_the_same_model(tmp_path, capsys):
    out = tmp_path / "tiny.onnx"
    arguments = ["--out", str(out), "--spelling", "attention", "--sliding-window", "5", "--num-layers", "1"]
    assert tiny_decoder.main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert (
        out.read_bytes()
        == tiny_decoder.build("attention", sliding_window=5, num_layers=1).SerializeToString()
    )


def test_command_line_explains_what_it_cannot_build(tmp_path, capsys):
    assert tiny_decoder.main(["--out", str(tmp_path / "x.onnx"), "--head-dim", "7"]) == 1
    assert capsys.readouterr().err == "[head_dim] expected an even number; found 7\n"
    assert not (tmp_path / "x.onnx").exists()
