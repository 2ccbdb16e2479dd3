"""Somebody else reads one link of a decomposed attention: it is fused and right, or refused; never wrong.

Every link can be an output of the graph, be read by a node or in a branch of an If, or have its shape read.
"""

import onnx
import pytest
from graph_cases import assert_equal_runs
from onnx import TensorProto, helper

import kvfuse

EXACT = 4096
GRAPH = """<ir_version: 10, opset_import: ["" : 18]>
decode (float[B,4,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, float[B,2,P,8] past_k, float[B,2,P,8] past_v)
    => (float[B,4,S,8] out, float[B,2,T,8] present_k, float[B,2,T,8] present_v)
    <int64 zero = {0}, int64 one = {1}, int64[1] last = {1}, int64[4] heads = {0, 0, 1, 1},
     float shown = {0}, float hidden = {-inf}, float root = {0.6}, float factor = {0.8}>
{
    query = Neg(q)
    new_k = Neg(k)
    new_v = Neg(v)
    past_1 = Shape<start = 2, end = 3>(past_k)
    new_1 = Shape<start = 2, end = 3>(q)
    past = Squeeze(past_1)
    new = Squeeze(new_1)
    total = Add(past, new)
    positions = Range(past, total, one)
    columns = Range(zero, total, one)
    rows = Unsqueeze(positions, last)
    visible = LessOrEqual(columns, rows)
    added = Where(visible, shown, hidden)
    present_k = Concat<axis = 2>(past_k, new_k)
    present_v = Concat<axis = 2>(past_v, new_v)
    repeated_k = Gather<axis = 1>(present_k, heads)
    repeated_v = Gather<axis = 1>(present_v, heads)
    turned_k = Transpose<perm = [0, 1, 3, 2]>(repeated_k)
    scaled_k = Mul(turned_k, root)
    scaled_q = Mul(query, root)
    raw = MatMul(scaled_q, scaled_k)
    scaled = Mul(raw, factor)
    masked = Add(scaled, added)
    weights = Softmax<axis = -1>(masked)
    broken = IsNaN(weights)
    guarded = Where(broken, shown, weights)
    y = MatMul(guarded, repeated_v)
    out = Neg(y)
}"""
# What the cache becomes on its way through the attention; it is gone, or somewhere else, after a rewrite.
GONE = (
    "past_k", "past_v", "present_k", "present_v", "repeated_k", "repeated_v", "turned_k", "scaled_k", "raw",
    "scaled", "masked", "weights", "broken", "guarded",
)  # fmt: skip
# What the op reads or makes, and the mask's own values.
STAYS = ("query", "new_k", "new_v", "scaled_q", "past", "positions", "visible", "added", "y")
TYPES = {
    **dict.fromkeys(("broken", "visible"), TensorProto.BOOL),
    **dict.fromkeys(("past", "positions"), TensorProto.INT64),
}
RANKS = {"past": 0, "positions": 1, "visible": 2, "added": 2}


def as_output(graph, name):
    """The caller gets it; a cache under one more name than its own."""
    given = name
    if name.startswith(("past_", "present_")):
        graph.node.append(helper.make_node("Identity", [name], ["seen"]))
        given = "seen"
    add_output(graph, given, TYPES.get(name, TensorProto.FLOAT), RANKS.get(name, 4))


def read_by_a_node(graph, name):
    """A number made of it reaches the caller."""
    graph.node.append(helper.make_node("Cast", [name], ["number"], to=TensorProto.FLOAT))
    graph.node.append(helper.make_node("ReduceMax", ["number"], ["seen"], keepdims=0))
    add_output(graph, "seen", TensorProto.FLOAT, 0)


def read_in_a_branch(graph, name):
    """Two branches capture it."""
    branches = {
        key: helper.make_graph(
            [
                helper.make_node("Cast", [name], [f"{key}_number"], to=TensorProto.FLOAT),
                helper.make_node(reduce, [f"{key}_number"], [f"{key}_seen"], keepdims=0),
            ],
            key, [], [helper.make_tensor_value_info(f"{key}_seen", TensorProto.FLOAT, [])],
        )
        for key, reduce in (("then_branch", "ReduceMax"), ("else_branch", "ReduceMin"))
    }  # fmt: skip
    graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [1], [True]))
    graph.node.append(helper.make_node("If", ["yes"], ["seen"], **branches))
    add_output(graph, "seen", TensorProto.FLOAT, 0)


def shape_read(graph, name):
    """Its shape reaches the caller."""
    graph.node.append(helper.make_node("Shape", [name], ["seen"]))
    add_output(graph, "seen", TensorProto.INT64, 1)


def add_output(graph, name, element, rank):
    graph.output.append(helper.make_tensor_value_info(name, element, [None] * rank))


def rewritten(reader, name):
    """The outcome, after checking that it is right: untouched bytes, or equal numbers in every run."""
    model = onnx.parser.parse_model(GRAPH)
    reader(model.graph, name)
    onnx.checker.check_model(model)
    before = model.SerializeToString(deterministic=True)
    report = kvfuse.rewrite(model, n_recent=EXACT)
    assert len(report.sites) == 1
    if report.fused:
        onnx.checker.check_model(report.model)
        assert_equal_runs(model, report.model)
    else:
        assert report.model.SerializeToString(deterministic=True) == before
    return report.sites[0], report


def others(*skipped):
    return [name for name in GONE if name not in skipped]


@pytest.mark.parametrize("reader", [read_by_a_node, read_in_a_branch])
@pytest.mark.parametrize("name", GONE)
def test_a_reader_of_what_goes_refuses_the_site(name, reader):
    site, _ = rewritten(reader, name)
    assert (site.outcome, "also read by" in site.reason) == ("refused", True)


@pytest.mark.parametrize("name", others("present_k", "present_v"))
def test_what_goes_cannot_be_an_output(name):
    site, _ = rewritten(as_output, name)
    assert (site.outcome, "also read by" in site.reason) == ("refused", True)


@pytest.mark.parametrize("name", ["present_k", "present_v"])
def test_a_copy_of_a_present_goes_with_it(name):
    site, report = rewritten(as_output, name)
    assert (site.outcome, report.dropped["outputs"].count("seen")) == ("fused", 1)


@pytest.mark.parametrize("reader", [as_output, read_by_a_node, read_in_a_branch])
@pytest.mark.parametrize("name", STAYS)
def test_a_reader_of_what_stays_gets_the_same_numbers(name, reader):
    site, report = rewritten(reader, name)
    assert (site.outcome, site.reason) == ("fused", "")
    assert len(report.model.graph.output) == 2


@pytest.mark.parametrize("name", others("weights", "guarded"))
def test_a_reader_of_a_shape_gets_the_same_numbers(name):
    site, report = rewritten(shape_read, name)
    assert (site.outcome, site.reason) == ("fused", "")
    assert [output.name for output in report.model.graph.output] == ["out", "seen"]


@pytest.mark.parametrize("name", ["weights", "guarded"])
def test_probabilities_have_no_other_reader_at_all(name):
    site, _ = rewritten(shape_read, name)
    assert (site.outcome, "also read by" in site.reason) == ("refused", True)


def test_no_link_is_forgotten():
    graph = onnx.parser.parse_model(GRAPH).graph
    made = {output for node in graph.node for output in node.output} | {"past_k", "past_v"}
    lengths = {"past_1", "new_1", "new", "total", "columns", "rows"}
    assert made - lengths - {"out"} == set(GONE) | set(STAYS)
