"""kvfuse: low-bit KV caches inside one stateful onnxruntime op."""
