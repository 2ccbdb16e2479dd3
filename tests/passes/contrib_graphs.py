"""Decoders with com.microsoft's attentions, and the comparison of an original with its rewritten form.

Dims: B batch_size, H = 4 heads, K kv heads, S new tokens, P cached, T = P + S, D = 32 (GroupQueryAttention
rotates multiples of 16 channels only).
"""

import numpy as np
import onnxruntime
from decoder_graphs import GraphBuilder
from onnx import TensorProto

import kvfuse

MS = "com.microsoft"
HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 4, 2, 32, 24, 32
# f32 sums in another order over up to 14 keys and 128 channels, logits of unit size.
TOLERANCE = {np.float32: 1e-5, np.float16: 5e-3}


def decoder(
    layer, *, layers=2, kv_heads=KV_HEADS, dtype=np.float32, stacked=False, position_ids=False, opset=18
):
    """A decoder of input_ids, attention_mask, position_ids where wanted, and a cache pair (or stack) a layer.

    Args:
        layer: Writes one attention: (builder, x [B, S, C], past inputs) -> (output [B, S, H*D], presents).
        stacked: One cache [2, B, K, P, D] per layer.
    """
    b = GraphBuilder(dtype)
    b.input("input_ids", ["batch", "sequence"], TensorProto.INT64)
    b.input("attention_mask", ["batch", "total"], TensorProto.INT64)
    if position_ids:
        b.input("position_ids", ["batch", "sequence"], TensorProto.INT64)
    shape = ["batch", kv_heads, "past", HEAD_DIM]
    names = [["past.{}"] if stacked else ["past.{}.key", "past.{}.value"]] * layers
    pasts = [
        [b.input(name.format(i), [2, *shape] if stacked else shape) for name in of_layer]
        for i, of_layer in enumerate(names)
    ]
    x = b.op("Gather", b.weight(VOCABULARY, WIDTH), "input_ids")
    for past in pasts:
        y, *presents = layer(b, x, past)
        for name, present in zip(past, presents, strict=True):
            b.output(present, name.replace("past", "present"), None)
        x = b.op("Add", x, b.op("MatMul", y, b.weight(HEADS * HEAD_DIM, WIDTH)))
    b.output(b.op("MatMul", x, b.weight(WIDTH, VOCABULARY)), "logits", ["batch", "sequence", VOCABULARY])
    return b.model(opset)


def mask_lengths(b):
    """seqlens_k and total_sequence_length from attention_mask."""
    count = b.op("ReduceSum", "attention_mask", b.ints(1), keepdims=0)
    last = b.op("Cast", b.op("Sub", count, b.ints(1)), to=TensorProto.INT32)
    return last, b.op("Cast", b.dim("attention_mask", 1), to=TensorProto.INT32)


def group_query(*, kv_heads=KV_HEADS, packed=True, rotary=True, interleaved=0, channels=HEAD_DIM, bias=None,
                sink=False, position_ids=False, extra=None, lengths=mask_lengths, share_lengths=True,
                **attributes):  # fmt: skip
    """A layer writer: GroupQueryAttention told its lengths by attention_mask, as the genai builder does.

    Args:
        packed: Query, key and value in one operand.
        rotary: Rotary embedding inside, of `channels` channels per head.
        bias: Called with the builder; returns the attention_bias.
        sink: With a head_sink.
        position_ids: Reads the graph input position_ids.
        extra: Called with the builder; returns the inputs behind head_sink, "" where there is none.
        lengths: Called with the builder; returns seqlens_k and total_sequence_length.
        share_lengths: Written once for all layers.
    """
    shared = []

    def layer(b, x, past):
        widths = (HEADS * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM)
        if packed:
            operands = [b.op("MatMul", x, b.weight(WIDTH, sum(widths))), "", ""]
        else:
            operands = [b.op("MatMul", x, b.weight(WIDTH, width)) for width in widths]
        if not shared or not share_lengths:
            shared[:] = lengths(b)
        tables = ["", ""]
        if rotary:
            angles = np.arange(64)[:, None] / 10.0 ** (np.arange(channels // 2) / 4)
            tables = [b.const(np.cos(angles)), b.const(np.sin(angles))]
        tail = ["position_ids" if position_ids else "", "" if bias is None else bias(b)]
        tail += [b.const(np.linspace(-1, 2, HEADS)) if sink else "", *([] if extra is None else extra(b))]
        inputs = [*operands, *past, *shared, *tables, *tail]
        while inputs[-1] == "":
            inputs.pop()
        given = {"num_heads": HEADS, "kv_num_heads": kv_heads, "do_rotary": int(rotary)}
        given |= {"rotary_interleaved": interleaved, **attributes}
        return b.op("GroupQueryAttention", *inputs, outputs=3, domain=MS, **given)

    return layer


class Original:
    """Runs a decoder with float caches as its callers do: presents become the next pasts."""

    def __init__(self, model):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.pasts = None

    def run(self, feeds):
        specs = [value for value in self.session.get_inputs() if value.name.startswith("past")]
        if self.pasts is None:
            batch = feeds["input_ids"].shape[0]
            self.pasts = {}
            for spec in specs:
                shape = [d if isinstance(d, int) else 0 if "past" in d else batch for d in spec.shape]
                dtype = np.float16 if "float16" in spec.type else np.float32
                self.pasts[spec.name] = np.zeros(shape, dtype)
        outputs = [value.name for value in self.session.get_outputs()]
        got = dict(zip(outputs, self.session.run(None, {**self.pasts, **feeds}), strict=True))
        presents = {
            name: name.replace("past_key_values", "past").replace("past", "present") for name in self.pasts
        }
        self.pasts = {name: got[present] for name, present in presents.items()}
        return got["logits"]


def rewritten(model, tmp_path):
    """The session of the rewritten model in exact mode, and the report."""
    source, target = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    source.write_bytes(model.SerializeToString())
    report = kvfuse.rewrite(source, target, n_recent=4096)
    assert [site.reason for site in report.refused] == []
    return kvfuse.InferenceSession(target), report


def compare(model, steps, tmp_path, dtype=np.float32):
    """Runs both through `steps` of feeds and which tokens count (bool [B, S] or None); returns the report."""
    session, report = rewritten(model, tmp_path)
    original = Original(model)
    for feeds, counts in steps:
        known = {value.name for value in session.get_inputs()}
        expected = original.run(feeds)
        (got,) = session.run(["logits"], {name: a for name, a in feeds.items() if name in known})
        counts = np.ones(expected.shape[:2], bool) if counts is None else counts
        np.testing.assert_allclose(got[counts], expected[counts], rtol=0, atol=TOLERANCE[dtype])
    return report


def steps(chunks, batch=2, *, position_ids=False, mask=True, offset=0, seed=3):
    """Full rows in chunks."""
    ids = np.random.default_rng(seed).integers(0, 32, (batch, sum(chunks)))
    done = 0
    for chunk in chunks:
        feeds = {"input_ids": ids[:, done : done + chunk]}
        if mask:
            feeds["attention_mask"] = np.ones((batch, done + chunk), np.int64)
        if position_ids:
            where = np.arange(done, done + chunk) + offset
            feeds["position_ids"] = np.broadcast_to(where, (batch, chunk)).copy()
        done += chunk
        yield feeds, None


def ragged(lengths, decoded, position_ids=False):
    """A right-padded prompt of rows with these lengths, then one token per row at a time."""
    lengths = np.asarray(lengths)
    random = np.random.default_rng(5)
    width = lengths.max()
    counts = np.arange(width) < lengths[:, None]
    feeds = {
        "input_ids": random.integers(0, 32, (len(lengths), width)),
        "attention_mask": counts.astype(np.int64),
    }
    if position_ids:
        feeds["position_ids"] = np.broadcast_to(np.arange(width), counts.shape).copy()
    yield feeds, counts
    for step in range(1, decoded + 1):
        total = lengths + step
        feeds = {
            "input_ids": random.integers(0, 32, (len(lengths), 1)),
            "attention_mask": (np.arange(total.max()) < total[:, None]).astype(np.int64),
        }
        if position_ids:
            feeds["position_ids"] = (total - 1)[:, None]
        yield feeds, None
