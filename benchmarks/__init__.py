"""Measurements of kvfuse beside other runtimes; see docs/benchmarks.md."""
