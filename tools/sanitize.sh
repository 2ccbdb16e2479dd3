#!/usr/bin/env bash
# Builds the library under sanitizers, beside the installed one, and runs the tests with it:
#   tools/sanitize.sh address [pytest arguments]   ASan and UBSan; over all that touches the library
#   tools/sanitize.sh thread  [pytest arguments]   TSan; over what runs threads
# The first finding ends the run with an error.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?[sanitize] expected address or thread; found nothing}
shift
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
cxx=${CXX:-g++}
build=$PWD/build/sanitize/$kind
site=$build/site

case $kind in
  address)
    flags='-fsanitize=address,undefined -fno-sanitize-recover=undefined'
    runtimes='libasan.so libubsan.so'
    tests='tests/kernels tests/ops tests/sequences tests/native tests/runtime tests/device/test_probe.py tests/device_cache tests/ep/test_rewind.py tests/ep/test_options.py tests/ep/test_placement.py'
    ;;
  thread)
    flags='-fsanitize=thread'
    runtimes='libtsan.so'
    tests='tests/sequences/test_concurrency.py tests/ops/test_faults.py'
    for kernels in test_preset_over_several_pages test_groups_of_heads test_splits_merge; do  # slow: every GPU thread is one of TSan's
      tests+=" tests/device_cache/test_attention.py::$kernels"
    done
    ;;
  *)
    echo "[sanitize] expected address or thread; found $kind" >&2
    exit 1
    ;;
esac

PYTHON=$python PATH="$(dirname "$python"):$PATH" tools/get_metal_cpp.sh
. tools/variant.sh
build_variant "$build" -DKVFUSE_FAKE_METAL=ON -DKVFUSE_CUDA=OFF -DCMAKE_CXX_COMPILER="$cxx" \
  -DCMAKE_CXX_FLAGS="-O1 -g -fno-omit-frame-pointer $flags"

# First without Python and onnxruntime: leaks of the library show, and so does what runs in a pool of threads.
"$cxx" -std=c++17 -O1 -g -fno-omit-frame-pointer $flags -Icustom_ops/include tests/native/stress.cc \
  "$site/kvfuse/libkvfuse_ops.so" -Wl,-rpath,"$site/kvfuse" -pthread -o "$build/stress"
TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1 \
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 setarch --addr-no-randomize "$build/stress"

for scenario in $("$build/kvfuse_metal_test" --list); do
  TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 setarch --addr-no-randomize \
    "$build/kvfuse_metal_test" "$scenario"
done

# Python is not instrumented, so the runtimes come first; its own leaks are not looked for.
preload=
for runtime in $runtimes libstdc++.so.6; do preload+="$("$cxx" -print-file-name="$runtime") "; done
export PYTHONPATH=$site PYTHONMALLOC=malloc
export OPENBLAS_NUM_THREADS=1  # NumPy's threads are none of ours, and TSan does not see what they wait for
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=8:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
# onnxruntime destroys condition variables that a thread of its has just signalled; the library here has none.
echo race_top:pthread_cond_destroy >"$build/suppressions"
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:history_size=7:suppressions=$build/suppressions:print_suppressions=1
LD_PRELOAD=$preload "$python" - "$site" <<'END'
import sys

import kvfuse._native

found = kvfuse._native.__file__
if not found.startswith(sys.argv[1]):
    raise SystemExit(f"[sanitize] expected kvfuse._native from {sys.argv[1]}; found {found}")
END

# Left out, here or by KVFUSE_SANITIZER: what limits the address space or reads resident memory, which are the
# sanitizer's now; and, of threads, onnxruntime's own pool, whose synchronization TSan cannot see.
export KVFUSE_SANITIZER=$kind
LD_PRELOAD=$preload setarch --addr-no-randomize "$python" -m pytest -q -p no:cacheprovider \
  --deselect tests/ops/test_out_of_memory.py ${*:-$tests}
