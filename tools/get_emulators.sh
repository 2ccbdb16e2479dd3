#!/usr/bin/env bash
# Installs what tests/native needs to run kernels of other CPUs: an emulator, and a compiler for 64-bit Arm. Without
# apt-get or the right to use it the tests that need them are skipped, and say so.
set -euo pipefail
if command -v qemu-aarch64 qemu-x86_64 aarch64-linux-gnu-g++ >/dev/null; then exit 0; fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
  echo "[emulators] expected qemu-user and g++-aarch64-linux-gnu, or root and apt-get to install them; found neither" >&2
  exit 0
fi
install() {
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --quiet --no-install-recommends \
    qemu-user g++-aarch64-linux-gnu libc6-dev-arm64-cross >/dev/null
}
install 2>/dev/null || { apt-get update --quiet --quiet && install; } ||
  echo "[emulators] expected apt-get to install qemu-user and g++-aarch64-linux-gnu; it failed" >&2
