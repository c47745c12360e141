"""Compares attention back-ends with the definition, and tests how a run chooses one."""

import inspect
import math
import os
import shutil
from types import SimpleNamespace

import train
from tests.tiny import set_knobs, tiny

import kernels
import pytest
import torch
from torch.nn.attention import varlen

CPU = torch.device("cpu")


# ---- Results of back-ends ----
def masked_softmax(q, k, v, window):
    """Computes the definition: query i sees the keys j with 0 <= i - j <= window; head h of the
    queries reads head h // group of the keys and values."""
    group = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(group, dim=2)
    v = v.repeat_interleave(group, dim=2)
    i = torch.arange(q.shape[1])[:, None]
    j = torch.arange(q.shape[1])
    seen = (j <= i) & (i - j <= window)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", shares, v)


def draw(T, heads, kv_heads):
    """Draws q, k, v and the gradient of the output."""
    torch.manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(2, T, count, 8, dtype=torch.float64) for count in counts]


def values_and_gradients(attend, tensors, window):
    *inputs, grad = (x.clone().requires_grad_() for x in tensors)
    out = attend(*inputs, window)
    return [out, *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("block", [4, 7, 64])  # 7 does not divide 20
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("attend", [train.attend_blocks, train.attend_sdpa])
def test_attention_is_a_masked_softmax(monkeypatch, attend, kv_heads, block):
    set_knobs(monkeypatch, CPU_QUERY_BLOCK=block)
    tensors = draw(20, 4, kv_heads)
    for window in (0, 1, 3, 4, 5, 8, 12, 13, 18, 19, 100):
        got = values_and_gradients(attend, tensors, window)
        want = values_and_gradients(masked_softmax, tensors, window)
        close = (
            {"rtol": 0, "atol": 2e-6} if attend is train.attend_blocks else {}
        )  # it sums in fp32
        message = f"window {window}: {{}}".format
        torch.testing.assert_close(got, want, msg=message, **close)


# ---- The probe ----
class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.1 * grad


def repeat_in_the_wrong_order(q, k, v, window):
    """Lets head h of the queries read head h % 2 of the keys and values, not h // 2."""
    k, v = (x.repeat(1, 1, q.shape[2] // x.shape[2], 1) for x in (k, v))
    return masked_softmax(q, k, v, window)


WRONG = {
    "window": lambda q, k, v, window: masked_softmax(q, k, v, window - 1),
    "heads": repeat_in_the_wrong_order,
    "NaN": lambda q, k, v, window: masked_softmax(q, k, v, window) * math.nan,
    "gradient": lambda *inputs: WrongGradient.apply(masked_softmax(*inputs)),
}
PROBED = tiny(heads=4, window=8)  # two heads of keys and values


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_back_end_is_refused(name):
    kind = "dq" if name == "gradient" else "forward"
    with pytest.raises(RuntimeError, match=rf"^{kind} is off by (\d\.\d+|nan) at window \d+$"):
        train.probe_attention(WRONG[name], CPU, PROBED)


@pytest.mark.parametrize("attend", [train.attend_blocks, train.attend_sdpa])
def test_rounding_to_bf16_passes(attend):
    config = SimpleNamespace(**vars(PROBED) | {"dtype": torch.bfloat16})
    train.probe_attention(attend, CPU, config)


def test_scores_as_large_as_qk_norm_allows_do_not_overflow():
    """attend_blocks takes exp without subtracting a maximum; a score is at most sqrt(D)."""
    q = torch.full((1, 64, 2, 128), 1.0, dtype=torch.bfloat16)  # of norm sqrt(D)
    for sign in (1, -1):
        out = train.attend_blocks(q, sign * q, torch.ones_like(q), 8)
        torch.testing.assert_close(out, torch.ones_like(q))


# ---- Choosing a back-end ----
def load_nothing():
    raise ImportError("no such\nmodule")


def test_the_first_back_end_that_passes_the_probe_is_taken(monkeypatch, capsys):
    backends = {
        "missing": load_nothing,
        "wrong": lambda: WRONG["window"],
        "good": lambda: masked_softmax,
        "never tried": load_nothing,
    }
    set_knobs(monkeypatch, BACKENDS=backends, BACKEND_ORDER={"cpu": tuple(backends)})
    assert train.choose_attention(CPU, PROBED) == ("good", masked_softmax)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "attention: not missing: ImportError: no such module"
    assert second.startswith("attention: not wrong: RuntimeError: forward is off by ")


def test_a_forced_back_end_is_taken_or_ends_the_run(monkeypatch, capsys):
    set_knobs(monkeypatch, ATTENTION="sdpa")
    assert train.choose_attention(CPU, PROBED)[0] == "sdpa"
    set_knobs(monkeypatch, ATTENTION="fa3")
    with pytest.raises(SystemExit, match="2"):
        train.choose_attention(CPU, PROBED)
    said = capsys.readouterr()
    assert "no attention back-end works, see above; change ATTENTION, " in said.err
    assert said.out.startswith("attention: not fa3: ") and said.out.count("\n") == 1


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Stands in for a Hopper GPU and a kernel hub; records calls to the hub and to its kernel."""
    snapshot = tmp_path / "hub" / "snapshots" / "0123abcdef"
    build = snapshot / "build" / "flash_attn3"
    build.mkdir(parents=True)
    hub = SimpleNamespace(asked=[], calls=[], snapshot=snapshot)

    def get_kernel(repository, version):
        hub.asked.append(os.environ.get("LOCAL_KERNELS"))
        assert (repository, version) == ("kernels-community/flash-attn3", 1)
        return hub.module

    def flash_attn_func(q, k, v, **options):
        hub.calls.append(options)
        return q, "statistics"

    hub.module = SimpleNamespace(__file__=f"{build}/it.py", flash_attn_func=flash_attn_func)
    (tmp_path / "cache").mkdir()
    set_knobs(monkeypatch, CACHE=tmp_path / "cache")
    for name in ("LOCAL_KERNELS", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return hub


@pytest.mark.parametrize(
    ("device", "capability", "taken"),
    [
        ("cuda", (9, 0), "fa3 0123abcd"),
        ("cuda", (10, 0), "varlen"),
        ("cuda", (8, 0), "varlen"),
        ("cuda", (7, 5), "sdpa"),
        ("mps", None, "sdpa"),
    ],
)
def test_a_gpu_gets_the_fastest_that_it_can_run(hub, monkeypatch, device, capability, taken):
    set_knobs(monkeypatch, probe_attention=lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    name, _ = train.choose_attention(torch.device(device), PROBED)
    assert name == taken


# ---- Calls into packages ----
@pytest.mark.parametrize("alone", [False, True])
def test_fa3_is_called_as_its_interface_says(hub, alone):
    """A window of 5 covers rows of 6 tokens. The kernel may return the output alone."""
    both = hub.module.flash_attn_func
    if alone:
        hub.module.flash_attn_func = lambda *qkv, **options: both(*qkv, **options)[0]
    q, k, v = torch.randn(3, 1, 6, 2, 8)
    for window in (3, 5, 99):
        assert train.load_fa3()(q, k, v, window) is q
    assert [call["window_size"] for call in hub.calls] == [(3, 0), (-1, 0), (-1, 0)]
    assert all(call["causal"] for call in hub.calls)


def test_a_kernel_comes_from_the_folder_of_its_first_load_while_that_is_there(hub):
    assert train.load_fa3().snapshot == train.load_fa3().snapshot == "0123abcd"
    del os.environ["LOCAL_KERNELS"]
    shutil.rmtree(hub.snapshot)
    train.load_fa3()
    assert hub.asked == [None, f"kernels-community/flash-attn3={hub.snapshot}", None]


def test_varlen_gets_rows_end_to_end_and_a_window_to_the_left(monkeypatch):
    signature = inspect.signature(varlen.varlen_attn)
    windows = []

    def varlen_attn(*arguments, **options):
        given = signature.bind(*arguments, **options).arguments
        q, k, v, ends, also, longest, other = list(given.values())[:7]
        assert ends.tolist() == also.tolist() == [0, 6, 12]
        assert ends.dtype == torch.int32
        assert longest == other == 6
        assert given["enable_gqa"]
        left, right = given["window_size"]
        assert right == 0
        windows.append(left)
        rows = (x.unflatten(0, (2, 6)) for x in (q, k, v))
        return masked_softmax(*rows, 6 if left == -1 else left).flatten(0, 1)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    q, k, v, _ = draw(6, 4, 2)
    for window in (2, 4, 5, 6):
        got = train.load_varlen()(q, k, v, window)
        torch.testing.assert_close(got, masked_softmax(q, k, v, window))
    assert windows == [2, 4, -1, -1]  # a window that covers the row becomes -1
