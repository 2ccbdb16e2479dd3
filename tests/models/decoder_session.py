"""Runs a decoder that takes and gives its cache, chunk after chunk, in plain onnxruntime."""

import numpy as np
import onnxruntime

FLOAT = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class DecoderSession:
    """One model; `run` starts with an empty cache, `step` goes on.

    Args:
        model: a path, or the serialized model.
    """

    def __init__(self, model):
        self._session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        self._inputs = self._session.get_inputs()
        self._outputs = [output.name for output in self._session.get_outputs()]
        self.past = {}

    def run(self, tokens, chunks, attention_mask=None):
        """Feeds tokens int [batch, total] in chunks of those lengths; returns logits [batch, total, vocab].

        Positions count the attended tokens of each row, as callers of left-padded batches do.
        """
        tokens = np.asarray(tokens, dtype=np.int64)
        mask = np.ones_like(tokens) if attention_mask is None else np.asarray(attention_mask, dtype=np.int64)
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
        self.reset(len(tokens))
        results, start = [], 0
        for length in chunks:
            end = start + length
            results.append(self.step(tokens[:, start:end], mask[:, :end], positions[:, start:end]))
            start = end
        return np.concatenate(results, axis=1)

    def reset(self, batch_size):
        """Empties the cache."""
        self.past = {
            i.name: np.zeros((batch_size, i.shape[1], 0, i.shape[3]), FLOAT[i.type])
            for i in self._inputs
            if i.name.startswith("past_key_values.")
        }

    def step(self, tokens, attention_mask, position_ids):
        """Feeds one chunk and keeps the grown cache; returns its logits."""
        feeds = {
            "input_ids": tokens,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        } | self.past
        wanted = {i.name for i in self._inputs}
        feeds = {name: value for name, value in feeds.items() if name in wanted}
        results = dict(zip(self._outputs, self._session.run(None, feeds), strict=True))
        self.past = {name: results[name.replace("past_key_values", "present")] for name in self.past}
        return results["logits"]
