"""Tests which device and profile a run gets, with stand-ins for absent hardware."""

import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import prepare
from tests.common import ROOT, run_script
from tests.test_data import refusal

import pytest
import torch

CARDS = {  # memory as torch reports it, and compute capability
    "RTX 5090": (33.7e9, 12, 0),
    "A100-40GB": (42.3e9, 8, 0),
    "T4": (15.6e9, 7, 5),
    "V100": (34.1e9, 7, 0),
}
CPU = prepare.DEVICE_NAME


def found(monkeypatch, card, mps=False, **environment):
    """Returns prepare.py's names as on a machine with this card, or with none."""
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    if card:
        memory, major, minor = CARDS[card]
        gpu = SimpleNamespace(name=card, total_memory=memory, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "prepare.py")))


@pytest.mark.parametrize(
    ("card", "profile", "expected"),
    [
        (None, "", ["cpu", CPU, "small"]),
        (None, "full", ["cpu", CPU, "full"]),
        ("T4", "", ["cuda", "T4", "medium"]),
        ("RTX 5090", "", ["cuda", "RTX 5090", "medium"]),
        ("A100-40GB", "", ["cuda", "A100-40GB", "full"]),
        ("A100-40GB", "small", ["cuda", "A100-40GB", "small"]),
    ],
)
def test_a_run_gets_the_best_device_and_its_profile(monkeypatch, card, profile, expected):
    ruler = found(monkeypatch, card, AUTORESEARCH_PROFILE=profile)
    assert [ruler.DEVICE.type, ruler.DEVICE_NAME, ruler.PROFILE] == expected


def test_an_apple_gpu_is_used(monkeypatch):
    assert found(monkeypatch, None, mps=True).DEVICE.type == "mps"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (
            "processor\t: 0\nmodel name\t: Xeon 8481C @ 2.70GHz\nflags\t: fpu\n",
            "Xeon 8481C @ 2.70GHz",
        ),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", "cpu"),
    ],
)
def test_a_cpu_is_named_by_its_model(monkeypatch, lines, name):
    """Scores of two CPUs compare no more than those of two GPUs."""
    read = Path.read_text

    def read_text(path, **options):
        return lines if str(path) == "/proc/cpuinfo" else read(path, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert name == found(monkeypatch, None).DEVICE_NAME


# ---- A GPU that torch cannot use ----
@pytest.mark.parametrize(
    ("card", "driver", "visible", "usable"),
    [
        (None, True, None, False),
        (None, True, "0", False),
        (None, True, "GPU-4f0c7f1a", False),
        (None, False, "0", True),
        (None, True, "", True),
        (None, True, "-1", True),
        (None, True, "NoDevFiles", True),  # Slurm's, for a job without a GPU
        ("V100", True, "0", False),
        ("T4", True, "0", True),
    ],
)
def test_a_gpu_may_be_hidden_but_not_unusable(monkeypatch, capsys, card, driver, visible, usable):
    """Nobody expects a night on the CPU of a GPU machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    exists = os.path.exists
    monkeypatch.setattr(
        os.path, "exists", lambda path: driver if "nvidia" in str(path) else exists(path)
    )
    if usable:
        assert found(monkeypatch, card).PROFILE == "small"
    else:
        sentence = refusal(capsys, found, monkeypatch, card)
        assert "torch cannot use the GPU here" in sentence and "CUDA_VISIBLE_DEVICES" in sentence


# ---- Peak memory ----
def test_peak_memory_is_torch_s_count_on_a_gpu_otherwise_the_process_s(monkeypatch):
    monkeypatch.setattr(prepare, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 700)
    assert prepare.peak_memory() == 700
    monkeypatch.setattr(prepare, "DEVICE", torch.device("mps"))

    def read_text(path):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", read_text)  # as on macOS
    monkeypatch.setattr(prepare.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=9))
    assert prepare.peak_memory() == 9


HELD = """
import subprocess, sys
held = b"x" * 2**30
subprocess.run([sys.executable, "-c", "import prepare; print(prepare.peak_memory())"], check=True)
"""


def test_peak_memory_is_not_that_of_a_parent_process(tmp_path):
    done = run_script("-c", HELD)
    assert done.returncode == 0, done.output
    assert 2**26 < int(done.stdout) < 2**30
