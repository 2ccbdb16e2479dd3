"""The list of devices, and what each refuses before it runs anything."""

import os
import re
import struct
import subprocess
import sys

import numpy as np
import pytest

from kvfuse import _native

CHOICES = dict(_native.device_choices())
USABLE = [name for name, reason in CHOICES.items() if not reason]


def test_every_device_is_usable_or_says_why():
    assert list(CHOICES) == ["metal", "cuda", "emulated"]
    for name, reason in CHOICES.items():
        assert re.fullmatch(r"|[\w ].*[^.]", reason), name
    assert sys.platform != "linux" or CHOICES["emulated"] == ""
    assert sys.platform == "darwin" or CHOICES["metal"] == "built without Metal: not macOS"


def probe(device="emulated", kernel="probe_scale", arguments=None, threads=32, constants=None, groups=(1,)):
    default = [np.zeros(8, np.float32), np.zeros(8, np.float32), struct.pack("<if", 8, 1.0)]
    chosen = {0: 0} if constants is None else constants
    _native.device_launch(device, kernel, arguments or default, list(groups), threads, chosen)


FLOATS = np.zeros(8, np.float32)
REFUSED = {
    "kernel": ({"kernel": "probe_nothing"}, "probe_nothing"),
    "threads_0": ({"threads": 0}, "0"),
    "threads_33": ({"threads": 33}, "33"),
    "threads_1056": ({"threads": 1056}, "1056"),
    "groups_0": ({"groups": (1, 0)}, "0"),
    "arguments_missing": ({"arguments": [FLOATS, FLOATS]}, "2"),
    "bytes_for_a_buffer": ({"arguments": [b"1234", FLOATS, b"12345678"]}, "bytes"),
    "buffer_for_bytes": ({"arguments": [FLOATS, FLOATS, FLOATS]}, "a buffer"),
    "bytes_too_few": ({"arguments": [FLOATS, FLOATS, b"1234567"]}, "7"),
    "bytes_too_many": ({"arguments": [FLOATS, FLOATS, b"123456789"]}, "9"),
    "constant_unknown": ({"constants": {0: 0, 29: 1}}, "29"),
    "constant_of_no_value": ({"constants": {0: 3}}, "3"),
    "constant_missing": ({"constants": {}}, "none"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("device", USABLE)
def test_refused(device, name):
    changes, found = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^\[\w+\] expected .*; found '?{re.escape(found)}"):
        probe(device, **changes)
    probe(device)  # and goes on


def test_a_device_that_is_not_there():
    with pytest.raises(
        ValueError, match=r"^\[device\] expected one of the devices metal, cuda, emulated; found 'tpu'$"
    ):
        probe("tpu")


@pytest.mark.skipif(all(not reason for reason in CHOICES.values()), reason="every device is usable here")
def test_a_device_that_is_not_usable_here():
    name, reason = next((name, reason) for name, reason in CHOICES.items() if reason)
    with pytest.raises(
        ValueError, match=re.escape(f"expected a device '{name}' that is usable here; found: {reason}")
    ):
        probe(name)


@pytest.mark.skipif("emulated" not in USABLE, reason="no emulated device")
@pytest.mark.parametrize(
    "schedule", ["forward", "reverse", "skewed", "random:7", "sideways", "random:", "random:x"]
)
def test_schedules_of_the_emulated_device(schedule):
    code = (
        "import numpy as np; from kvfuse import _native\n"
        "out = np.zeros(2, np.int32); values = np.arange(256, dtype=np.int32)\n"
        "_native.device_launch('emulated', 'probe_sum', [values, out], [2], 128); print(*out)"
    )
    environment = os.environ | {"KVFUSE_EMULATED_SCHEDULE": schedule}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if schedule in ("sideways", "random:", "random:x"):
        assert f"or random:NUMBER; found '{schedule}'" in result.stderr
    else:
        assert result.stdout == "8128 24512\n", result.stderr
