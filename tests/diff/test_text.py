"""Canonical text of one model."""

import onnx
import onnx_ir as ir
from disguise import disguise

from kvfuse.canonical import model_text
from models.tiny_decoder import build

MODEL = """
<ir_version: 8, opset_import: ["": 18, "local": 1]>
g (float[N, 4] x, bool c) => (float[N, 4] y)
<float[4, 4] weight = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float small = {0.5}>
{
  later = local.twice(x)
  a = MatMul(x, weight)
  b = Mul(a, small)
  s, i = TopK<axis = -1>(b, two)
  two = Constant<value = int64[1] {2}>()
  y = If(c) <
    then_branch = t () => (float[N, 4] p) { p = Add(b, later) },
    else_branch = e () => (float[N, 4] r) { q = Abs(s)  r = Neg(q) }
  >
}
<domain: "local", opset_import: ["": 18]>
twice (u) => (w) { w = Add(u, u) }
"""
TEXT = """\
opset ai.onnx 18
opset local 1
input x: f32[N,4]
input c: b8[]
%MatMul.1 = MatMul(x, @weight)  # ?
%Mul.1 = Mul(%MatMul.1, f32[]{0.5})  # ?
%TopK.1, %TopK.2 = TopK<axis=-1>(%Mul.1, const i64[1]{2})  # ?, ?
%twice.1 = local::twice(x)  # ?
y = If<else_branch={…}, then_branch={…}>(c)  # f32[N,4]
  else_branch:
    %Abs.1 = Abs(%TopK.1)  # ?
    %output.1 = Neg(%Abs.1)  # f32[N,4]
    output %output.1: f32[N,4]
  then_branch:
    %output.1 = Add(%Mul.1, %twice.1)  # f32[N,4]
    output %output.1: f32[N,4]
output y: f32[N,4]

function local::twice
input %input.1: ?
%output.1 = Add(%input.1, %input.1)  # ?
output %output.1: ?
"""


def test_the_text_is_readable():
    model = ir.from_proto(onnx.parser.parse_model(MODEL))
    assert model_text(model) == TEXT


def test_the_text_does_not_depend_on_names_and_order():
    model = build()
    del model.graph.value_info[:]
    text = model_text(ir.from_proto(model))
    assert model_text(ir.from_proto(disguise(model))) == text
    assert text.count("Softmax") >= 2
