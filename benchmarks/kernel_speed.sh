#!/usr/bin/env bash
# Builds kernel_speed.cc against the installed library and runs it: benchmarks/kernel_speed.sh [tokens [queries [rounds]]]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
library=$("$python" -c 'import kvfuse; print(kvfuse.library_path())')
mkdir -p build
"${CXX:-g++}" -std=c++17 -O2 -ffp-contract=off -Icustom_ops/include benchmarks/kernel_speed.cc "$library" \
  "-Wl,-rpath,$(dirname "$library")" -pthread -o build/kernel_speed
build/kernel_speed "$@"
