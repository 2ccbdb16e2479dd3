"""The bars: how much faster than each contender kvfuse has to be, and under which conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.workload import Mode

# What the default preset may cost beyond the plain per-token format, for the same bars.
PRESET_FACTOR = 1.2
AMX, AVX512, AVX2 = "amx", "avx512", "avx2"


@dataclass(frozen=True)
class Bar:
    """One bar: min over `contenders` of their time, divided by kvfuse's, is at least `least`.

    Attributes:
        label: as in tables.
        mode: decode or prefill.
        contenders: the fastest of these counts.
        least: the ratio for the per-token format.
        threads: it is about this many.
        least_tokens: it is about T or P from here on.
        levels: instruction sets of kvfuse's kernel that it is about; empty: all.
        cold_only: only where the bytes of a step do not fit into the second-level caches.
        inverse: the ratio is kvfuse's time over the contender's, and `least` is a most.
    """

    label: str
    mode: Mode
    contenders: tuple[str, ...]
    least: float
    threads: int = 1
    least_tokens: int = 1024
    levels: tuple[str, ...] = (AVX512,)
    cold_only: bool = False
    inverse: bool = False

    def target(self, base: str) -> float:
        """The bar for kvfuse_int4 or kvfuse_default; threads must help both alike."""
        factor = PRESET_FACTOR if base == "kvfuse_default" and self.threads == 1 else 1.0
        return self.least * factor if self.inverse else self.least / factor


_U8 = ("openvino_f32_u8", "openvino_bf16_u8")
_U4 = ("openvino_f32_u4", "openvino_bf16_u4")

BARS: Sequence[Bar] = (
    Bar("exported subgraph", "decode", ("ort_subgraph",), 30),
    Bar("ORT Attention (opset 24)", "decode", ("ort_attention",), 18),
    Bar("ORT GQA f32, shared", "decode", ("ort_gqa_f32",), 12),
    Bar("ORT GQA int8, shared", "decode", ("ort_gqa_int8",), 4.5),
    Bar("ORT GQA int4, shared", "decode", ("ort_gqa_int4",), 6),
    Bar("OpenVINO u8 (faster of f32, bf16)", "decode", _U8, 6),
    Bar("OpenVINO u4 (faster of f32, bf16)", "decode", _U4, 7),
    Bar("llama.cpp f16", "decode", ("ggml_f16",), 10),
    Bar("llama.cpp q4_0", "decode", ("ggml_q4_0",), 18),
    Bar("byte limit (times it, at most)", "decode", ("read",), 1.3, cold_only=True, inverse=True),
    Bar("two threads against one", "decode", ("1thread",), 1.8, threads=2, least_tokens=4096),
    Bar("ORT GQA f32, shared, AVX2 kernel", "decode", ("ort_gqa_f32",), 5, levels=(AVX2,)),
    Bar("OpenVINO bf16", "prefill", ("openvino_bf16_bf16",), 1.3, least_tokens=512, levels=(AMX,)),
    Bar("ORT GQA f32", "prefill", ("ort_gqa_f32",), 5, least_tokens=512, levels=(AMX,)),
    Bar("exported subgraph", "prefill", ("ort_subgraph",), 5, least_tokens=512, levels=(AMX,)),
    Bar("ORT GQA int4", "prefill", ("ort_gqa_int4",), 20, least_tokens=512, levels=(AMX,)),
    Bar("ORT GQA f32", "prefill", ("ort_gqa_f32",), 1.2, least_tokens=512, levels=(AVX512,)),
    Bar("ORT GQA int4", "prefill", ("ort_gqa_int4",), 5, least_tokens=512, levels=(AVX512,)),
)

# SmolLM2-135M, tokens/s rewritten over as exported, by context.
END_TO_END_BARS: Mapping[int, float] = {64: 0.95, 2048: 2.0, 8192: 5.0}


def kernel_level(machine: Mapping[str, Any], mode: Mode) -> str:
    """The instruction set of the kernel that ran: AMX counts for prefill only."""
    kernel = str(machine["kernel"])
    if AMX in kernel:
        return AMX if mode == "prefill" else AVX512
    if kernel == "avx_vnni":  # AVX2 with one more instruction
        return AVX2
    return next((level for level in (AVX512, AVX2) if level in kernel), kernel)


def contenders_of(bar: Bar, base: str) -> tuple[str, ...]:
    """The names in results; the byte limit and the one-thread run belong to a format."""
    if bar.contenders == ("read",):
        return (base.replace("kvfuse", "read"),)
    if bar.contenders == ("1thread",):
        return (f"{base}_1thread",)
    return bar.contenders
