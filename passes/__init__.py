"""Graph-to-graph passes over ONNX models; pure, they know nothing of kernels or sessions."""
