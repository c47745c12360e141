"""What the two scripts promise about themselves: lines that fit, knobs in one place, imports without
effect."""

import re
import subprocess
import sys
import tomllib

from tests.common import ROOT

import pytest

SCRIPTS = ("prepare.py", "train.py")


@pytest.mark.parametrize("name", SCRIPTS)
def test_lines_end_within_100_columns(name):
    assert not [line for line in (ROOT / name).read_text().splitlines() if len(line) > 100]


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


def test_dependencies_are_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    assert all("==" in name for name in names)
    assert project["tool"]["uv"] == {"package": False, "exclude-newer": "2026-11-20"}


def test_no_lock_file_is_tracked():
    command = ["git", "ls-files", "uv.lock"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not tracked.stdout
    assert "uv.lock" in (ROOT / ".gitignore").read_text().splitlines()
