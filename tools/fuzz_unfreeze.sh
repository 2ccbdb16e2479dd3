#!/usr/bin/env bash
# Fuzzes kvfuse_sequence_unfreeze with libFuzzer under ASan and UBSan: tools/fuzz_unfreeze.sh [RUNS] [SEED]
#
# Seeds are states that real runs have frozen, one per format. A crash leaves its input in build/fuzz/.
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-1000000}
seed=${2:-1}
python=${PYTHON:-.venv/bin/python}
out=build/fuzz

clang=${CLANGXX:-}
for name in clang++ clang++-19 clang++-18 clang++-17 clang++-16 clang++-15 clang++-14; do
  [ -n "$clang" ] || ! command -v "$name" >/dev/null || clang=$name
done
[ -n "$clang" ] || { echo "[fuzz] expected clang++ with libFuzzer (Debian: clang-16 libclang-rt-16-dev); found none" >&2; exit 1; }

defines=()
sources=(custom_ops/capi/*.cc custom_ops/cpu/*.cc custom_ops/fuzz/*.cc)
if [ "$(uname -m)" = x86_64 ]; then
  defines=(-DKVFUSE_X86)
else
  sources=($(printf '%s\n' "${sources[@]}" | grep -v /avx))
fi

mkdir -p "$out/corpus"
"$clang" -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
  -ffp-contract=off -DKVFUSE_BUILDING_LIBRARY -DKVFUSE_VERSION='"fuzz"' -Icustom_ops/include -Icustom_ops/cpu \
  "${defines[@]}" "${sources[@]}" -o "$out/unfreeze"
"$python" custom_ops/fuzz/make_seeds.py "$out/seeds"
# An input of 16 KiB may take pages for 64 tokens where it holds one, and no more: 16 MiB in one piece is a bug.
exec "$out/unfreeze" -runs="$runs" -seed="$seed" -max_len=16384 -malloc_limit_mb=16 -rss_limit_mb=2048 -timeout=10 \
  -use_value_profile=1 -print_final_stats=1 -print_funcs=0 -artifact_prefix="$out/" "$out/corpus" "$out/seeds"
