"""The device that a run gets, by stand-ins for those that are not here."""

import prepare

import pytest
import torch


# ---- Peaks ----
@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 836),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A40", 149.7),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 3060", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA A10", None),
        ("NVIDIA L40", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_mfu_is_never_against_another_chip(name, tflops):
    assert prepare.peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_each_entry_of_the_table_is_found_by_its_own_name():
    """A more general name before a more special one would take its place."""
    for card, tflops in prepare.PEAK_TFLOPS.items():
        expected = None if tflops is None else tflops * 1e12
        assert prepare.peak_flops(f"NVIDIA {card} 80GB") == expected, card


# ---- Which device ----
def stand_in(monkeypatch, *, cuda=False, mps=False, driver=False):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(prepare, "GPU_PRESENT", driver)


@pytest.mark.parametrize(
    ("there", "device"),
    [
        ({}, "cpu"),
        ({"mps": True}, "mps"),
        ({"cuda": True, "driver": True}, "cuda"),
        ({"cuda": True}, "cuda"),  # one of AMD's has no such driver
    ],
)
def test_a_run_gets_the_best_device_that_is_there(monkeypatch, there, device):
    stand_in(monkeypatch, **there)
    assert prepare.training_device() == torch.device(device)


@pytest.mark.parametrize("mps", [False, True])
def test_a_gpu_that_torch_cannot_use_ends_the_run(monkeypatch, capsys, mps):
    """A night on the CPU beside it would be the surprise."""
    stand_in(monkeypatch, driver=True, mps=mps)
    with pytest.raises(SystemExit) as stop:
        prepare.training_device()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: torch finds no usable GPU; update the driver")
    assert "CUDA_VISIBLE_DEVICES" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("driver", ["/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"])
@pytest.mark.parametrize(
    ("visible", "present"),
    [(None, True), ("0", True), ("0,1", True), ("GPU-8f3a", True), ("", False), ("-1", False)],
)
def test_a_gpu_is_present_where_its_driver_is_and_nobody_hides_it(
    monkeypatch, driver, visible, present
):
    with monkeypatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        patch.setattr(prepare.os.path, "exists", lambda path: path == driver)
        found = prepare.gpu_present()
        patch.setattr(prepare.os.path, "exists", lambda path: False)
        found_without_driver = prepare.gpu_present()
    assert found is present
    assert found_without_driver is False


# ---- What is said of it ----
def test_a_gpu_is_called_by_its_name_and_others_by_their_type(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert prepare.device_name(torch.device("cuda")) == "NVIDIA H100 80GB HBM3"
    assert prepare.device_name(torch.device("cpu")) == "cpu"
    assert prepare.device_name(torch.device("mps")) == "mps"


def test_peak_memory_of_a_gpu_is_what_torch_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * 2**20)
    assert prepare.peak_memory_mb(torch.device("cuda")) == (3, 5)


@pytest.mark.parametrize(("platform", "unit"), [("linux", 2**10), ("darwin", 1)])
def test_peak_memory_elsewhere_is_the_processs(monkeypatch, platform, unit):
    """Linux counts in kilobytes, macOS in bytes."""

    class Usage:
        ru_maxrss = 700 * 2**20 // unit

    monkeypatch.setattr(prepare.resource, "getrusage", lambda who: Usage)
    monkeypatch.setattr(prepare.sys, "platform", platform)
    assert prepare.peak_memory_mb(torch.device("cpu")) == (700, 700)
