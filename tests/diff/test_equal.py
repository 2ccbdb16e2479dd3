"""What says nothing about a model makes no difference."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from disguise import disguise
from merged_graphs import merged

import kvfuse
from models.tiny_decoder import build

CORPUS = Path(__file__).resolve().parents[1] / "data" / "corpus"
IF_AND_LOOP = """
<ir_version: 8, opset_import: ["": 18, "local": 1]>
g (bool c, float[N] x) => (float[N] y) {
  a = Neg(x)
  n = Constant<value = int64 {3}>()
  y = If(c) <
    then_branch = t () => (float[N] p) { q = Exp(a)  p = local.twice(q) },
    else_branch = e () => (float[N] r) { b = Abs(a)  s = Add(b, x)  r = Mul(s, a) }
  >
}
<domain: "local", opset_import: ["": 18]>
twice (u) => (w) { v = Add(u, u)  w = Relu(v) }
"""


def graphs():
    yield from (pytest.param(onnx.load(path), id=path.stem) for path in sorted(CORPUS.glob("*.onnx")))
    yield pytest.param(build(num_layers=4), id="tiny")
    yield pytest.param(merged(cross=True), id="merged")
    yield pytest.param(onnx.parser.parse_model(IF_AND_LOOP), id="functions")


@pytest.mark.parametrize("model", list(graphs()))
def test_names_and_order_make_no_difference(model):
    for seed in (1, 2):
        found = kvfuse.diff(model, disguise(model, seed))
        assert found.equal, found.text
        assert found.text == "the graphs are equal\n"
        assert found.to_dict() == {"equal": True, "sections": []}


@pytest.mark.parametrize("spelling", ["decomposed", "attention"])
def test_the_text_does_not_depend_on_names_and_order_either(spelling):
    def text(first, second):
        """Without the noted shapes, which the disguise has lost."""
        return [line.split("  # ")[0] for line in kvfuse.diff(first, second).text.splitlines()]

    model = build(spelling, num_layers=3)
    rewritten = kvfuse.rewrite(model).model
    expected = text(model, rewritten)
    assert len(expected) > 20
    for seed in (1, 2):
        assert text(disguise(model, seed), disguise(rewritten, seed + 5)) == expected


def test_doc_strings_producer_and_noted_shapes_make_no_difference():
    model = build()
    other = onnx.ModelProto()
    other.CopyFrom(model)
    other.producer_name, other.doc_string = "someone", "something"
    other.graph.name = "another"
    del other.graph.value_info[:]
    assert kvfuse.diff(model, other).equal


def test_the_storage_of_a_tensor_makes_no_difference(tmp_path):
    model = build()
    onnx.save(build(), tmp_path / "model.onnx", save_as_external_data=True, location="w", size_threshold=0)
    assert kvfuse.diff(model, tmp_path / "model.onnx").equal
    tensor = next(tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT)
    values = onnx.numpy_helper.to_array(tensor)
    tensor.ClearField("raw_data")
    tensor.float_data.extend(values.astype(np.float32).ravel().tolist())
    assert kvfuse.diff(model, tmp_path / "model.onnx").equal
