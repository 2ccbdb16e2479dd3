# Sourced by scripts that build the library in another way, beside the installed one.
#
# build_variant FOLDER [cmake arguments]: builds into FOLDER and lays the package out in FOLDER/site, to be put in
# PYTHONPATH. Wants `python` set to the interpreter of the environment.
build_variant() {
  local build=$1 site=$1/site version path
  shift
  PATH="$(dirname "$python"):$PATH"
  export PATH
  version=$("$python" -c 'from importlib.metadata import version; print(version("kvfuse"))')
  cmake -S custom_ops -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=None "$@" \
    -DSKBUILD_PROJECT_VERSION="$version" -DPython_EXECUTABLE="$python" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" >/dev/null
  cmake --build "$build"
  rm -rf "$site"
  cmake --install "$build" --prefix "$site" >/dev/null

  # The package as it would be installed: our libraries, and links to the Python files.
  for path in kvfuse/*; do
    [ "$(basename "$path")" = __pycache__ ] || ln -s "$PWD/$path" "$site/kvfuse/"
  done
  ln -s "$PWD/passes" "$site/kvfuse/passes"
  # Before an editable install, and before the source folder of the same name.
  cat >"$site/sitecustomize.py" <<'END'
import os
import sys
from importlib.machinery import PathFinder


class Variant:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] != "kvfuse":
            return None
        return PathFinder.find_spec(name, path or [os.path.dirname(__file__)], target)


sys.meta_path.insert(0, Variant)
END
}
