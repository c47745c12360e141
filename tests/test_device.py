"""The device that a run gets, by stand-ins for those that are not here."""

import inspect
import os
import shutil
from types import SimpleNamespace

import prepare

import pytest
import torch
from torch._inductor import async_compile


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
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
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
        assert prepare.peak_flops(f"NVIDIA {card} 80GB") == tflops * 1e12, card


# ---- Which device ----
def stand_in(monkeypatch, *, cuda=False, mps=False, driver=False):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce GTX 1080")
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


@pytest.mark.parametrize(
    ("built_for", "ends"),
    [(["sm_75", "sm_80", "sm_120"], True), (["sm_50", "sm_61"], False), (["gfx942"], False)],
)
def test_a_gpu_older_than_torch_gets_a_sentence(monkeypatch, capsys, built_for, ends):
    stand_in(monkeypatch, cuda=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    if not ends:
        assert prepare.training_device() == torch.device("cuda")
        return
    with pytest.raises(SystemExit) as stop:
        prepare.training_device()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: NVIDIA GeForce GTX 1080 has compute capability 6.1, too old")
    assert error.count("\n") == 1


@pytest.mark.parametrize("version", ["2.15.0", "2.15.0+cu130", "2.15.0+rocm7.1"])
def test_an_amd_gpu_is_present_for_a_torch_that_can_use_it(monkeypatch, version):
    with monkeypatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setattr(prepare.importlib.metadata, "version", lambda package: version)
        patch.setattr(prepare.os.path, "exists", lambda path: path == "/dev/kfd")
        found = prepare.gpu_present()
    assert found is ("rocm" in version)


def test_an_amd_gpu_that_nobody_can_use_is_mentioned(
    cache, fresh_run, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(prepare, "AMD_DRIVER", str(tmp_path / "kfd"))
    monkeypatch.setattr(prepare.signal, "signal", lambda *arguments: None)
    prepare.start()
    assert "AMD" not in capsys.readouterr().out
    (tmp_path / "kfd").touch()
    prepare.start()
    assert "note: this torch is not built for the AMD GPU here" in capsys.readouterr().out


def test_a_cpu_starts_no_processes_for_triton(cache, fresh_run, monkeypatch):
    monkeypatch.setattr(prepare.signal, "signal", lambda *arguments: None)
    monkeypatch.delenv("TORCH_WARM_POOL", raising=False)
    prepare.start()
    assert os.environ["TORCH_WARM_POOL"] == "0"  # read by torch's maybe_warm_pool
    source = inspect.getsource(async_compile.maybe_warm_pool)
    assert '"TORCH_WARM_POOL"' in source


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


# ---- The profile that suits it ----
H100 = ("NVIDIA H100 80GB HBM3", "GPU-aaaa1111-0000")
A100 = ("NVIDIA A100-SXM4-40GB", "GPU-bbbb2222-0000")
RTX_3060 = ("NVIDIA GeForce RTX 3060", "GPU-cccc3333-0000")
RTX_4090 = ("NVIDIA GeForce RTX 4090", "GPU-dddd4444-0000")
TWO_RTX = "for NVIDIA GeForce RTX 3060, NVIDIA GeForce RTX 4090"
UNKNOWN = "the GPU's name is unknown; AUTORESEARCH_PROFILE=medium suits 8 to 32 GB"


def profile_of(monkeypatch, tmp_path, cards, present=True, **environment):
    """What is chosen where the driver describes such cards, [(name, UUID)], in its files."""
    for i, (name, uuid) in enumerate(cards):
        folder = tmp_path / f"0000:{i + 1:02x}:00.0"
        folder.mkdir()
        text = f"Model: \t\t {name}\nIRQ:   \t\t 56\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
        (folder / "information").write_text(text)
    for name in ("AUTORESEARCH_PROFILE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(prepare, "NVIDIA_CARDS", str(tmp_path))
    monkeypatch.setattr(prepare, "GPU_PRESENT", present)
    return prepare.choose_profile()


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "full"),
        ("NVIDIA A100-SXM4-80GB", "full"),
        ("NVIDIA A100 80GB PCIe", "full"),
        ("NVIDIA B200", "full"),
        ("NVIDIA L40S", "full"),
        ("NVIDIA A40", "full"),
        ("NVIDIA A30", "full"),
        ("NVIDIA RTX A6000", "full"),
        ("NVIDIA RTX 6000 Ada Generation", "full"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "full"),
        ("NVIDIA RTX PRO 5000 Blackwell", "full"),
        ("Quadro RTX 8000", "full"),
        ("NVIDIA GB10", "full"),
        ("NVIDIA GeForce RTX 3060", "medium"),
        ("NVIDIA GeForce RTX 4090", "medium"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "medium"),
        ("NVIDIA GeForce GTX 1660 SUPER", "medium"),
        ("NVIDIA TITAN RTX", "medium"),
        ("NVIDIA RTX 4000 Ada Generation", "medium"),
        ("NVIDIA RTX 5000 Ada Generation", "medium"),
        ("NVIDIA RTX A5000", "medium"),
        ("NVIDIA RTX PRO 4000 Blackwell", "medium"),
        ("NVIDIA RTX PRO 5000 Blackwell Generation Laptop GPU", "medium"),
        ("Quadro RTX 6000", "medium"),
        ("NVIDIA T1000", "medium"),
        ("Tesla T4", "medium"),
        ("NVIDIA L4", "medium"),
        ("NVIDIA A10G", "medium"),
        ("NVIDIA A10", "medium"),
    ],
)
def test_a_card_is_known_by_its_name(monkeypatch, tmp_path, name, profile):
    assert profile_of(monkeypatch, tmp_path, [(name, "GPU-1")]) == (profile, f"for {name}")


@pytest.mark.parametrize(
    ("cards", "visible", "chosen"),
    [
        ([RTX_3060, RTX_4090], "", ("medium", TWO_RTX)),
        ([RTX_3060, RTX_3060], "", ("medium", "for NVIDIA GeForce RTX 3060")),
        ([RTX_3060, H100], "", ("full", "for NVIDIA GeForce RTX 3060, NVIDIA H100 80GB HBM3")),
        ([RTX_3060, H100], "1", ("full", "for NVIDIA GeForce RTX 3060, NVIDIA H100 80GB HBM3")),
        ([RTX_3060, H100], "GPU-cccc", ("medium", "for NVIDIA GeForce RTX 3060")),
        ([RTX_3060, H100, A100], "GPU-cccc3333-0000, GPU-dddd", ("medium", f"for {RTX_3060[0]}")),
        ([RTX_3060, H100], "GPU-aaaa1111-0000", ("full", "for NVIDIA H100 80GB HBM3")),
        ([], "", ("full", UNKNOWN)),  # as in WSL
        ([H100], "GPU-9", ("full", UNKNOWN)),
        ([("", "")], "", ("full", UNKNOWN)),
    ],
)
def test_several_cards_and_none(monkeypatch, tmp_path, cards, visible, chosen):
    environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    assert profile_of(monkeypatch, tmp_path, cards, **environment) == chosen


def test_the_environment_decides_and_without_a_gpu_it_is_small(monkeypatch, tmp_path):
    assert profile_of(monkeypatch, tmp_path, [RTX_3060], AUTORESEARCH_PROFILE="full") == (
        "full",
        "as AUTORESEARCH_PROFILE says",
    )
    profile, why = profile_of(monkeypatch, tmp_path, [], present=False)
    assert (profile, why) == ("small", "no GPU that this torch can use")


def test_a_file_that_cannot_be_read_names_no_card(monkeypatch, tmp_path):
    (tmp_path / "0000:09:00.0" / "information").mkdir(parents=True)
    assert profile_of(monkeypatch, tmp_path, []) == ("full", UNKNOWN)


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


# ---- A kernel of the hub ----
@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A cache of this test's own, and get_kernel as a hub that fails `failures` times."""
    import kernels

    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "0123abcdef"
    build = snapshot / "build" / "torch-cuda" / "b"
    build.mkdir(parents=True)
    module = SimpleNamespace(__file__=str(build / "__init__.py"))
    hub = SimpleNamespace(asked=[], failures=0, snapshot=snapshot, module=module)

    def get_kernel(repository, version):
        hub.asked.append(os.environ.get("LOCAL_KERNELS"))
        if hub.failures:
            hub.failures -= 1
            raise ConnectionError("the hub stutters")
        return module

    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    monkeypatch.setattr(prepare, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(prepare, "BACKOFF", 0.0)
    monkeypatch.setenv("LOCAL_KERNELS", "")
    monkeypatch.delenv("LOCAL_KERNELS")
    return hub


def test_a_kernel_comes_from_the_folder_of_its_first_load(hub):
    assert prepare.hub_kernel("a/b", 1) == (hub.module, "0123abcd")
    assert prepare.hub_kernel("a/b", 1) == (hub.module, "0123abcd")
    assert hub.asked == [None, f"a/b={hub.snapshot}"]
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"


def test_a_folder_that_is_gone_is_asked_of_the_hub_again(hub):
    prepare.hub_kernel("a/b", 1)
    shutil.rmtree(hub.snapshot)
    prepare.hub_kernel("a/b", 1)
    assert hub.asked == [None, None]


def test_a_hub_that_stutters_is_asked_again(hub):
    hub.failures = 2
    assert prepare.hub_kernel("a/b", 1)[1] == "0123abcd"
    hub.failures = 3
    with pytest.raises(ConnectionError):
        prepare.hub_kernel("a/b", 1)


def test_a_user_s_own_kernel_stays(hub, monkeypatch):
    prepare.hub_kernel("a/b", 1)
    monkeypatch.setenv("LOCAL_KERNELS", "a/b=/own")
    hub.module.__file__ = "/own/build/b/__init__.py"
    assert prepare.hub_kernel("a/b", 1) == (hub.module, "local")
    assert hub.asked[-1] == "a/b=/own"
