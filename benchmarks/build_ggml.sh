#!/usr/bin/env bash
# Builds libggml-base and libggml-cpu for this machine into build/ggml/lib, from the source package of llama-cpp-python
# (an ordinary pip download, pinned by hash). About a minute of one core.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
version=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
folder=build/ggml
[ -f "$folder/lib/libggml-cpu.so" ] && exit 0
mkdir -p "$folder/source" "$folder/lib"
requirement=$folder/requirement.txt
echo "llama-cpp-python==$version --hash=sha256:$sha256" >"$requirement"
"$python" -m pip download --quiet --no-deps --no-build-isolation --no-binary llama-cpp-python \
  --require-hashes --requirement "$requirement" --dest "$folder"
tar -xzf "$folder/llama_cpp_python-$version.tar.gz" -C "$folder/source" --strip-components=4 --wildcards \
  '*/vendor/llama.cpp/ggml/*'
touch "$folder/source/ggml.pc.in" # not part of the source package, only asked for by an install that is not done
log=$folder/build.log
{
  cmake -S "$folder/source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON \
    -DGGML_CCACHE=OFF -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF &&
    cmake --build "$folder/build" --target ggml-base ggml-cpu
} >"$log" 2>&1 || { tail -30 "$log" >&2; exit 1; }
cp -P "$(find "$folder/build" -name 'libggml-base.so' -printf '%h')"/libggml-{base,cpu}.so* "$folder/lib/"
