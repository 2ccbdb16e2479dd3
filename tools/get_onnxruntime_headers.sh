#!/usr/bin/env bash
# Puts onnxruntime's C API headers into build/onnxruntime-headers, unless a folder that has them is known already.
#
# Looked for in this order: KVFUSE_ORT_INCLUDE, build/onnxruntime-headers, the system's include folders, and last
# the npm package below, which carries them inside an iOS framework. PyPI has no package with these headers.
set -euo pipefail
cd "$(dirname "$0")/.."

package=com.github.asus4.onnxruntime@0.4.9  # headers of API 29
sha256=e59788788818fdde1b2e522e766a21ba0f7d8391de55737abf81e32cc801785d
inside='package/Plugins/iOS~/onnxruntime.xcframework/ios-arm64/onnxruntime.framework/Headers'
least=24
target=build/onnxruntime-headers

has_headers() {
  local header
  for header in "$1/onnxruntime_c_api.h" "$1/onnxruntime/onnxruntime_c_api.h" "$1/onnxruntime/core/session/onnxruntime_c_api.h"; do
    [ -f "$header" ] && [ "$(sed -n 's/^#define ORT_API_VERSION //p' "$header")" -ge "$least" ] && return 0
  done
  return 1
}

for folder in "${KVFUSE_ORT_INCLUDE:-}" "$target" /usr/include /usr/local/include /opt/homebrew/include; do
  if [ -n "$folder" ] && has_headers "$folder"; then
    echo "onnxruntime headers: $folder"
    exit 0
  fi
done

fail() {
  echo "[onnxruntime headers] expected API $least or newer on the system or from npm; found none: $1." \
    "Install them yourself and set KVFUSE_ORT_INCLUDE to their folder." >&2
  exit 1
}

command -v npm >/dev/null || fail "npm is not installed"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
(cd "$scratch" && npm pack --silent "$package" >/dev/null) || fail "npm could not get $package"
archive=$(echo "$scratch"/*.tgz)
found=$( (sha256sum "$archive" 2>/dev/null || shasum -a 256 "$archive") | cut -d' ' -f1)  # macOS has the latter
[ "$found" = "$sha256" ] || fail "$package has another sha256 than the pinned one"
tar -xzf "$archive" -C "$scratch" "$inside"
mkdir -p "$(dirname "$target")"
rm -rf "$target"
mv "$scratch/$inside" "$target"
echo "onnxruntime headers: $target (from $package)"
