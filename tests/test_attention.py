"""Compares attention back-ends with the definition, and tests how a run chooses one."""

import math
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import train
from tests.tiny import set_knobs, tiny

import kernels
import pytest
import torch
from torch.nn import attention
from torch.nn.attention import varlen
from torch.nn.attention._fa4 import register_flash_attention_fa4


# ---- Results of back-ends ----
def masked_softmax(q, k, v, window):
    """Computes the definition: query i sees the keys j with 0 <= i - j <= window; head h of the
    queries reads head h // group of the keys and values."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    unseen = (distance < 0) | (distance > window)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    shares = scores.masked_fill(unseen, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", shares, v)


def values_and_gradients(attend, T, kv_heads, window):
    torch.manual_seed(0)
    shapes = [(2, T, heads, 8) for heads in (4, kv_heads, kv_heads, 4)]
    *inputs, grad = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    out = attend(*inputs, window)
    return [out, *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("block", [4, 7, 64, None])  # 7 does not divide 20
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_a_masked_softmax(monkeypatch, block, kv_heads):
    attend = train.attend_blocks if block else train.attend_sdpa
    set_knobs(monkeypatch, CPU_QUERY_BLOCK=block)
    for window in (0, 1, 3, 4, 5, 8, 12, 13, 18, 19, 100):
        got = values_and_gradients(attend, 20, kv_heads, window)
        want = values_and_gradients(masked_softmax, 20, kv_heads, window)
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)  # blocks sum in fp32


# ---- The probe ----
WRONG = {
    "window": lambda q, k, v, window: masked_softmax(q, k, v, window - 1),
    # Head h of the queries reads head h % 2 of the keys, not h // 2.
    "heads": lambda q, *kv: masked_softmax(q, *(x.repeat(1, 1, 2, 1) for x in kv[:2]), kv[2]),
    "NaN": lambda *inputs: masked_softmax(*inputs) * math.nan,
    "long window": lambda q, k, v, window: masked_softmax(q, k, v, min(window, 16)),
    "rows": lambda q, k, v, window: masked_softmax(q, k.roll(1, 0), v, window),
    "dq": lambda q, k, v, window: masked_softmax(q.lerp(q.detach(), 0.1), k, v, window),
    "dk": lambda q, k, v, window: masked_softmax(q, k.lerp(k.detach(), 0.1), v, window),
    "dv": lambda q, k, v, window: masked_softmax(q, k, v.lerp(v.detach(), 0.1), window),
}
PROBED = tiny(heads=4, windows=[8, 32])  # two heads of keys and values


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_back_end_is_refused(name):
    kind = name if name in ("dq", "dk", "dv") else "forward"
    window = 32 if name == "long window" else 8
    with pytest.raises(RuntimeError, match=rf"^{kind} is off by (\d\.\d+|nan) at window {window}$"):
        train.probe_attention(WRONG[name], PROBED)


def test_rounding_to_bf16_passes():
    config = tiny(windows=[8, 32], dtype=torch.bfloat16)
    train.probe_attention(train.attend_blocks, config)


def test_a_layer_without_attention_is_not_probed():
    """With a window of 0 no gradient would reach q and k, and an error relative to it be NaN."""
    train.probe_attention(train.attend_blocks, tiny(windows=[0, 32]))


# ---- Choosing a back-end ----
def load_nothing():
    raise ImportError("no such\nmodule")


def test_a_run_takes_the_first_back_end_that_passes_or_the_one_that_is_forced(monkeypatch, capsys):
    backends = {
        "missing": load_nothing,
        "wrong": lambda: WRONG["window"],
        "good": lambda: masked_softmax,
    }
    set_knobs(monkeypatch, BACKENDS=backends, BACKEND_ORDER={"cpu": tuple(backends)})
    assert train.choose_attention(PROBED) == ("good", masked_softmax)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "attention: not missing: ImportError: no such module"
    assert second.startswith("attention: not wrong: RuntimeError: forward is off by ")
    set_knobs(monkeypatch, ATTENTION="missing")
    with pytest.raises(SystemExit, match="2"):
        train.choose_attention(PROBED)
    said = capsys.readouterr()
    assert said.out == f"{first}\n"
    assert said.err.startswith("error: no attention back-end works, for the reasons above; ")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Stands in for a Hopper GPU and a kernel hub; records calls to the hub and to its kernel."""
    snapshot = tmp_path / "snapshots" / "0123abcdef"
    snapshot.mkdir(parents=True)
    hub = SimpleNamespace(asked=[], calls=[], snapshot=snapshot)

    def get_kernel(repository, version):
        hub.asked.append(os.environ.get("LOCAL_KERNELS"))
        assert (repository, version) == ("kernels-community/flash-attn3", 1)
        file = f"{snapshot}/build/flash_attn3/it.py"
        return SimpleNamespace(__file__=file, flash_attn_func=flash_attn_func)

    def flash_attn_func(q, k, v, **options):
        hub.calls.append(options)
        return (q, "statistics") if len(hub.calls) % 2 else q

    set_knobs(monkeypatch, CACHE=tmp_path)
    monkeypatch.setenv("LOCAL_KERNELS", "")
    monkeypatch.delenv("LOCAL_KERNELS")
    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return hub


@pytest.mark.parametrize(
    ("device", "capability", "taken"),
    [
        ("cuda", (9, 0), "fa3 0123abcd"),
        ("cuda", (10, 0), "varlen"),
        ("cuda", (7, 5), "sdpa"),
        ("mps", None, "sdpa"),
    ],
)
def test_a_gpu_gets_the_fastest_that_it_can_run(hub, monkeypatch, device, capability, taken):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # flash-attn-4 is not installed
    set_knobs(monkeypatch, probe_attention=lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    set_knobs(monkeypatch, DEVICE=torch.device(device))
    assert train.choose_attention(PROBED)[0] == taken


# ---- Calls into packages ----
def test_fa3_is_called_as_its_interface_says_and_found_where_it_was_first_loaded(hub, monkeypatch):
    """A window of 5 covers rows of 6 tokens. The kernel may return the output alone. Another torch
    may need another build, so it asks the hub again."""
    q, k, v = torch.randn(3, 1, 6, 2, 8)
    for window in (3, 5):
        attend = train.load_fa3()
        assert attend(q, k, v, window) is q and attend.snapshot == "0123abcd"
    assert hub.calls == [{"causal": True, "window_size": size} for size in ((3, 0), (-1, 0))]
    del os.environ["LOCAL_KERNELS"]
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    train.load_fa3()
    shutil.rmtree(hub.snapshot)
    train.load_fa3()
    assert hub.asked == [None, f"kernels-community/flash-attn3={hub.snapshot}", None, None]


def test_a_cache_that_is_read_only_keeps_no_pin(hub, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert train.load_fa3().snapshot == "0123abcd"
    assert not [*train.CACHE.glob("flash-attn3*")]


def test_varlen_gets_rows_end_to_end_and_a_window_to_the_left(monkeypatch):
    """test_nogpu.py checks that torch accepts the arguments."""
    sizes = []

    def varlen_attn(q, k, v, ends, also, *longest, window_size, enable_gqa):
        assert ends.tolist() == also.tolist() == [0, 6, 12] and ends.dtype == torch.int32
        assert longest == (6, 6) and enable_gqa
        sizes.append(window_size)
        left = window_size[0]
        rows = (x.unflatten(0, (2, 6)) for x in (q, k, v))
        return masked_softmax(*rows, 6 if left == -1 else left).flatten(0, 1)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    for window in (2, 4, 5, 6):
        got = values_and_gradients(train.load_varlen(), 6, 2, window)
        torch.testing.assert_close(got, values_and_gradients(masked_softmax, 6, 2, window))
    assert sizes == [(2, 0), (4, 0), (-1, 0), (-1, 0)]  # a window that covers the row becomes -1


def test_scores_as_large_as_qk_norm_allows_do_not_overflow():
    """attend_blocks takes exp without subtracting a maximum; a score is at most sqrt(D)."""
    q = torch.full((1, 64, 2, 128), 1.0, dtype=torch.bfloat16)  # of norm sqrt(D)
    for sign in (1, -1):
        out = train.attend_blocks(q, sign * q, torch.ones_like(q), 8)
        torch.testing.assert_close(out, torch.ones_like(q))


# ---- FlashAttention 4 behind torch's varlen_attn ----
def flash_kernels(change):
    """Registers, as torch does for FlashAttention 4, kernels of varlen_attn; here for a CPU. They
    compute the definition, and `change` alters the window and the gradients."""

    def compute(q, k, v, ends, left):
        rows = (x.unflatten(0, (len(ends) - 1, -1)) for x in (q, k, v))
        return masked_softmax(*rows, change.get("window", 0) + (len(q) if left == -1 else left))

    def forward(q, k, v, ends, *rest, window_size_left, **options):
        out = compute(q, k, v, ends, window_size_left).flatten(0, 1)
        return out, q.new_empty(0), *torch.zeros(2, 2, dtype=torch.uint64), q.new_empty(0)

    def backward(grad, q, k, v, out, lse, ends, *rest, window_size_left, **options):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]

        def differentiate():
            out = compute(*inputs, ends, window_size_left).flatten(0, 1)
            return torch.autograd.grad(out, inputs, change.get("gradient", 1) * grad)

        with ThreadPoolExecutor() as pool:  # in this thread autograd is off, as for any kernel
            return pool.submit(differentiate).result()

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library


@pytest.fixture
def switch(monkeypatch):
    """Stands in for a Hopper GPU, torch's own kernels and, behind the switch, the package's. The
    test may change the latter."""
    change = {}

    class Handle:
        def __init__(self):
            self.library = flash_kernels(change)

        def remove(self):
            self.library = None

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    ladder = {"cpu": ("fa4", "varlen", "sdpa")}
    set_knobs(monkeypatch, version=lambda package: "4.0", BACKEND_ORDER=ladder)
    own = flash_kernels({})
    attention.register_flash_attention_impl("FA4", register_fn=Handle)
    yield change
    if attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()
    attention.register_flash_attention_impl("FA4", register_fn=register_flash_attention_fa4)
    del own


def test_fa4_is_taken_where_its_kernels_are_right(switch, capsys):
    name, attend = train.choose_attention(PROBED)
    assert (name, capsys.readouterr().out) == ("fa4 4.0", "")
    assert attention.current_flash_attention_impl() == "FA4"


@pytest.mark.parametrize("change", [{"window": 1}, {"gradient": 1.1}])
def test_a_wrong_fa4_is_refused_and_leaves_no_trace(switch, capsys, change):
    switch |= change
    name, attend = train.choose_attention(PROBED)
    assert name == "varlen"
    assert capsys.readouterr().out.startswith("attention: not fa4: RuntimeError: ")
    assert attention.current_flash_attention_impl() is None
    got = values_and_gradients(attend, 20, 2, 7)
    torch.testing.assert_close(got, values_and_gradients(masked_softmax, 20, 2, 7))
