"""Saved states: a file is replaced in one step or left as it was, and what is no state is refused."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from op_harness import OpSession
from token_model import FORMATS, check_state, fresh_state, run, two_layers

import kvfuse

TOKENS = [(7 * index) % 40 for index in range(150)]


def test_save_and_load(tmp_path: Path) -> None:
    session = OpSession(two_layers(FORMATS["centred"]))
    path = tmp_path / "Zustand ä.kv"
    with kvfuse.KvSequence() as sequence:
        run(session, [sequence.id], [TOKENS[:30]])
        sequence.save(path)
        sequence.save(str(path))  # replaces it
        assert path.read_bytes() == sequence.freeze()
        assert os.listdir(tmp_path) == [path.name]
        with kvfuse.KvSequence.load(path) as loaded:
            check_state(session, loaded.id, TOKENS[:30])


@pytest.mark.parametrize("target", ["missing/state", "."])
def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path, target: str) -> None:
    (tmp_path / "other").write_text("untouched")
    with (
        kvfuse.KvSequence() as sequence,
        pytest.raises(kvfuse.SequenceError, match=r"^\[.*\] expected .*; found"),
    ):
        sequence.save(tmp_path / target)
    assert os.listdir(tmp_path) == ["other"]


def test_files_that_are_no_state(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    for name in ("missing", "empty", "."):
        with pytest.raises(kvfuse.SequenceError, match=r"^\[.*\] expected .*; found"):
            kvfuse.KvSequence.load(tmp_path / name)


FULL_DISK = """
import resource, signal, sys
import kvfuse
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with kvfuse.KvSequence.load(sys.argv[1]) as sequence:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        sequence.save(sys.argv[2])
    except kvfuse.SequenceError as error:
        print(error)
    else:
        raise SystemExit("expected an error; found none")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="uses RLIMIT_FSIZE")
def test_a_save_that_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    session = OpSession(two_layers(FORMATS["exact"]))
    with kvfuse.KvSequence() as sequence:
        run(session, [sequence.id], [TOKENS[:100]])
        sequence.save(tmp_path / "large")
        assert (tmp_path / "large").stat().st_size > 8192
    (tmp_path / "state").write_bytes(b"old")
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "large"), str(tmp_path / "state")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.match(r"\[.*state\] expected .*; found", result.stdout)
    assert (tmp_path / "state").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["large", "state"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """Two writers replace the file again and again; each read is one of the two states, whole."""
    session = OpSession(two_layers(FORMATS["int4"]))
    states = [fresh_state(session, TOKENS[:length]) for length in (5, 140)]
    writers = [kvfuse.KvSequence.unfreeze(state) for state in states]
    path = tmp_path / "state"
    writers[0].save(path)
    done = threading.Event()

    def write(sequence: kvfuse.KvSequence) -> None:
        while not done.is_set():
            sequence.save(path)

    threads = [threading.Thread(target=write, args=(sequence,)) for sequence in writers]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            with kvfuse.KvSequence.load(path) as loaded:
                assert loaded.freeze() in states
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert os.listdir(tmp_path) == ["state"]
    for sequence in writers:
        sequence.close()
