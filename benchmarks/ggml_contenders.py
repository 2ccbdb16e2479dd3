"""llama.cpp: ggml's flash attention through its C interface.

Needs `libggml-base` and `libggml-cpu` built for this machine: `benchmarks/build_ggml.sh` builds just these
two from the pinned source package of llama-cpp-python into build/ggml. Libraries compiled for older machines
are refused, because the comparison would flatter kvfuse.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contender import Contender, Entry, SkippedError
from benchmarks.workload import CHECKED_ROWS, Workload

FOLDER = Path(os.environ.get("KVFUSE_GGML", Path(__file__).parents[1] / "build" / "ggml" / "lib"))
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}  # enum ggml_type

_P, _I, _L, _F, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_size_t
_BASE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_new_tensor_4d": (_P, (_P, _I, _L, _L, _L, _L)),
    "ggml_view_3d": (_P, (_P, _P, _L, _L, _L, _S, _S, _S)),
    "ggml_view_2d": (_P, (_P, _P, _L, _L, _S, _S)),
    "ggml_cpy": (_P, (_P, _P, _P)),
    "ggml_flash_attn_ext": (_P, (_P, _P, _P, _P, _P, _F, _F, _F)),
    "ggml_new_graph": (_P, (_P,)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_row_size": (_S, (_I, _L)),
    "ggml_backend_alloc_ctx_tensors": (_P, (_P, _P)),
    "ggml_backend_tensor_set": (None, (_P, _P, _S, _S)),
    "ggml_backend_tensor_get": (None, (_P, _P, _S, _S)),
    "ggml_backend_graph_compute": (_I, (_P, _P)),
    "ggml_quantize_chunk": (_S, (_I, _P, _P, _L, _L, _L, _P)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_free": (None, (_P,)),
    "ggml_free": (None, (_P,)),
}
_CPU: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, _I)),
    "ggml_cpu_has_avx512": (_I, ()),
    "ggml_cpu_has_avx512_vnni": (_I, ()),
}


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", _S), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool)]


@cache
def ggml() -> dict[str, Any]:
    """The functions used here, by name.

    Raises:
        SkippedError: there are no libraries, or they were not built for this machine.
    """
    try:
        base = ctypes.CDLL(str(FOLDER / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(FOLDER / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SkippedError(f"no ggml in {FOLDER} (benchmarks/build_ggml.sh)") from error
    functions = {}
    listed = [(base, _BASE), (cpu, _CPU), (base, {"ggml_init": (_P, (_InitParams,))})]
    for library, signatures in listed:
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            functions[name] = function
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    if "avx512_vnni" in flags and not functions["ggml_cpu_has_avx512_vnni"]():
        raise SkippedError("ggml was built without this machine's AVX-512 VNNI")
    return functions


class GgmlFlashAttention(Contender):
    """ggml_cpy of the new rows into the cache, then ggml_flash_attn_ext, one graph per layer.

    Args:
        work: the workload.
        kind: storage type of the cache, a key of TYPES.
    """

    def __init__(self, work: Workload, kind: str) -> None:
        self.ggml, self.work = ggml(), work
        self.backend = self.ggml["ggml_backend_cpu_init"]()
        self.ggml["ggml_backend_cpu_set_n_threads"](self.backend, work.threads)
        self.graphs: list[int] = []
        self.results: list[int] = []
        self.contexts: list[tuple[int, int]] = []
        self.next = self.last = 0
        type_id = TYPES[kind]
        width = work.shape.kv_num_heads * work.shape.head_dim
        self.row = self.ggml["ggml_row_size"](type_id, width)
        self.cache_bytes = 2 * work.key.shape[1] * self.row
        caches = [self._store(rows, type_id) for rows in (work.key, work.value)]
        for _ in range(work.layers):
            self._add_layer(type_id, caches)

    def _store(self, rows: NDArray[np.float32], type_id: int) -> NDArray[Any]:
        """Rows [K, n, D] in the storage type, token after token."""
        tokens = np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(rows.shape[1], -1)
        if type_id == TYPES["f16"]:
            return tokens.astype(np.float16)
        if type_id == TYPES["f32"]:
            return tokens
        stored = np.zeros(len(tokens) * self.row, np.uint8)
        self.ggml["ggml_quantize_chunk"](
            type_id, tokens.ctypes.data, stored.ctypes.data, 0, len(tokens), tokens.shape[1], None
        )
        return stored

    def _add_layer(self, type_id: int, caches: list[NDArray[Any]]) -> None:
        call, work, shape = self.ggml, self.work, self.work.shape
        total, new, dim = work.key.shape[1], work.new_tokens, shape.head_dim
        width, head_bytes = shape.kv_num_heads * dim, call["ggml_row_size"](type_id, dim)
        context = call["ggml_init"](_InitParams(8 << 20, None, True))
        query = call["ggml_new_tensor_4d"](context, 0, dim, new, shape.num_heads, 1)
        stored = [call["ggml_new_tensor_4d"](context, type_id, width, total, 1, 1) for _ in caches]
        fresh = [call["ggml_new_tensor_4d"](context, 0, width, new, 1, 1) for _ in caches]
        graph = call["ggml_new_graph"](context)
        views = []
        for cached, rows in zip(stored, fresh, strict=True):
            end = call["ggml_view_2d"](context, cached, width, new, self.row, self.row * work.past)
            call["ggml_build_forward_expand"](graph, call["ggml_cpy"](context, rows, end))
            views.append(
                call["ggml_view_3d"](context, cached, dim, total, shape.kv_num_heads, self.row, head_bytes, 0)
            )
        mask = call["ggml_new_tensor_4d"](context, 1, total, new, 1, 1) if new > 1 else None
        scale = 1 / np.sqrt(dim)
        output = call["ggml_flash_attn_ext"](context, query, *views, mask, scale, 0.0, 0.0)
        call["ggml_build_forward_expand"](graph, output)
        buffer = call["ggml_backend_alloc_ctx_tensors"](context, self.backend)
        if not buffer:
            raise SkippedError("ggml could not allocate its tensors")
        self.contexts.append((context, buffer))
        self._set(query, work.query)
        for cached, array in zip(stored, caches, strict=True):
            self._set(cached, array)
        for rows, side in zip(fresh, (work.key, work.value), strict=True):
            self._set(rows, side[:, work.past :].transpose(1, 0, 2))
        if mask is not None:
            hidden = np.arange(total) > np.arange(work.past, total)[:, np.newaxis]
            self._set(mask, np.where(hidden, -np.inf, 0).astype(np.float16))
        self.graphs.append(graph)
        self.results.append(output)

    def _set(self, tensor: int, array: NDArray[Any]) -> None:
        array = np.ascontiguousarray(array)
        self.ggml["ggml_backend_tensor_set"](tensor, array.ctypes.data, 0, array.nbytes)

    def step(self) -> None:
        """One graph."""
        self.ggml["ggml_backend_graph_compute"](self.backend, self.graphs[self.next])
        self.last = self.next
        self.next = (self.next + 1) % len(self.graphs)

    def output(self) -> NDArray[np.float32]:
        """The last rows, [H, R, D]."""
        shape = self.work.shape
        rows = np.zeros((self.work.new_tokens, shape.num_heads, shape.head_dim), np.float32)
        self.ggml["ggml_backend_tensor_get"](self.results[self.last], rows.ctypes.data, 0, rows.nbytes)
        last: NDArray[np.float32] = rows[-CHECKED_ROWS:].transpose(1, 0, 2)
        return last

    def close(self) -> None:
        """Frees the tensors."""
        for context, buffer in self.contexts:
            self.ggml["ggml_backend_buffer_free"](buffer)
            self.ggml["ggml_free"](context)
        self.ggml["ggml_backend_free"](self.backend)


ENTRIES = [
    Entry(
        f"ggml_{kind}",
        partial(GgmlFlashAttention, kind=kind),
        1 if kind == "f16" else 0.5,
        f"llama.cpp: ggml flash attention, cache in {kind}",
        score_copies=0.5,
    )
    for kind in ("f16", "q8_0", "q4_0")
]
