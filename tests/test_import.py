"""Importing the two scripts has no effect."""

from tests.common import run_script

IMPORT = """
import socket, subprocess, torch  # torch itself starts a process

def forbidden(*a, **k):
    raise AssertionError(a)

socket.socket.connect = subprocess.Popen.__init__ = forbidden
import train
"""


def test_importing_does_nothing(tmp_path):
    """The import, prepare.py's included, makes no file, line, process or connection."""
    own = {"HOME": tmp_path, "PATH": "", "AUTORESEARCH_CACHE": None}
    done = run_script("-c", IMPORT, cwd=tmp_path, **own)
    assert done.returncode == 0 and not done.output, done.output
    assert not list(tmp_path.iterdir())


WINDOWS = """
import sys
sys.modules["fcntl"] = None  # as on Windows
import prepare
"""


def test_windows_gets_a_sentence():
    done = run_script("-c", WINDOWS)
    assert (done.returncode, done.output) == (2, "error: Windows lacks what this needs; use WSL.\n")
