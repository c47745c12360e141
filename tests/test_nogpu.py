"""Runs benchmarks/nogpu.py without compiling kernels: it traces and lowers the training step for a
card that is not there, and runs it on fake tensors."""

from types import SimpleNamespace

from benchmarks import nogpu

import pytest

SIZES = ("DEPTH=1", "ASPECT_RATIO=256", "MLP_RATIO=1", "KV_HEADS=1")  # few shapes to compile
PEAK = 0.42  # GiB, of a step of 8 rows


@pytest.mark.compile
def test_a_step_on_a_card_that_is_not_there():
    """No graph breaks, memory peaks at PEAK, and torch's flash attention accepts its arguments."""
    asked = SimpleNamespace(profile="full", rung="varlen", set=SIZES)
    found = nogpu.in_a_process(asked, "sm_86", 8)
    assert found["errors"] == []
    assert found["peak of a step"] == PEAK
    assert found["launches"] > 50 and found["matmuls"] > 20
