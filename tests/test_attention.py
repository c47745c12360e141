"""Each back-end of attention beside the definition, and how a run comes by one."""

import itertools
import math
import os
import shutil
from types import SimpleNamespace

import train
from tests.tiny import build, set_knobs, tiny, tokens

import kernels
import pytest
import torch

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


# ---- What a back-end computes ----
def masked_softmax(q, k, v, window):
    """One row, one head, one query at a time."""
    B, T, H, D = q.shape
    out = torch.zeros_like(q)
    for b, h, i in itertools.product(range(B), range(H), range(T)):
        keys = [j for j in range(T) if 0 <= i - j <= window]
        scores = torch.stack([q[b, i, h] @ k[b, j, h] for j in keys]) / math.sqrt(D)
        shares = scores.softmax(0)
        out[b, i, h] = sum(share * v[b, j, h] for share, j in zip(shares, keys, strict=True))
    return out


def load_with_blocks_of_4(monkeypatch):
    set_knobs(monkeypatch, CPU_QUERY_BLOCK=4)
    return train.load_blocks()


BACKENDS = {
    "reference": lambda monkeypatch: train.reference_attention,
    "sdpa": lambda monkeypatch: train.load_sdpa(),
    "blocks": lambda monkeypatch: train.load_blocks(),
    "small blocks": load_with_blocks_of_4,
}


def values_and_gradients(attention, inputs, window, grad):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attention(*leaves, window)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("window", [0, 1, 3, 5, 8, 12, 18, 19, 100])
@pytest.mark.parametrize("name", BACKENDS)
def test_attention_is_a_masked_softmax(monkeypatch, name, window):
    """With values and gradients, and a length that is no multiple of the blocks."""
    torch.manual_seed(window)
    *inputs, grad = torch.randn(4, 1, 20, 2, 8)
    got = values_and_gradients(BACKENDS[name](monkeypatch), inputs, window, grad)
    want = values_and_gradients(masked_softmax, inputs, window, grad)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 63, 100, 150, 298, 299, 300])
@pytest.mark.parametrize("name", ["sdpa", "blocks", "small blocks"])
def test_long_rows_go_by_blocks(monkeypatch, name, window):
    """As above, where rows are longer than the blocks that the back-ends choose themselves."""
    torch.manual_seed(window)
    *inputs, grad = torch.randn(4, 2, 300, 2, 8)
    got = values_and_gradients(BACKENDS[name](monkeypatch), inputs, window, grad)
    want = values_and_gradients(train.reference_attention, inputs, window, grad)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "size", "blocks", "queries", "keys"),
    [
        (6, 4, 5, 4, 12),  # a query at the begin of its block reaches into two before it
        (4, 4, 5, 4, 8),
        (0, 4, 5, 4, 4),
        (6, 7, 4, 5, 15),  # 7 does not divide 20
        (12, 4, 5, 4, 16),
        (13, 4, 1, 20, 20),
        (100, 4, 1, 20, 20),
    ],
)
def test_blocks_leave_out_most_keys_that_no_query_sees(window, size, blocks, queries, keys):
    q, k, v, hidden = train.by_blocks(*torch.randn(3, 2, 20, 3, 8), window, size)
    assert q.shape == (2, blocks, 3, queries, 8)
    assert k.shape == v.shape == (2, blocks, 3, keys, 8)
    assert hidden.shape == (blocks, 1, queries, keys)
    seen = [min(i, window) + 1 for i in range(20)]
    assert (~hidden).sum(-1).flatten().tolist() == seen


@pytest.mark.parametrize("name", BACKENDS)
def test_attention_keeps_the_precision(monkeypatch, name):
    q, k, v = torch.randn(3, 1, 20, 2, 8).bfloat16()
    out = BACKENDS[name](monkeypatch)(q, k, v, 5)
    want = train.reference_attention(q, k, v, 5)
    assert out.shape == q.shape
    assert out.dtype == (torch.float32 if name == "reference" else torch.bfloat16)
    torch.testing.assert_close(out.float(), want, rtol=1.6e-2, atol=1.6e-2)  # bf16


def test_a_model_means_the_same_with_each_back_end():
    """What layers give to attention, grouped heads and windows included, suits all of them."""
    config = tiny(layers=3, heads=4, kv_heads=2, head_dim=16, window=5)
    x = tokens(config)
    want = build(config, attend=train.reference_attention)(x)
    for load in (train.load_sdpa, train.load_blocks):
        torch.testing.assert_close(build(config, attend=load())(x), want, rtol=1e-4, atol=1e-4)


# ---- How a run comes by one ----
def use_ladder(monkeypatch, **backends):
    """Of back-ends that a CPU is offered in this order, (name, attention) of the one chosen."""
    set_knobs(monkeypatch, BACKENDS=backends, LADDER={"cpu": tuple(backends)})
    return train.choose_attention(CPU, torch.float32, tiny(window=8))


def load_nothing():
    raise ImportError("no such module")


def load_one_that_dies():
    def attention(q, k, v, window):
        raise RuntimeError("no kernel image is available\nfor this device")

    return attention


def load_one_of_few_words():
    raise ValueError


def load_wrong_window():
    def attention(q, k, v, window):
        return train.reference_attention(q, k, v, window - 1)

    return attention


def load_unmasked():
    def attention(q, k, v, window):
        return train.reference_attention(q.flip(1), k, v, window)

    return attention


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out

    @staticmethod
    def backward(ctx, grad):
        return 1.1 * grad


def load_wrong_backward():
    def attention(q, k, v, window):
        return WrongGradient.apply(train.reference_attention(q, k, v, window))

    return attention


def load_nan():
    def attention(q, k, v, window):
        return train.reference_attention(q, k, v, window) * math.nan

    return attention


def test_the_first_back_end_that_passes_the_probe_is_taken(monkeypatch, capsys):
    name, attention = use_ladder(
        monkeypatch,
        missing=load_nothing,
        dies=load_one_that_dies,
        silent=load_one_of_few_words,
        window=load_wrong_window,
        unmasked=load_unmasked,
        backward=load_wrong_backward,
        nan=load_nan,
        good=train.load_sdpa,
        never_tried=load_nothing,
    )
    assert name == "good"
    q, k, v = torch.randn(3, 1, 32, 2, 32)
    want = train.reference_attention(q, k, v, 8)
    torch.testing.assert_close(attention(q, k, v, 8), want, rtol=1e-4, atol=1e-5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "attention: not missing: no such module",
        "attention: not dies: no kernel image is available",
        "attention: not silent: ValueError",
    ]
    assert lines[3].startswith("attention: not window: forward is off by 0.")
    assert lines[3].endswith(" at window 8")
    assert lines[4].startswith("attention: not unmasked: forward is off by ")
    assert lines[5] == "attention: not backward: dq is off by 0.100 at window 8"
    assert lines[6] == "attention: not nan: forward is off by nan at window 8"
    assert len(lines) == 7


def test_each_window_is_probed(monkeypatch, capsys):
    """A back-end that gets just the long one right is not taken."""

    def load_without_window():
        def attention(q, k, v, window):
            return train.reference_attention(q, k, v, 32)

        return attention

    name, _ = use_ladder(monkeypatch, long=load_without_window, good=train.load_sdpa)
    assert name == "good"
    assert "at window 8" in capsys.readouterr().out


def test_a_cpu_is_offered_nothing_that_needs_a_gpu(capsys):
    name, _ = train.choose_attention(CPU, torch.float32, tiny())
    assert name == "blocks"
    assert capsys.readouterr().out == ""


def test_a_precision_of_16_bits_passes_the_probe(capsys):
    name, _ = train.choose_attention(CPU, torch.bfloat16, tiny(window=8))
    assert name == "blocks"
    assert capsys.readouterr().out == ""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hopper GPU and a kernel hub: where it looked, how it was asked and how its kernel called."""
    snapshot = tmp_path / "hub" / "snapshots" / "0123abcdef"
    build = snapshot / "build" / "torch-cuda" / "flash_attn3"
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


@pytest.fixture
def unprobed(monkeypatch):
    set_knobs(monkeypatch, probe_attention=lambda *arguments: None)


@pytest.mark.parametrize(
    ("capability", "taken", "passed_over"),
    [
        ((9, 0), "fa3 0123abcd", []),
        ((10, 0), "varlen", ["fa3: needs compute capability 9.0"]),
        ((8, 0), "varlen", ["fa3: needs compute capability 9.0"]),
        (
            (7, 5),
            "sdpa",
            ["fa3: needs compute capability 9.0", "varlen: needs compute capability 8.0"],
        ),
    ],
)
def test_a_gpu_gets_the_fastest_that_it_can_run(
    hub, unprobed, monkeypatch, capsys, capability, taken, passed_over
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    name, _ = train.choose_attention(CUDA, torch.bfloat16, tiny())
    assert name == taken
    assert capsys.readouterr().out.splitlines() == [
        f"attention: not {line}" for line in passed_over
    ]


def test_an_amd_gpu_gets_what_runs_everywhere(hub, unprobed, monkeypatch, capsys):
    """It calls itself cuda, and may have capability 9.0."""
    monkeypatch.setattr(torch.version, "hip", "7.1")
    name, _ = train.choose_attention(CUDA, torch.bfloat16, tiny())
    assert name == "sdpa"
    assert capsys.readouterr().out == ""


def test_what_cannot_be_compiled_for_a_gpu_is_passed_over(monkeypatch, capsys):
    """The probe there is of the compiled back-end."""
    compiled = []

    def compile(function, **options):
        compiled.append(function)
        if len(compiled) == 1:
            raise torch._dynamo.exc.TorchDynamoException("no kernel for that")
        return function

    monkeypatch.setattr(torch, "compile", compile)
    set_knobs(monkeypatch, COMPILE=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        train.probe_attention(train.load_sdpa(), CUDA, torch.float32, tiny())
    train.probe_attention(train.load_sdpa(), CPU, torch.float32, tiny())
    assert len(compiled) == 1  # on a CPU the model's own compilation is enough


def test_an_apple_chip_gets_what_runs_everywhere(unprobed, capsys):
    name, _ = train.choose_attention(torch.device("mps"), torch.float32, tiny())
    assert name == "sdpa"
    assert capsys.readouterr().out == ""


def test_a_forced_back_end_is_taken_and_nothing_else_is_tried(monkeypatch, capsys):
    set_knobs(monkeypatch, ATTENTION="sdpa")
    name, _ = train.choose_attention(CPU, torch.float32, tiny())
    assert name == "sdpa"
    assert capsys.readouterr().out == ""


def test_a_forced_back_end_that_fails_ends_the_run(monkeypatch, capsys):
    set_knobs(monkeypatch, ATTENTION="fa3")
    with pytest.raises(SystemExit) as stop:
        train.choose_attention(CPU, torch.float32, tiny())
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.err == "error: no attention works with ATTENTION = 'fa3'; set it to auto.\n"
    assert said.out.startswith("attention: not fa3: ")
    assert said.out.count("\n") == 1


# ---- What the packages take ----
@pytest.mark.parametrize(("window", "size"), [(3, (3, 0)), (5, (-1, 0)), (99, (-1, 0))])
@pytest.mark.parametrize("alone", [False, True])
def test_fa3_is_called_as_its_interface_says(hub, window, size, alone):
    """Rows of 6 tokens: a window of 5 covers them. The output may come alone."""
    both = hub.module.flash_attn_func
    if alone:
        hub.module.flash_attn_func = lambda *qkv, **options: both(*qkv, **options)[0]
    q, k, v = torch.randn(3, 1, 6, 2, 8)
    assert train.load_fa3()(q, k, v, window) is q
    assert hub.calls == [{"causal": True, "window_size": size}]


def test_a_kernel_comes_from_the_folder_of_its_first_load(hub):
    assert train.load_fa3().snapshot == train.load_fa3().snapshot == "0123abcd"
    assert hub.asked == [None, f"kernels-community/flash-attn3={hub.snapshot}"]
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"


def test_a_folder_that_is_gone_is_asked_of_the_hub_again(hub):
    train.load_fa3()
    shutil.rmtree(hub.snapshot)
    train.load_fa3()
    assert hub.asked == [None, None]


def test_a_user_s_own_kernel_stays(hub, monkeypatch):
    train.load_fa3()
    monkeypatch.setenv("LOCAL_KERNELS", "kernels-community/flash-attn3=/own")
    hub.module.__file__ = "/own/build/b/__init__.py"
    assert train.load_fa3().snapshot == "local"
    assert hub.asked[-1] == "kernels-community/flash-attn3=/own"


def test_a_cache_that_nobody_may_write_to_is_no_obstacle(hub, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (train.CACHE, os.W_OK))
    assert train.load_fa3().snapshot == "0123abcd"
    assert not list(train.CACHE.iterdir())


def test_varlen_gets_rows_end_to_end_and_a_window_to_the_left(monkeypatch):
    from torch.nn.attention import varlen

    windows = []

    def varlen_attn(q, k, v, ends_q, ends_k, max_q, max_k, window_size):
        assert ends_q.tolist() == ends_k.tolist() == [0, 6, 12]
        assert ends_q.dtype == torch.int32
        assert (max_q, max_k) == (6, 6)
        left, right = window_size
        windows.append(left)
        assert right == 0
        left = 6 if left == -1 else left
        rows = (x.view(2, 6, 2, 8) for x in (q, k, v))
        return train.reference_attention(*rows, left).flatten(0, 1)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    q, k, v = torch.randn(3, 2, 6, 2, 8)
    for window in (2, 4, 5, 6):
        got = train.load_varlen()(q, k, v, window)
        torch.testing.assert_close(got, train.reference_attention(q, k, v, window))
    assert windows == [2, 4, -1, -1]  # what covers the row is written as -1


@pytest.mark.parametrize(
    ("load", "capability"),
    [
        (train.load_fa3, (8, 9)),
        (train.load_fa3, (12, 0)),
        (train.load_varlen, (7, 5)),
    ],
)
def test_a_gpu_that_a_package_does_not_fit_is_declined(monkeypatch, load, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(RuntimeError, match="compute capability"):
        load()
