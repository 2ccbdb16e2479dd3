"""The report: plain data for machines, a table for people."""

import json

import onnx
import pytest
from decoder_graphs import decoder, sdpa
from rich.console import Console

import kvfuse


def mixed(b, names, options):
    y, key, value = sdpa(b, names, options)
    if names["past_key"] == "past.1.key":
        b.output(b.op("ReduceSum", key, keepdims=0), "seen", [])
    return y, key, value


@pytest.fixture(scope="module")
def report():
    return kvfuse.inspect(decoder(layers=2, mask="window+padding", layer=mixed))


def test_the_dictionary_is_plain_data(report):
    found = json.loads(json.dumps(report.to_dict()))
    fused, refused = found["sites"]
    assert {key: fused[key] for key in ("layer", "outcome", "pattern", "reason", "node")} == {
        "layer": "0", "outcome": "fused", "pattern": "decomposed_sdpa", "reason": "", "node": fused["node"],
    }  # fmt: skip
    assert fused["node"].startswith("Softmax 'n_Softmax_")
    assert fused["mask"].keys() == {"kind", "causal", "window", "padding_input", "proof"}
    assert fused["mask"]["padding_input"] == "attention_mask"
    assert (refused["outcome"], refused["mask"], refused["layer"]) == ("refused", None, "")
    assert "past.1.key" in refused["reason"]


def test_every_fused_site_has_numerical_evidence(report):
    evidence = report.fused[0].evidence
    assert {(entry["sequence"], entry["past"]) for entry in evidence} == {
        (5, 0),
        (1, 6),
        (3, 4),
        (2, 5),
        (4, 3),
    }
    assert all(entry["relative_error"] <= 1e-5 for entry in evidence)


def test_bytes_count_the_fused_layers(report):
    # 2 kv heads of 8 channels, keys and values, 4 bytes each.
    assert report.bytes_per_token_before == 2 * 2 * 8 * 4
    assert report.bytes_per_token_after == 2 * (2 * (4 + 2) + 2 * 8 / 64)


def test_the_table_names_outcomes_and_reasons(report):
    console = Console(record=True, width=200, force_terminal=False)
    report.render(console)
    text = console.export_text()
    assert "fused" in text
    assert "window+padding (3 keys)" in text
    assert "also read by" in text
    assert "1 of 2 cache sites fused" in text


def test_no_reason_is_cut_in_a_narrow_window(report):
    console = Console(record=True, width=60, force_terminal=False)
    report.render(console)
    cells = [
        line.split("\u2502")[-2].strip() for line in console.export_text().splitlines() if "\u2502" in line
    ]
    assert report.refused[0].reason.replace(" ", "") in "".join(cells).replace(" ", "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "int4"}, "bytes per token ("),
        ({"format": "exact"}, "bytes per token ("),
        ({}, "bytes per token beyond the exact window of the newest 64 tokens ("),
        ({"n_recent": 4096}, "bytes per token beyond the exact window of the newest 4,096 tokens ("),
        (
            {"format": "int4", "block": 16},
            "bytes per token beyond the exact window of the newest 16 tokens (",
        ),
        (
            {"format": "int4", "n_recent": 1},
            "bytes per token beyond the exact window of the newest 1 token (",
        ),
    ],
)
def test_the_summary_speaks_of_the_tokens_that_are_low_bit(options, words):
    assert words in kvfuse.inspect(decoder(), **options).summary()


def test_the_error_of_require_all_carries_the_report():
    with pytest.raises(kvfuse.RefusedError) as error:
        kvfuse.rewrite(decoder(layers=2, layer=mixed), require_all=True)
    assert [site.outcome for site in error.value.report.sites] == ["fused", "refused"]
    assert error.value.report.model is None


def test_no_site_says_so():
    b = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[N] x) => (float[N] y) {y = Relu(x)}'
    )
    found = kvfuse.inspect(b)
    console = Console(record=True, width=120, force_terminal=False)
    found.render(console)
    assert found.to_dict()["sites"] == []
    assert "no attention with a growing KV cache found" in console.export_text()
