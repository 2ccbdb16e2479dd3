"""Graphs as text: a case is BEFORE and what a rewrite makes of it; and models run over decode steps.

A model's inputs are fed by their dims (B batch, S new tokens, P cached ones, T = P + S) and a few names; what
is called past… is fed what the run before gave as present….
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import kvfuse
from kvfuse.canonical import model_text
from kvfuse.modelfile import read

CASES = Path(__file__).parent / "cases"
SUFFIX = ".onnxtxt"
BATCH = 2
# f32 sums in another order, over at most 8 keys of unit size.
TOLERANCE = 1e-5
_PARTS = re.compile(
    r"(?P<title>(?:(?!# BEFORE)# .+\n)+)# BEFORE\n"
    r"(?P<before>(?:(?!# (?:AFTER|REFUSED|BEFORE)).*\n)+)"
    r"(?P<golden>(?s:.*))"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One file: a title, a graph, and what becomes of it ("" while that was never written down)."""

    path: Path
    title: str
    before: str
    golden: str

    @property
    def accepted(self) -> bool:
        """Whether something is fused in it, as far as the file says."""
        return self.golden.startswith("# AFTER\n")

    def model(self) -> onnx.ModelProto:
        model = onnx.parser.parse_model(self.before)
        onnx.checker.check_model(model)
        return model

    def write(self, golden: str) -> None:
        """Replaces the part behind BEFORE, and only that."""
        text = self.path.read_text()
        self.path.write_text(text[: len(text) - len(self.golden)] + golden)


def load(path: Path) -> Case:
    parts = _PARTS.fullmatch(path.read_text())
    if parts is None:
        raise ValueError(f"[{path.name}] expected a title, then `# BEFORE` and a graph; found something else")
    title = " ".join(line[2:] for line in parts["title"].splitlines())
    return Case(path, title, parts["before"], parts["golden"])


def paths() -> list[Path]:
    return sorted(CASES.glob(f"*/*{SUFFIX}"))


def outcome(report: kvfuse.RewriteReport) -> str:
    """The golden part: the rewritten graph, or the reason of each refusal."""
    if report.fused:
        return f"# AFTER\n{model_text(read(report.model).model)}"
    reasons = [site.reason for site in (*report.refused, *report.seen)] or [report.summary()]
    # The size of an error is the machine's; that there is one is the point.
    reasons = [re.sub(r"relative error \S+", "relative error …", reason) for reason in reasons]
    return "".join(f"# REFUSED: {reason}\n" for reason in reasons)


def assert_equal_runs(model: onnx.ModelProto, fused: onnx.ModelProto) -> None:
    """Runs both over several decode steps; every output that stayed must be the original's."""
    original = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    session = kvfuse.InferenceSession(fused.SerializeToString())
    kept = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in original.get_outputs()]
    names = [value.name for value in session.get_outputs()]
    assert set(names) <= set(outputs)
    random = np.random.default_rng(11)
    presents: dict[str, np.ndarray] = {}
    constants: dict[str, np.ndarray] = {}
    past = 0
    for count in _steps(model):
        feeds = {}
        for value in original.get_inputs():
            array = _array(value, count, past, random)
            if value.name.startswith("past"):
                array = presents.get(value.name.replace("past", "present", 1), array)
            elif not {"S", "T"} & set(value.shape) and value.type == "tensor(float)":
                array = constants.setdefault(value.name, array)
            feeds[value.name] = array
        expected = dict(zip(outputs, original.run(None, feeds), strict=True))
        found = session.run(names, {name: array for name, array in feeds.items() if name in kept})
        for name, array in zip(names, found, strict=True):
            note = f"{name} behind {past} tokens"
            assert (array.shape, array.dtype) == (expected[name].shape, expected[name].dtype), note
            np.testing.assert_allclose(array, expected[name], rtol=0, atol=TOLERANCE, err_msg=note)
        presents = expected
        past += count


def _steps(model: onnx.ModelProto) -> tuple[int, ...]:
    # onnxruntime's GroupQueryAttention takes chunks behind a past for a single row only.
    grouped = any(node.op_type == "GroupQueryAttention" for node in model.graph.node)
    return (4, 1, 1, 1) if grouped else (4, 1, 2, 1)


def _array(value, count, past, random):
    sizes = {"B": BATCH, "S": count, "P": 0, "T": past + count}
    shape = [dim if isinstance(dim, int) else sizes[dim] for dim in value.shape]
    if value.type == "tensor(float)":
        return random.standard_normal(shape).astype(np.float32)
    if value.name == "use_cache":
        return np.array([past > 0])
    dtype = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}[value.type]
    if value.name == "seqlens":
        return np.full(shape, past + count - 1, dtype)
    if value.name == "total":
        return np.full(shape, past + count, dtype)
    mask = np.ones(shape, dtype)
    # A hole behind a token that every query sees; or a row that begins later than the other.
    hidden = {"attention_mask": slice(1, 2), "left_padding": slice(0, 2), "full_mask": slice(0, 0)}
    mask[1, hidden[value.name]] = 0
    return mask
