"""Real exported graphs (random weights): the sites, masks and reasons that the report must give."""

from pathlib import Path

import pytest

import kvfuse

CORPUS = Path(__file__).resolve().parents[1] / "data" / "corpus"
PADDED = "causal+padding"
FUSED = {
    "llama_optimum_sdpa": ("decomposed_sdpa", PADDED, 0.125, 4, 2, 64),
    "llama_optimum_eager_fp16": ("decomposed_sdpa", PADDED, 0.125, 4, 2, 64),
    "qwen2_optimum_sdpa": ("decomposed_sdpa", PADDED, 0.125, 2, 1, 64),
    "gpt2_optimum_eager": ("decomposed_sdpa", PADDED, 32**-0.5, 2, 2, 32),
    "llama_dynamo_op18": ("decomposed_sdpa", PADDED, 0.125, 4, 2, 64),
    "llama_dynamo_op23": ("concat_attention", PADDED, 0.125, 4, 2, 64),
    "attn23_4d_gqa_causal": ("onnx_attention", "causal", 0.125, 4, 2, 64),
    "attn23_3d_gqa_boolmask": ("onnx_attention", PADDED, 0.125, 4, 2, 64),
    "attn23_extconcat_gqa": ("concat_attention", "causal", 0.125, 4, 2, 64),
}
REFUSED = {
    "attn23_4d_qkout": "also returns its scores",
    "attn23_extconcat_topleft_causal": "aligns is_causal",
    "prim_gqa_interleaved_gather": "does not compute what its description says",
}


@pytest.mark.parametrize("name", FUSED)
def test_sites_are_found_and_described(name):
    report = kvfuse.inspect(CORPUS / f"{name}.onnx")
    pattern, mask, scale, heads, kv_heads, head_dim = FUSED[name]
    assert [site.layer for site in report.fused] == ["0", "1"]
    assert report.refused == ()
    for site in report.fused:
        assert (site.pattern, site.mask["kind"]) == (pattern, mask)
        assert site.mask["padding_input"] == ("attention_mask" if mask == PADDED else None)
        assert site.details["scale"] == pytest.approx(scale, rel=1e-5)
        assert [site.details[key] for key in ("num_heads", "kv_num_heads", "head_dim")] == [
            heads,
            kv_heads,
            head_dim,
        ]


@pytest.mark.parametrize("name", REFUSED)
def test_graphs_that_are_almost_right_are_refused_and_copied_unchanged(name, tmp_path):
    source = CORPUS / f"{name}.onnx"
    report = kvfuse.rewrite(source, tmp_path / "out.onnx")
    assert report.fused == ()
    assert len(report.refused) == 2
    assert all(REFUSED[name] in site.reason for site in report.refused)
    assert (tmp_path / "out.onnx").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("name", ["llama_optimum_sdpa", "llama_dynamo_op18", "gpt2_optimum_eager"])
def test_nothing_of_the_cache_is_left(name, tmp_path):
    import onnx

    kvfuse.rewrite(CORPUS / f"{name}.onnx", tmp_path / "out.onnx")
    graph = onnx.load(tmp_path / "out.onnx").graph
    words = ("past_key_values", "present")
    names = {value.name for value in [*graph.input, *graph.output]}
    names |= {name for node in graph.node for name in [*node.input, *node.output]}
    assert not [name for name in names if name.startswith(words)]
    assert "Softmax" not in {node.op_type for node in graph.node}


def test_the_length_comes_from_the_last_layer_in_a_dynamo_export():
    report = kvfuse.inspect(CORPUS / "llama_dynamo_op18.onnx")
    assert [entry["dims"] for entry in report.rewired] == [["B"]]
