"""Big models and crowded folders: weights are neither loaded nor lost, names and bytes stay as they were."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from decoder_graphs import decoder, sdpa
from equivalence import run
from merged_graphs import merged
from onnx import TensorProto, numpy_helper
from test_merged_decoder import conversation

import kvfuse

GIB = 1 << 30
BIG = 16
EXACT = 4096
REWRITE = """
import json, resource, sys, time
import kvfuse
begun = time.monotonic()
fused = sum(len(kvfuse.rewrite(sys.argv[1], target).fused) for target in sys.argv[2:])
seconds = time.monotonic() - begun
try:  # the kernel's high-water mark of this program; ru_maxrss also counts what it was forked from
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10
except OSError:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"fused": fused, "seconds": seconds, "peak": peak}))
"""


def rewrite_elsewhere(source, *targets, **environment):
    """Rewrites in a process of its own: how many sites, how long, and how much memory at most (bytes)."""
    command = [sys.executable, "-c", REWRITE, str(source), *map(str, targets)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return json.loads(done.stdout)


def external(name, dims, location, offset, length):
    tensor = TensorProto(
        name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def save_external(model, path, location="weights.data"):
    """Saves with all but the small tensors in a file of their own (onnxruntime wants shapes in the model)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=256)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def logits(path, session=kvfuse.InferenceSession):
    return np.concatenate([row["logits"] for row in run(session(path), (4, 1, 3), 2)], axis=1)


def original(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.fixture
def big(tmp_path):
    """A decoder of four layers with 16 weights of 1 GiB, holes in one file; two more share one of them."""

    def touch(b, names):
        for i in range(BIG + 2):
            b.output(b.op("MatMul", names["x"], f"big.{i}"), f"wide.{i}")

    path = tmp_path / "in" / "model.onnx"
    save_external(decoder(layers=4, touch=touch), path)
    data = path.with_name("weights.data")
    begin = data.stat().st_size + 4095 & ~4095
    os.truncate(data, begin + BIG * GIB)
    if data.stat().st_blocks * 512 > GIB:
        pytest.skip("the file system has no holes")
    model = onnx.load(path, load_external_data=False)
    for i in range(BIG + 2):
        offset = begin + min(i, BIG - 1) * GIB
        model.graph.initializer.append(external(f"big.{i}", [16, GIB // 64], data.name, offset, GIB))
    path.write_bytes(model.SerializeToString())
    return path


def test_16_gib_in_seconds_and_little_memory(big, tmp_path):
    data = big.with_name("weights.data")
    before = digest(big), data.stat().st_mtime_ns, data.stat().st_blocks
    targets = big.with_name("a.onnx"), big.with_name("b.onnx")
    found = rewrite_elsewhere(big, *targets)
    assert found["fused"] == 2 * 4
    assert found["seconds"] < 30
    assert found["peak"] < 300e6
    assert (digest(big), data.stat().st_mtime_ns, data.stat().st_blocks) == before
    assert sorted(os.listdir(big.parent)) == ["a.onnx", "b.onnx", "model.onnx", "weights.data"]
    assert targets[0].read_bytes() == targets[1].read_bytes()


def test_16_gib_to_another_folder(big, tmp_path):
    (tmp_path / "out").mkdir()
    found = rewrite_elsewhere(big, tmp_path / "out" / "a.onnx", tmp_path / "out" / "b.onnx")
    assert found["seconds"] < 30
    assert found["peak"] < 300e6
    assert sorted(os.listdir(tmp_path / "out")) == ["a.onnx", "b.onnx", "weights.data"]
    copy = (tmp_path / "out" / "weights.data").stat()
    assert copy.st_size == big.with_name("weights.data").stat().st_size
    assert copy.st_blocks * 512 < GIB


def test_two_processes_write_the_same_bytes(tmp_path):
    source = tmp_path / "model.onnx"
    onnx.save(decoder(layers=3, mask="window+padding"), source)
    for seed in ("1", "2"):
        rewrite_elsewhere(source, tmp_path / f"{seed}.onnx", PYTHONHASHSEED=seed)
    assert (tmp_path / "1.onnx").read_bytes() == (tmp_path / "2.onnx").read_bytes()


def test_external_initializers_inside_the_branches_of_an_if(tmp_path):
    """Also: the output still works after it moved together with its data."""
    source = tmp_path / "in" / "model.onnx"
    model = merged()
    save_external(model, source)
    choice = next(node for node in model.graph.node if node.op_type == "If")
    floats = [
        t for entry in choice.attribute for t in entry.g.initializer if t.data_type == TensorProto.FLOAT
    ]
    with source.with_name("branches.data").open("wb") as file:
        for tensor in floats:
            data = tensor.raw_data
            tensor.CopyFrom(external(tensor.name, tensor.dims, "branches.data", file.tell(), len(data)))
            file.write(data)
    source.write_bytes(model.SerializeToString())
    expected = conversation(original(source))
    (tmp_path / "out").mkdir()
    report = kvfuse.rewrite(source, tmp_path / "out" / "fused.onnx", n_recent=EXACT)
    assert len(report.fused) == 2
    shutil.rmtree(tmp_path / "in")
    (tmp_path / "out").rename(tmp_path / "moved")
    found = conversation(kvfuse.InferenceSession(tmp_path / "moved" / "fused.onnx"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def spread(model, path, names):
    """Saves a model with its largest weights in files of the same name in several folders."""
    onnx.save(model, path)
    model = onnx.load(path)
    largest = sorted(model.graph.initializer, key=lambda tensor: -len(tensor.raw_data))[: len(names)]
    for tensor, name in zip(largest, names, strict=True):
        file = path.parent / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(tensor.raw_data)
        tensor.CopyFrom(external(tensor.name, tensor.dims, name, 0, file.stat().st_size))
        os.utime(file, ns=(0, 0))  # as archives with fixed times leave them
    path.write_bytes(model.SerializeToString())


def test_data_files_of_one_name_do_not_replace_each_other(tmp_path):
    names = ["a/w.data", "b/w.data", "c/w.data", "d/w.data"]
    source = tmp_path / "in" / "model.onnx"
    source.parent.mkdir()
    spread(decoder(layers=2), source, names)
    expected = logits(source, original)
    out = tmp_path / "out"
    out.mkdir()
    for _ in range(2):
        kvfuse.rewrite(source, out / "fused.onnx", n_recent=EXACT)
        assert len(list(out.iterdir())) == 1 + len(names)
        np.testing.assert_allclose(logits(out / "fused.onnx"), expected, rtol=0, atol=2e-5)


def test_weights_of_another_model_with_the_same_size_and_time_are_not_taken_for_ours(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for folder, seed in (("one", 1), ("two", 2)):
        source = tmp_path / folder / "model.onnx"
        model = decoder()
        table = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
        values = np.random.default_rng(seed).standard_normal(tuple(table.dims)).astype(np.float32)
        table.CopyFrom(numpy_helper.from_array(values, table.name))
        save_external(model, source)
        os.utime(source.with_name("weights.data"), ns=(0, 0))
        kvfuse.rewrite(source, out / f"{folder}.onnx", n_recent=EXACT)
        found = logits(out / f"{folder}.onnx")
        np.testing.assert_allclose(found, logits(source, original), rtol=0, atol=2e-5)
    assert len(list(out.iterdir())) == 4


def test_the_output_does_not_replace_the_data_of_its_own_model(tmp_path):
    source = tmp_path / "in" / "model.onnx"
    save_external(decoder(), source)
    data = source.with_name("weights.data")
    before = digest(data)
    with pytest.raises(kvfuse.ModelError, match="own external data"):
        kvfuse.rewrite(source, data)
    assert digest(data) == before
    (tmp_path / "out").mkdir()
    kvfuse.rewrite(source, tmp_path / "out" / "weights.data", n_recent=EXACT)
    found = logits(tmp_path / "out" / "weights.data")
    np.testing.assert_allclose(found, logits(source, original), rtol=0, atol=2e-5)


def one_spoilt(b, names, options):
    y, key, value = sdpa(b, names, options)
    if names["past_key"] == "past.1.key":
        b.output(b.op("ReduceSum", key, keepdims=0), "seen", [])
    return y, key, value


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        (decoder(layers=2), 0),
        (decoder(layers=3, layer=one_spoilt), 1),
        (merged(), 0),
        (merged(cross=True), 4),
    ],
    ids=["all fused", "one refused", "merged", "merged with cross-attention"],
)
def test_the_output_of_the_rewriter_is_left_alone(model, refused, tmp_path):
    source, once, twice = (tmp_path / name for name in ("model.onnx", "once.onnx", "twice.onnx"))
    save_external(model, source)
    assert kvfuse.rewrite(source, once).fused
    report = kvfuse.rewrite(once, twice)
    assert report.fused == ()
    assert twice.read_bytes() == once.read_bytes()
    assert len(report.refused) <= refused
