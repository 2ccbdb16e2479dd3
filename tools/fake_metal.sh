#!/usr/bin/env bash
# Builds the library with its device "metal" over a fake Metal (Linux only), beside the installed one, and runs the tests
# of devices with it: tools/fake_metal.sh [pytest arguments]
#
# The same objects, methods and order of calls as on a Mac; the kernels run as on the emulated device. Leaves
# build/fake-metal/kvfuse_metal_test for tests/metal, and the package in build/fake-metal/site.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
build=$PWD/build/fake-metal
site=$build/site

PYTHON=$python PATH="$(dirname "$python"):$PATH" tools/get_metal_cpp.sh
. tools/variant.sh
build_variant "$build" -DKVFUSE_FAKE_METAL=ON -DKVFUSE_CUDA=OFF -DCMAKE_CXX_FLAGS="-O1 -g"

# Late: command buffers run when somebody waits, so that who reads too early reads old bytes; thread: beside the host.
export PYTHONPATH=$build/site KVFUSE_TEST_DEVICE=metal
KVFUSE_FAKE_METAL_SCHEDULE=late "$python" -m pytest -q -p no:cacheprovider \
  ${*:-tests/metal tests/ep tests/device_cache/test_codes.py tests/device_cache/test_lifecycle.py}
KVFUSE_FAKE_METAL_SCHEDULE=thread "$python" -m pytest -q -p no:cacheprovider \
  ${*:-tests/metal/test_leaks.py tests/ep/test_states.py tests/ep/test_tiny_decoder.py}
