"""What changes alike in every layer is told once."""

import onnx
import pytest
from rich.console import Console

import kvfuse
from kvfuse.hunks import Line, compare, fold
from kvfuse.text import Name, Value
from models.tiny_decoder import build


@pytest.fixture(scope="module", params=["decomposed", "attention"])
def found(request):
    model = build(request.param, num_layers=30)
    report = kvfuse.rewrite(model)
    assert len(report.fused) == 30
    return kvfuse.diff(model, report.model)


def test_thirty_layers_are_as_readable_as_two(found):
    lines = found.text.splitlines()
    assert len(lines) < 300
    assert (
        len([line for line in lines if "QuantizedKvSdpa" in line]) == 2
    )  # the first layer has the mask as well
    assert "- past_key_values.0.key: f32[batch_size,2,past_sequence_length,16]  (x30)" in lines
    assert "- present.0.value: f32[batch_size,2,past_sequence_length + sequence_length,16]  (x30)" in lines
    assert "@   29 times alike but for numbers in names:" in lines


def test_the_counts_add_up(found):
    nodes = next(section for section in found.sections if section.title == "nodes")
    removed = sum(hunk.count * sum(sign == "-" for sign, _ in hunk.lines) for hunk in nodes.hunks)
    added = sum(hunk.count * sum(sign == "+" for sign, _ in hunk.lines) for hunk in nodes.hunks)
    assert nodes.note.endswith(f"{removed} only in the first, {added} only in the second")
    assert added == 31


def test_the_dictionary_holds_the_text(found):
    data = found.to_dict()
    assert data["equal"] is False
    texts = [line["text"] for part in data["sections"] for hunk in part["hunks"] for line in hunk["lines"]]
    assert all(text in found.text for text in texts)
    assert {"title", "note", "hunks"} == data["sections"][0].keys()


def test_colours_on_a_terminal_and_nowhere_else(found):
    console = Console(record=True, width=200, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        found.render(console)
    assert "\x1b[31m- " in captured.get()
    assert "\x1b[32m+ " in captured.get()
    plain = Console(record=True, width=80, force_terminal=False)
    with plain.capture() as captured:
        found.render(plain)
    assert captured.get() == found.text


def test_a_layer_that_differs_stands_alone():
    model = build(num_layers=6)
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    softmaxes = [node for node in changed.graph.node if node.op_type == "Softmax"]
    for node in softmaxes:
        node.attribute[0].i = 3
    softmaxes[2].attribute[0].i = 1
    section = kvfuse.diff(model, changed).sections[0]
    assert [hunk.count for hunk in section.hunks] == [5, 1]


def test_numbers_in_names_must_agree_with_each_other():
    def pair(weight, other):
        return [("-", Line((Name(f"layers.{weight}.w"), " ", Name(f"layers.{other}.v"))))]

    assert [hunk.count for hunk in fold([pair(1, 1), pair(2, 2), pair(2, 3)])] == [2, 1]


def test_numbers_elsewhere_are_compared():
    def hunk(number):
        return [("-", Line((Value("Softmax.1"), f" = Softmax<axis={number}>()")))]

    assert [found.count for found in fold([hunk(1), hunk(2), hunk(1)])] == [2, 1]


def test_hunks_have_two_lines_of_context():
    first = [Line((str(number),)) for number in range(20)]
    second = [*first[:9], Line(("new",)), *first[10:]]
    (hunk,) = compare(first, second)
    assert [f"{sign}{''.join(line.parts)}" for sign, line in hunk] == [" 7", " 8", "-9", "+new", " 10", " 11"]
