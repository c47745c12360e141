"""The device and the profile that a run gets, by stand-ins for those that are not here."""

import runpy
from types import SimpleNamespace

import prepare
from tests.common import ROOT
from tests.test_data import run_prepare

import pytest
import torch


# ---- Which device ----
def stand_in(monkeypatch, *, cuda=None, mps=False):
    """`cuda`: name and memory of a card."""
    name, memory = cuda or (None, None)
    card = SimpleNamespace(name=name, total_memory=memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


def imported(monkeypatch, profile=None):
    """The names of prepare.py as a process with that device finds them."""
    monkeypatch.delenv("AUTORESEARCH_PROFILE", raising=False)
    if profile:
        monkeypatch.setenv("AUTORESEARCH_PROFILE", profile)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "prepare.py")))


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({}, ["cpu", "cpu", "small"]),
        ({"mps": True}, ["mps", "mps", "small"]),
        ({"cuda": ("NVIDIA L4", 24e9), "mps": True}, ["cuda", "NVIDIA L4", "medium"]),
    ],
)
def test_a_run_gets_the_best_device_that_is_there(monkeypatch, there, expected):
    stand_in(monkeypatch, **there)
    ruler = imported(monkeypatch)
    found = [ruler.DEVICE.type, ruler.DEVICE_NAME, ruler.PROFILE]
    assert found == expected


@pytest.mark.parametrize(
    ("name", "memory", "profile"),
    [  # as torch reports it
        ("NVIDIA GeForce RTX 5090", 33.7e9, "medium"),
        ("NVIDIA A100-SXM4-40GB", 42.3e9, "full"),
    ],
)
def test_memory_decides_the_profile_and_the_variable_overrides(monkeypatch, name, memory, profile):
    stand_in(monkeypatch, cuda=(name, memory))
    chosen = [imported(monkeypatch, which).PROFILE for which in (None, "small", "medium", "full")]
    assert chosen == [profile, "small", "medium", "full"]


# ---- A GPU that torch cannot use ----
@pytest.fixture
def driver(monkeypatch, tmp_path):
    """One of NVIDIA's, and a cache that is not there."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(prepare, "DRIVERS", (str(tmp_path / "none"), __file__))
    for name, path in {"CACHE": "", "DATA": "data", "VAL": "val", "ROOT": "small"}.items():
        monkeypatch.setattr(prepare, name, tmp_path / "cache" / path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def refusal(capsys, function, *arguments):
    with pytest.raises(SystemExit) as stop:
        function(*arguments)
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.err.count("\n") == 1 and not said.out
    assert "torch cannot use the GPU here" in said.err and "CUDA_VISIBLE_DEVICES" in said.err


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("command", ["prepare", "start", "make_dataloader"])
def test_a_driver_without_a_usable_gpu_ends_both_commands_at_once(
    driver, fresh_run, monkeypatch, capsys, tmp_path, command, device
):
    """A night on the CPU beside the GPU would be the surprise."""
    call = {
        "prepare": (run_prepare, "--num-shards", 1),
        "start": (prepare.start,),
        "make_dataloader": (prepare.make_dataloader, None, 1, 8),
    }
    monkeypatch.setattr(prepare, "DEVICE", torch.device(device))
    refusal(capsys, *call[command])
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("visible", "hidden"),
    [(None, False), ("0", False), ("GPU-8f3a", False), ("", True), ("-1", True)],
)
def test_a_gpu_may_be_hidden(driver, monkeypatch, capsys, visible, hidden):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if hidden:
        prepare.check_device()
    else:
        refusal(capsys, prepare.check_device)


@pytest.mark.parametrize(
    ("capability", "usable"),
    [((6, 0), False), ((7, 0), False), ((7, 5), True), ((8, 6), True), ((12, 0), True)],
)
def test_a_gpu_older_than_torch_gets_a_sentence(driver, monkeypatch, capsys, capability, usable):
    monkeypatch.setattr(prepare, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if usable:
        prepare.check_device()
    else:
        refusal(capsys, prepare.check_device)


# ---- What is done on it ----


@pytest.mark.parametrize(
    ("device", "platform", "unit"),
    [("cuda", "linux", None), ("cpu", "linux", 2**10), ("mps", "darwin", 1)],
)
def test_peak_memory_is_what_torch_counted_on_a_gpu_and_else_the_process_s(
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
