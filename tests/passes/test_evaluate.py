"""Evaluation: shapes without data, limits instead of exhausted memory, and honest sentences."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decoder_graphs import GraphBuilder, decoder
from kvfuse.passes.evaluate import Evaluator
from kvfuse.passes.probes import hollow
from kvfuse.passes.shape_rules import rule_for
from kvfuse.passes.site import Mismatch, TooLarge
from onnx import TensorProto

import kvfuse

SHAPED = {
    "Transpose": lambda b, x: b.op("Transpose", x, perm=[1, 0, 2]),
    "Transpose without perm": lambda b, x: b.op("Transpose", x),
    "Unsqueeze": lambda b, x: b.op("Unsqueeze", x, b.ints(0, -1)),
    "Squeeze": lambda b, x: b.op("Squeeze", b.op("Unsqueeze", x, b.ints(1)), b.ints(1)),
    "ReduceMean": lambda b, x: b.op("ReduceMean", x, b.ints(-1)),
    "ReduceSum": lambda b, x: b.op("ReduceSum", x, b.ints(0, 2), keepdims=0),
    "Gather of a scalar": lambda b, x: b.op("Gather", x, b.number(0), axis=1),
    "Gather of a table": lambda b, x: b.op("Gather", x, b.const([[0, 1], [1, 0]], np.int64), axis=1),
    "Concat": lambda b, x: b.op("Concat", x, x, axis=-2),
    "MatMul": lambda b, x: b.op("MatMul", x, b.op("Transpose", x, perm=[0, 2, 1])),
    "Reshape with 0 and -1": lambda b, x: b.op("Reshape", x, b.ints(0, -1)),
    "Expand": lambda b, x: b.op("Expand", x, b.ints(5, 1, 1, 1)),
    "Tile": lambda b, x: b.op("Tile", x, b.ints(1, 2, 3)),
    "Slice": lambda b, x: b.op("Slice", x, b.ints(1, -3), b.ints(99, -1), b.ints(1, 2)),
    "Split": lambda b, x: b.op("Split", x, b.ints(1, 3), outputs=2, axis=2)[1],
    "Split evenly": lambda b, x: b.op("Split", x, outputs=2, axis=2, num_outputs=2)[1],
    "Where": lambda b, x: b.op("Where", b.op("Greater", x, b.const(0.0)), x, b.const(np.zeros((4,)))),
    "LayerNormalization": lambda b, x: b.op("LayerNormalization", x, b.const(np.ones(4))),
}


def single(make, opset=18):
    b = GraphBuilder()
    value = make(b, b.input("x", ["a", "b", 4]))
    b.output(value, "y")
    return ir.from_proto(b.model(opset))


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 6, 4)])
def test_shape_rules_say_what_onnxruntime_makes(name, shape):
    model = single(SHAPED[name])
    value = model.graph.outputs[0].producer().inputs[0]
    assert rule_for(value) is not None
    real = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    evaluator = Evaluator(model)
    by_rule = evaluator.on({model.graph.inputs[0]: hollow(shape, np.float32)}).shape(value)
    assert by_rule == evaluator.on({model.graph.inputs[0]: real}).array(value).shape


def test_shapes_of_huge_tensors_need_no_data():
    model = single(lambda b, x: b.op("Shape", b.op("MatMul", x, b.op("Transpose", x, perm=[0, 2, 1]))))
    evaluation = Evaluator(model).on({model.graph.inputs[0]: hollow((1, 1_000_000, 4), np.float32)})
    assert evaluation.array(model.graph.outputs[0]).tolist() == [1, 1_000_000, 1_000_000]


def test_an_op_without_a_rule_is_evaluated_for_its_shape():
    model = single(lambda b, x: b.op("NonZero", x))
    value = model.graph.outputs[0].producer().inputs[0]
    assert rule_for(value) is None
    found = Evaluator(model).on({model.graph.inputs[0]: np.ones((1, 2, 4), np.float32)}).shape(value)
    assert found == (3, 8)


def test_data_that_is_too_large_is_refused_before_it_is_made():
    model = single(lambda b, x: b.op("Relu", x))
    evaluation = Evaluator(model).on({model.graph.inputs[0]: hollow((1, 10**8, 4), np.float32)})
    with pytest.raises(TooLarge, match="needs the data of x"):
        evaluation.array(model.graph.outputs[0])


def test_results_that_are_too_large_end_in_a_refusal_and_not_in_exhausted_memory():
    def table(b, x):
        rows = b.op("Range", b.number(0), b.dim(x, 0), b.number(1))
        return b.op("Equal", b.op("Unsqueeze", rows, b.ints(0)), b.op("Unsqueeze", rows, b.ints(1)))

    model = single(table)
    evaluator = Evaluator(model)
    small = evaluator.on({model.graph.inputs[0]: hollow((1000, 1, 4), np.float32)})
    assert small.array(model.graph.outputs[0]).shape == (1000, 1000)
    large = evaluator.on({model.graph.inputs[0]: hollow((300_000, 1, 4), np.float32)})
    with pytest.raises(TooLarge):
        large.array(model.graph.outputs[0])


def test_an_unbound_input_is_named():
    model = single(lambda b, x: b.op("Add", x, b.input("other", ["a", "b", 4])))
    evaluation = Evaluator(model).on({model.graph.inputs[0]: np.ones((1, 1, 4), np.float32)})
    with pytest.raises(Mismatch, match="needs other"):
        evaluation.array(model.graph.outputs[0])


def test_a_part_with_control_flow_is_refused():
    b = GraphBuilder()
    x = b.input("x", ["a", "b", 4])
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [x], ["z"])],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("z", 1, None)],
    )
    b.output(b.op("If", b.const(True, np.bool_), then_branch=branch, else_branch=branch), "y")
    model = ir.from_proto(b.model())
    evaluation = Evaluator(model).on({model.graph.inputs[0]: np.ones((1, 1, 4), np.float32)})
    with pytest.raises(Mismatch, match="holds a subgraph"):
        evaluation.array(model.graph.outputs[0])


def square_table(limit):
    """A causal (or windowed) mask cut out of a table that is made for all T positions."""

    def finish(b, value, names):
        past, total = (
            b.dim(names["past_key"], 2),
            b.op("Add", b.dim(names["past_key"], 2), b.dim("input_ids", 1)),
        )
        every = b.op("Range", b.number(0), total, b.number(1))
        rows, columns = b.op("Unsqueeze", every, b.ints(1)), b.op("Unsqueeze", every, b.ints(0))
        seen = b.op("LessOrEqual", columns, rows)
        if limit:
            seen = b.op("And", seen, b.op("Greater", columns, b.op("Sub", rows, b.number(limit))))
        seen = b.op("Slice", seen, b.vector(past), b.vector(total), b.ints(0))
        return b.op("Where", seen, value, b.const(-np.inf))

    return kvfuse.inspect(decoder(mask="none", finish=finish)).sites[0].mask


def test_a_square_table_is_probed_as_far_as_memory_allows():
    mask = square_table(0)
    assert mask["kind"] == "causal"
    assert 2000 <= max(probe["past"] for probe in mask["proof"]) < 300_000


def test_a_window_beyond_the_reach_of_the_probes_is_passed_through():
    mask = square_table(50_000)
    assert mask["kind"] == "other"
    assert "contains the number 50000" in mask["proof"][-1]["passed_through"]


def test_a_window_within_the_reach_is_found():
    assert (square_table(1000)["kind"], square_table(1000)["window"]) == ("window", 999)


def test_graph_inputs_may_be_integers_of_any_kind():
    model = decoder(mask="causal+padding")
    next(
        value for value in model.graph.input if value.name == "attention_mask"
    ).type.tensor_type.elem_type = TensorProto.INT32
    assert kvfuse.inspect(model).sites[0].mask["padding_input"] == "attention_mask"
