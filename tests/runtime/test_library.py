import importlib.util
import os
import shutil
import sys

import numpy as np
import onnxruntime
import pytest
from tiny_feeds import IDS, feeds, logits

import kvfuse
from kvfuse import library


def test_the_library_lies_beside_the_compiled_module():
    from kvfuse import _native

    path = kvfuse.library_path()
    assert os.path.isabs(path)
    assert os.path.isfile(path)
    assert os.path.dirname(path) == os.path.dirname(os.path.realpath(_native.__file__))
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    assert os.path.basename(path) == f"libkvfuse_ops.{suffix}"


def test_a_missing_compiled_module_is_a_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(kvfuse.LibraryError, match=r"\[library\] expected .*kvfuse\._native; found none"):
        kvfuse.library_path()


def test_a_missing_library_file_is_a_sentence(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("kvfuse._native", tmp_path / "_native.so")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(kvfuse.LibraryError, match=r"expected libkvfuse_ops.* found none at .*reinstall"):
        kvfuse.library_path()


def test_registering_twice_is_harmless(exact):
    options = onnxruntime.SessionOptions()
    kvfuse.register(options)
    kvfuse.register(options)
    session = onnxruntime.InferenceSession(exact, options, providers=["CPUExecutionProvider"])
    assert session.run(None, feeds([IDS]))[0].shape == (1, len(IDS), 64)


def test_options_registered_by_the_user_serve_our_session(exact):
    options = onnxruntime.SessionOptions()
    kvfuse.register(options)
    session = kvfuse.InferenceSession(exact, options)
    logits(session, [IDS])
    assert session.past_length == len(IDS)


def test_plain_onnxruntime_runs_a_rewritten_model(exact, session):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(kvfuse.library_path())
    plain = onnxruntime.InferenceSession(exact, options, providers=["CPUExecutionProvider"])
    expected = logits(session, [IDS])
    got = [logits(plain, [IDS[:5]]), logits(plain, [IDS[5:]], past=5)]
    np.testing.assert_allclose(np.concatenate(got, axis=1), expected, atol=1e-5)


def test_plain_onnxruntime_without_the_library_names_our_domain(exact):
    with pytest.raises(Exception, match=r"kvfuse:\w+\(-1\) is not a registered function/op"):
        onnxruntime.InferenceSession(exact, providers=["CPUExecutionProvider"])


def test_a_second_copy_of_the_library_is_noticed(exact, tmp_path, monkeypatch):
    copy = str(shutil.copy(kvfuse.library_path(), tmp_path / "copied_ops.so"))
    monkeypatch.setattr(library, "library_path", lambda: copy)
    with pytest.raises(kvfuse.LibraryError, match="second copy with sequences of its own"):
        kvfuse.InferenceSession(exact)


@pytest.mark.parametrize("copied", [False, True])
def test_a_library_registered_by_path_as_well_is_noticed(exact, tmp_path, copied):
    path = kvfuse.library_path()
    if copied:
        path = str(shutil.copy(path, tmp_path / "copied_ops.so"))
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(path)
    with pytest.raises(kvfuse.LibraryError, match="found one registered by path, perhaps a copy"):
        kvfuse.InferenceSession(exact, options)
