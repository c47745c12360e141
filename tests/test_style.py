"""What the two scripts promise about themselves: lines that fit, knobs in one place, imports without
effect."""

import re
import subprocess
import sys

from tests.common import ROOT


def test_knobs_are_one_per_line_with_their_reason():
    source = (ROOT / "train.py").read_text()
    block = source.split("# ---- Knobs")[1].split("# ---- Derived")[0]
    knobs = [line for line in block.splitlines()[1:] if line and not line.startswith("#")]
    assert len(knobs) > 35
    for line in knobs:
        assert re.fullmatch(r"[A-Z0-9_]+ += \S.*  # \S.*", line), line


# ---- The project ----
IMPORT = """
import socket, subprocess, torch  # torch itself starts a process

def forbidden(*a, **k):
    raise AssertionError(a)

socket.socket.connect = subprocess.Popen.__init__ = forbidden
import train
"""


def test_importing_does_nothing(tmp_path):
    """Of train.py, and so of prepare.py: no file, no line, no process, no connection."""
    environment = {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "PATH": "",
        "AUTORESEARCH_PROFILE": "small",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-B", "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
    assert not list(tmp_path.iterdir())


def test_no_lock_file_is_tracked():
    command = ["git", "ls-files", "uv.lock"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not tracked.stdout
    assert "uv.lock" in (ROOT / ".gitignore").read_text().splitlines()
