#!/usr/bin/env bash
# All that there is to say about the AMX kernel, on a machine that has it (Linux, x86-64, g++; no network is used):
#   benchmarks/amx.sh            builds into build/amx, proves the kernel on the vectors of tests/native with the real
#                                tiles, times prefill against AVX-512 and against onnxruntime's GroupQueryAttention f32
# PYTHON must have onnxruntime, numpy, onnx, pybind11, scikit-build-core, cmake and ninja.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
build=$PWD/build/amx

PATH="$(dirname "$python"):$PATH" cmake -S custom_ops -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DSKBUILD_PROJECT_VERSION=0.1.0 -DPython_EXECUTABLE="$(command -v "$python")" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" >/dev/null
cmake --build "$build"
site=$build/site
rm -rf "$site"
cmake --install "$build" --prefix "$site" >/dev/null
for path in kvfuse/*; do
  name=$(basename "$path")
  case $name in __pycache__ | *.so) ;; *) [ -e "$site/kvfuse/$name" ] || ln -s "$PWD/$path" "$site/kvfuse/$name" ;; esac
done
ln -s "$PWD/passes" "$site/kvfuse/passes"
export PYTHONPATH=$site

flags="-std=c++17 -O2 -ffp-contract=off -fno-math-errno -Icustom_ops/include -Icustom_ops/cpu"
library=$site/kvfuse/libkvfuse_ops.so
for program in tests/native/kernel_vectors benchmarks/kernel_speed; do
  g++ $flags "$program.cc" "$library" "-Wl,-rpath,$(dirname "$library")" -pthread -o "$build/$(basename "$program")"
done

echo "== vectors"
"$build/kernel_vectors" --kernel amx --kernel avx512_vnni
echo "== decode, then prefill: nanoseconds per query head and key"
"$build/kernel_speed" 4096 1 21
"$build/kernel_speed" 1024 1024 5
"$build/kernel_speed" 4096 512 5
if [ -f benchmarks/attention.py ]; then
  for kernel in amx avx512_vnni; do
    echo "== prefill in a session, KVFUSE_KERNEL=$kernel"
    KVFUSE_KERNEL=$kernel "$python" benchmarks/attention.py --modes prefill --shapes A --prompts 512,1024,2048,4096 \
      --threads 1 --contenders 'ort_gqa_f32|ort_subgraph' --rounds 9 --seconds 10
  done
fi
