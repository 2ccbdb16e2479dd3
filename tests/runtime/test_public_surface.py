import subprocess
import sys

import pytest

import kvfuse

SURFACE = {
    "DeviceError",
    "DeviceInfo",
    "InferenceSession",
    "KVFuseError",
    "KvSequence",
    "LibraryError",
    "ModelError",
    "OptionError",
    "PrecisionWarning",
    "RefusedError",
    "RewriteReport",
    "SequenceError",
    "__version__",
    "devices",
    "diff",
    "inspect",
    "library_path",
    "memory_in_use",
    "register",
    "reorder",
    "rewrite",
    "set_memory_limit",
    "unfuse",
}


def test_the_public_surface_is_exactly_this():
    assert set(kvfuse.__all__) == SURFACE
    assert set(dir(kvfuse)) == SURFACE
    for name in SURFACE:
        assert getattr(kvfuse, name) is not None


def test_every_error_is_a_kvfuse_error():
    errors = [name for name in SURFACE if name.endswith("Error")]
    assert len(errors) == 7
    assert all(issubclass(getattr(kvfuse, name), kvfuse.KVFuseError) for name in errors)


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert kvfuse.__version__ == version("kvfuse")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'rewrit'"):
        kvfuse.rewrit  # noqa: B018


@pytest.mark.parametrize(
    "statement", ["import kvfuse", "import kvfuse.cli", "from kvfuse import KVFuseError"]
)
def test_importing_loads_nothing_heavy(statement):
    heavy = "{'onnxruntime', 'onnx', 'onnx_ir', 'onnxscript', 'numpy'}"
    code = f"{statement}; import sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
