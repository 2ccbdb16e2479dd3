#!/usr/bin/env bash
# Puts Apple's metal-cpp (C++ headers over Metal's Objective-C API, Apache-2.0) into build/metal-cpp, unless a folder
# that has it is known already.
#
# Looked for in this order: KVFUSE_METAL_CPP, build/metal-cpp, and last the source archive of the PyPI package below,
# which carries it unchanged. The hash is checked before anything in the archive is read.
set -euo pipefail
cd "$(dirname "$0")/.."

package=pymetal-cpp==0.1.5  # metal-cpp of macOS 15
sha256=1118062f635277a2781659fbc4e7e5bac7d565d6948a3461c3b04d6425c15a0e
inside=pymetal_cpp-0.1.5/thirdparty/metal-cpp
target=build/metal-cpp
python=${PYTHON:-.venv/bin/python}

for folder in "${KVFUSE_METAL_CPP:-}" "$target"; do
  if [ -n "$folder" ] && [ -f "$folder/Metal/Metal.hpp" ] && [ -f "$folder/Foundation/Foundation.hpp" ]; then
    echo "metal-cpp: $folder"
    exit 0
  fi
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo "$package --hash=sha256:$sha256" >"$scratch/requirements.txt"
# Without build isolation: pip asks the archive's build backend for its name, and that backend is ours as well.
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation \
  --require-hashes --requirement "$scratch/requirements.txt" --dest "$scratch" || {
  echo "[metal-cpp] expected the source archive of $package with sha256 $sha256 from PyPI; pip could not get it." \
    "Fetch metal-cpp yourself and set KVFUSE_METAL_CPP to its folder." >&2
  exit 1
}
tar -xzf "$scratch"/*.tar.gz -C "$scratch" "$inside/Foundation" "$inside/Metal" "$inside/LICENSE.txt"
mkdir -p "$(dirname "$target")"
rm -rf "$target"
mv "$scratch/$inside" "$target"
echo "metal-cpp: $target (from $package)"
