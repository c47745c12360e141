"""Tests which device and profile a run gets, with stand-ins for absent hardware."""

import runpy
from types import SimpleNamespace

import prepare
from tests.common import ROOT
from tests.test_data import refusal, run_prepare

import pytest
import torch


@pytest.mark.parametrize(
    ("card", "mps", "variable", "expected"),
    [  # memory as torch reports it
        (None, False, "", ["cpu", "cpu", "small"]),
        (None, True, "", ["mps", "mps", "small"]),
        (("RTX 5090", 33.7e9), True, "", ["cuda", "RTX 5090", "medium"]),
        (("A100-40GB", 42.3e9), False, "", ["cuda", "A100-40GB", "full"]),
        (("A100-40GB", 42.3e9), False, "small", ["cuda", "A100-40GB", "small"]),
    ],
)
def test_a_run_gets_the_best_device_and_its_profile(monkeypatch, card, mps, variable, expected):
    name, memory = card or (None, None)
    found = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setenv("AUTORESEARCH_PROFILE", variable)
    ruler = SimpleNamespace(**runpy.run_path(str(ROOT / "prepare.py")))
    assert [ruler.DEVICE.type, ruler.DEVICE_NAME, ruler.PROFILE] == expected


# ---- A GPU that torch cannot use ----
@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Pretends that an NVIDIA driver is installed."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(prepare, "DRIVERS", (str(tmp_path / "none"), __file__))


@pytest.mark.parametrize(
    ("device", "command"),
    [("mps", (run_prepare, "--data-dir", "none")), ("cpu", (prepare.start,))],
)
def test_a_driver_without_a_usable_gpu_ends_both_commands_at_once(
    driver, fresh_run, monkeypatch, capsys, tmp_path, command, device
):
    """Nobody expects a night on the CPU of a GPU machine."""
    monkeypatch.setattr(prepare, "PREPARED", tmp_path / "small")
    monkeypatch.setattr(prepare, "DEVICE", torch.device(device))
    assert "torch cannot use the GPU here" in refusal(capsys, *command)
    assert not prepare.PREPARED.exists()


@pytest.mark.parametrize(
    ("device", "visible", "capability", "usable"),
    [
        ("cpu", "0", None, False),
        ("cpu", "", None, True),
        ("cpu", "-1", None, True),
        ("cuda", "0", (7, 0), False),
        ("cuda", "0", (7, 5), True),
    ],
)
def test_a_gpu_may_be_hidden_but_not_too_old(
    driver, monkeypatch, capsys, device, visible, capability, usable
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(prepare, "DEVICE", torch.device(device))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if usable:
        prepare.check_device()
    else:
        assert "CUDA_VISIBLE_DEVICES" in refusal(capsys, prepare.check_device)


# ---- Peak memory ----
@pytest.mark.parametrize(
    ("device", "platform", "unit"),
    [("cuda", "linux", None), ("cpu", "linux", 2**10), ("mps", "darwin", 1)],
)
def test_peak_memory_is_torch_s_count_on_a_gpu_otherwise_the_process_s(
    cache, fresh_run, monkeypatch, tmp_path, capsys, device, platform, unit
):
    """Linux counts in kilobytes, macOS in bytes."""
    monkeypatch.setattr(prepare, "RUNS", tmp_path)
    next(prepare.make_dataloader(None, 1, 8))
    fresh_run.eval_began = fresh_run.eval_ended = prepare._now()
    usage = SimpleNamespace(ru_maxrss=700 * 2**20 // (unit or 1))
    monkeypatch.setattr(prepare, "DEVICE", torch.device(device))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 700 * 2**20)
    monkeypatch.setattr(prepare.resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(prepare.sys, "platform", platform)
    prepare.report(1.0, {})
    assert "\npeak_vram_mb: 700.00\n" in capsys.readouterr().out
