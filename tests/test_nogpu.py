"""The training step on the CUDA path, traced and lowered for a card that is not there and run on
fake tensors: benchmarks/nogpu.py, without compiling its kernels."""

from types import SimpleNamespace

from benchmarks import nogpu

import pytest

SIZES = ("DEPTH=1", "ASPECT_RATIO=256", "MLP_RATIO=1", "KV_HEADS=1")  # few shapes to compile
PEAK = 0.42  # GiB, of a step of 8 rows


@pytest.mark.compile
def test_a_step_on_a_card_that_is_not_there():
    """Without a graph break, with the memory that it had, and with arguments that torch's flash
    attention takes."""
    asked = SimpleNamespace(profile="full", rung="varlen", set=SIZES)
    found = nogpu.in_a_process(asked, "sm_86", 8)
    assert found["errors"] == []
    assert found["peak of a step"] == PEAK
    assert found["launches"] > 50 and found["products"] > 20
