"""Decoding with a whole model in a process of its own: speed, time of the prompt, peak and cache memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

import kvfuse
from kvfuse.decoder import Decoder


@dataclass(frozen=True)
class DecodingRun:
    """What one model did at one context.

    Attributes:
        context: prompt tokens.
        tokens_per_second: of greedy decoding after the prompt, one number per burst of steps.
        prefill_seconds: of the prompt.
        peak_bytes: most resident memory of the process so far.
    """

    context: int
    tokens_per_second: list[float]
    prefill_seconds: float
    peak_bytes: int


def peak_bytes() -> int:
    """Most resident memory of this process so far.

    Linux counts what the parent had in `ru_maxrss` across the start of a program, so its own record is read.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def time_decoding(decoder: Decoder, prompt: Sequence[int], steps: int, bursts: int = 1) -> DecodingRun:
    """Feeds a prompt and decodes greedily after it, `bursts` times `steps` tokens, one after the other."""
    decoder.reset()
    start = time.perf_counter()
    logits = decoder.prefill(prompt)
    prefill_seconds, speeds = time.perf_counter() - start, []
    logits = decoder.step([int(np.argmax(logits))])[-1]  # the first step allocates
    for _ in range(bursts):
        start = time.perf_counter()
        for _ in range(steps):
            logits = decoder.step([int(np.argmax(logits))])[-1]
        speeds.append(steps / (time.perf_counter() - start))
    return DecodingRun(len(prompt), speeds, prefill_seconds, peak_bytes())


def open_timed(model: Path, threads: int) -> Decoder:
    """Opens a model, original or rewritten, with that many intra-op threads (0: onnxruntime chooses)."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return Decoder(kvfuse.InferenceSession(str(model), options))


def run_in_process(script: str | Path, *arguments: str | Path) -> Any:
    """Runs a script with `arguments` and `--result FILE`, and returns the JSON it wrote there."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        command = [sys.executable, script, *arguments, "--result", result.name]
        subprocess.run([str(part) for part in command], check=True)
        return json.load(result)


def resident_bytes(model: Path, tokens: Sequence[int]) -> list[int]:
    """Measures what the cache of a rewritten model holds at each of the lengths, in bytes over all layers.

    One layer of the model's own format is filled with random rows. All keys are padding, so that the memory
    is filled without the time that attending over it would take; layers are alike.
    """
    proto = onnx.load(str(model), load_external_data=False)
    nodes = [node for node in proto.graph.node if node.op_type == "QuantizedKvSdpa"]
    cache = json.loads(next(p.value for p in proto.metadata_props if p.key == "kvfuse"))["caches"][0]
    heads, dim = cache["kv_num_heads"], cache["head_dim"]
    session = kvfuse.InferenceSession(_one_layer(nodes[0], heads, dim).SerializeToString())
    random, sizes, length = np.random.default_rng(0), [], 0
    with kvfuse.KvSequence() as sequence:
        for target in tokens:
            rows = random.standard_normal((1, heads, target - length, dim), dtype=np.float32)
            length = target
            feeds = dict.fromkeys(("query", "key", "value"), rows)
            feeds |= {"padding": np.zeros((1, length), np.int64), "kv_sequence": np.array([sequence.id])}
            session.run(None, feeds)
            sizes.append(sequence.nbytes * len(nodes))
    return sizes


def _one_layer(node: onnx.NodeProto, heads: int, dim: int) -> onnx.ModelProto:
    """A model of that op alone, with as many query heads as kv heads and a padding input."""
    names = ["query", "key", "value", "slots", "padding"]
    attend = onnx.NodeProto()
    attend.CopyFrom(node)
    del attend.input[:], attend.output[:], attend.attribute[:]
    attend.attribute.extend(attribute for attribute in node.attribute if attribute.name != "axis")
    attend.input.extend(names)
    attend.output.append("output")
    begin = helper.make_node(
        "KvCacheBegin",
        ["kv_sequence", "kv_past_length", "query"],
        ["slots", "past_length", "past_lengths"],
        domain="kvfuse",
        layers=next(helper.get_attribute_value(a) for a in node.attribute if a.name == "layer").decode(),
    )
    floats = [helper.make_tensor_value_info(name, 1, [1, heads, "S", dim]) for name in names[:3]]
    padding = helper.make_tensor_value_info("padding", 7, [1, "T"])
    sequence = helper.make_tensor_value_info("kv_sequence", 7, [1])
    graph = helper.make_graph(
        [begin, attend],
        "one_layer",
        [*floats, padding, sequence],
        [helper.make_tensor_value_info("output", 1, None)],
        [helper.make_tensor("kv_past_length", 7, [1], [-1])],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("kvfuse", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
