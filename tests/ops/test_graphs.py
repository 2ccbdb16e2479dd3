"""The op among other nodes: chained types, parallel execution, branches, saved and optimized models."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from op_graph import Graph, build_model
from op_harness import OpSession, assert_close, random_history
from reference import OpConfig, attend

from kvfuse import library_path

CONFIG = OpConfig(n_recent=3, block=2, n_sink=1, scale=0.3, softcap=4.0, codes="full", group_size=32)


def session_of(
    model: onnx.ModelProto, options: onnxruntime.SessionOptions | None = None
) -> onnxruntime.InferenceSession:
    options = options or onnxruntime.SessionOptions()
    options.register_custom_ops_library(library_path())
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def plain_node(inputs: list[str], output: str, config: OpConfig = CONFIG) -> onnx.NodeProto:
    return helper.make_node("QuantizedKvSdpa", inputs, [output], domain="kvfuse", **config.attributes())


def model_of(
    nodes: list[onnx.NodeProto], outputs: dict[str, int], *extra: onnx.ValueInfoProto
) -> onnx.ModelProto:
    shapes = {"query": ["B", 4, "S", 16], "key": ["B", 2, "S", 16], "value": ["B", 2, "S", 16]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    results = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()]
    graph = helper.make_graph(nodes, "test", [*inputs, *extra], results)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("kvfuse", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def test_types_and_shapes_flow_through_chained_nodes() -> None:
    """Two precisions chained through the op: its element types and symbolic shapes have to be inferred."""
    names = ("query", "key", "value")
    halves = [helper.make_node("Cast", [name], [f"{name}16"], to=TensorProto.FLOAT16) for name in names]
    nodes = [
        plain_node(["query", "key", "value"], "first"),
        *halves,
        helper.make_node("Cast", ["first"], ["first16"], to=TensorProto.FLOAT16),
        plain_node(["first16", "key16", "value16"], "second"),
        helper.make_node("Transpose", ["second"], ["turned"], perm=[0, 2, 1, 3]),
    ]
    session = session_of(model_of(nodes, {"turned": TensorProto.FLOAT16}))
    (output,) = session.get_outputs()
    assert output.type == "tensor(float16)"
    assert output.shape == ["B", "S", 4, 16]
    history = random_history(1, 9)
    feeds = dict(zip(names, history.part(0, 9), strict=True))
    (found,) = session.run(None, feeds)
    rounded = [feeds[name].astype(np.float16).astype(np.float32) for name in names]
    first = attend(CONFIG, *history.part(0, 9)).astype(np.float16).astype(np.float32)
    expected = attend(CONFIG, first, rounded[1], rounded[2])
    # The first output's own error may flip its rounding to half: one ulp, 2^-10, of queries of size 2 more.
    assert np.abs(found.swapaxes(1, 2) - expected).max() < 2e-3


@pytest.mark.parametrize("threads", [1, 3])
def test_parallel_execution_of_independent_layers(threads: int) -> None:
    layers = tuple(OpConfig(layer=f"layers.{index}", n_recent=index) for index in range(6))
    options = onnxruntime.SessionOptions()
    options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.inter_op_num_threads = threads
    session = session_of(build_model(Graph(layers)), options)
    history = random_history(2, 30)
    names = [f"output_{index}" for index in range(6)]
    for begin, end in ((0, 12), (12, 13), (13, 30)):
        query, key, value = (np.ascontiguousarray(tensor) for tensor in history.part(begin, end))
        found = session.run(names, {"query": query, "key": key, "value": value})
        for layer, output in zip(layers, found, strict=True):
            assert_close(output, attend(layer, query, history.key, history.value, past=begin))


@pytest.mark.parametrize("slots", [True, False])
def test_attributes_survive_optimizing_and_saving(tmp_path: Path, slots: bool) -> None:
    graph = Graph((CONFIG,), slots=slots)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # it warns that an optimized model should stay on this machine
    session_of(build_model(graph), options)
    saved = onnx.load(tmp_path / "optimized.onnx")
    kept = [node for node in saved.graph.node if node.op_type == "QuantizedKvSdpa"]
    assert len(kept) == 1
    found = {field.name: helper.get_attribute_value(field) for field in kept[0].attribute}
    expected = CONFIG.attributes()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (value.encode() if isinstance(value, str) else pytest.approx(value, rel=1e-7))
    history = random_history(3, 7)
    query, key, value = history.part(0, 7)
    session = session_of(saved)
    (output,) = session.run(["output_0"], {"query": query, "key": key, "value": value})
    np.testing.assert_array_equal(output, OpSession(graph, device="cpu").run(*history.part(0, 7)))


def test_inside_a_branch() -> None:
    """The taken branch appends, the other does not; outer values and state are reached from inside."""
    then = helper.make_graph(
        [plain_node(["query", "key", "value"], "attended")],
        "then",
        [],
        [helper.make_tensor_value_info("attended", TensorProto.FLOAT, None)],
    )
    skip = helper.make_graph(
        [helper.make_node("Identity", ["query"], ["passed"])],
        "else",
        [],
        [helper.make_tensor_value_info("passed", TensorProto.FLOAT, None)],
    )
    nodes = [helper.make_node("If", ["use"], ["output"], then_branch=then, else_branch=skip)]
    use = helper.make_tensor_value_info("use", TensorProto.BOOL, [])
    session = session_of(model_of(nodes, {"output": TensorProto.FLOAT}, use))
    history = random_history(4, 8)
    past = 0
    for begin, end, taken in ((0, 3, True), (0, 5, False), (3, 4, True), (4, 8, True)):
        query, key, value = (np.ascontiguousarray(tensor) for tensor in history.part(begin, end))
        (found,) = session.run(None, {"query": query, "key": key, "value": value, "use": np.array(taken)})
        if taken:
            assert_close(found, attend(CONFIG, query, history.key, history.value, past=past))
            past = end
        else:
            np.testing.assert_array_equal(found, query)
