#!/usr/bin/env bash
# Type-checks kvfuse/ and passes/ under their installed names (passes/ installs as kvfuse.passes).
set -euo pipefail
cd "$(dirname "$0")/.."
tree=build/typecheck
rm -rf "$tree" && mkdir -p "$tree/kvfuse"
for path in kvfuse/*; do
  [ "$(basename "$path")" = __pycache__ ] || ln -s "$PWD/$path" "$tree/kvfuse/"
done
ln -s "$PWD/passes" "$tree/kvfuse/passes"
MYPYPATH="$tree" exec "${PYTHON:-.venv/bin/python}" -m mypy --config-file pyproject.toml -p kvfuse "$@"
