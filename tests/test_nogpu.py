"""The training step on the CUDA path, traced and lowered for a card that is not there and run on
fake tensors: benchmarks/nogpu.py, without compiling its kernels."""

import json
import subprocess
import sys

from tests.common import ROOT

import pytest

SIZES = ("DEPTH=1", "ASPECT_RATIO=256", "MLP_RATIO=1", "KV_HEADS=1")  # few shapes to compile
PEAK = 450_607_616  # bytes, of a step of 8 rows


@pytest.mark.compile
def test_a_step_on_a_card_that_is_not_there():
    """Without a graph break, with the memory that it had, and with arguments that torch's flash
    attention takes."""
    command = [sys.executable, "benchmarks/nogpu.py", "sm_86", "--alone", "--rung", "varlen"]
    command += ["--memory", "8", "--set", *SIZES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == [] and found["breaks"] == 0
    assert found["peak"] == pytest.approx(PEAK, rel=0.01)
    assert found["launches"] > 50 and found["products"] > 20
