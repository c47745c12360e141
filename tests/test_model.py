"""Compares the model with hand-derived values and naive twins, and switches its parts off."""

import importlib.util

import prepare
import train
from tests.common import ROOT
from tests.tiny import build, check_training, record_inputs, set_knobs, tiny, tokens

import pytest
import torch
import torch.nn.functional as F


# ---- Golden values ----
def test_the_full_default_has_50_million_parameters(monkeypatch):
    """Loads a module of its own, since knobs are read once, at import. A layer has 12 * 512^2
    weights; there are 4 gates of 32 * 4, 6 tables of V * C and 16 scalars."""
    monkeypatch.setattr(prepare, "PROFILE", "full")
    monkeypatch.setattr(prepare, "MAX_SEQ_LEN", 2048)
    spec = importlib.util.spec_from_file_location("full", ROOT / "train.py")
    full = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(full)
    model = full.GPT(full.derive_config(8192, torch.float32), None)
    S = 1024
    L = 2048
    matrices = 8 * 12 * 512**2 + 4 * 32 * 4 + 8192 * 512
    assert sum(p.numel() for p in model.parameters()) == matrices + 5 * 8192 * 512 + 16
    assert model.flops_per_token() == 6 * matrices + 12 * 512 * (6 * S + 2 * L)
    assert model.config.windows == [S, S, S, L, S, S, S, L]
    assert model.config.value_layers == [1, 3, 5, 7]
    model.config.windows[0] = 9999  # longer than the row
    assert model.flops_per_token() == 6 * matrices + 12 * 512 * (5 * S + 3 * L)


# ---- Layers ----
def test_rotation_turns_by_the_position():
    """Channels d and d + D / 2 are the two coordinates of a point that turns."""
    model = build(tiny())
    x = torch.zeros(1, 32, 1, 32)
    x[..., 3] = 1.0
    turned = train.rotate(x, model.cos, model.sin)[0, :, 0]
    angle = torch.arange(32) * train.ROPE_BASE ** (-2 * 3 / 32)
    torch.testing.assert_close(turned[:, 3], angle.cos())
    torch.testing.assert_close(turned[:, 3 + 16], -angle.sin())
    torch.testing.assert_close(turned.norm(dim=-1), torch.ones(32))


class Attend:
    """Replaces a back-end and records its arguments."""

    def __init__(self):
        self.calls = []

    def __call__(self, q, k, v, window):
        self.calls.append((q, k, v, window))
        return v


def test_attention_gets_the_right_inputs():
    """Queries and keys are rotated and have an RMS of one, so a norm of sqrt(D). Values only gain
    their embedding, times a gate that reads the first channels."""
    attend = Attend()
    model = build(tiny(layers=1), attend=attend)
    attention = model.blocks[0].attention
    x, ve = torch.randn(2, 1, 32, 64)
    attention(x, ve, model.cos, model.sin)
    [(q, k, v, _)] = attend.calls
    for got, layer in ((q, attention.q), (k, attention.k)):
        turned = train.rotate((x @ layer.weight.T).view(1, 32, 2, 32), model.cos, model.sin)
        torch.testing.assert_close(got, turned * 32**0.5 / turned.norm(dim=-1, keepdim=True))
    gate = 2 / (1 + (-x[..., : train.VE_GATE_CHANNELS] @ attention.gate.weight.T).exp())
    expected = F.linear(x, attention.v.weight) + gate.repeat_interleave(32, -1) * ve
    torch.testing.assert_close(v.flatten(2), expected)
    assert 0 < gate.min() < 0.9 < 1.1 < gate.max() < 2


def test_each_layer_has_its_window():
    attend = Attend()
    config = tiny(windows=[4, 8, 3, 32])
    build(config, attend=attend)(tokens(config))
    assert [window for *_, window in attend.calls] == [4, 8, 3, 32]


def test_grouped_heads_are_heads_whose_keys_and_values_repeat():
    """Query head h reads key-value head h // 2."""
    grouped = build(tiny(heads=4, kv_heads=2, head_dim=16))
    full = build(tiny(heads=4, kv_heads=4, head_dim=16))

    def repeated(rows, size):
        """Repeats each head, `size` rows, twice."""
        return rows.unflatten(0, (2, size)).repeat_interleave(2, dim=0).flatten(0, 1)

    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith(("attention.k.weight", "attention.v.weight")):
            state[name] = repeated(weight, 16)
        if name.endswith("gate.weight"):
            state[name] = repeated(weight, 1)
        if name.startswith("value_embeddings"):
            state[name] = repeated(weight.T, 16).T
    full.load_state_dict(state)
    x = tokens(grouped.config)
    torch.testing.assert_close(grouped(x), full(x), rtol=1e-4, atol=1e-4)


# ---- Parts switched off ----
def test_the_x0_weight_adds_the_embedding_before_the_layer():
    """At the start blocks do nothing, so the stream is a sum derived by hand."""
    model = build(tiny(), scramble=False)
    model.resid_lambdas.data = torch.tensor([0.5, 3.0])
    model.x0_lambdas.data = torch.tensor([2.0, 0.25])
    first, second = (record_inputs(block) for block in model.blocks)
    last = record_inputs(model.lm_head)
    x = tokens(model.config)
    model(x)
    x0 = train.norm(model.wte(x))
    torch.testing.assert_close(first, [(0.5 + 2) * x0])
    torch.testing.assert_close(second, [(3 * (0.5 + 2) + 0.25) * x0])
    torch.testing.assert_close(last, [x0])


SWITCHES = {
    "as it is": {},
    "all off": {
        "LOGIT_SOFTCAP": 0,
        "SHORT_WINDOW": 0,
        "VE_EVERY": 0,
        "X0_INIT": None,
        "WEIGHT_DECAY": 0,
        "WARMDOWN_RATIO": 0,
        "MOMENTUM_STEPS": 0,
    },
    "all on": {"WARMUP_RATIO": 0.3, "VE_EVERY": 1, "X0_INIT": 0, "KV_HEADS": 1},
    "short layers but the last": {"WINDOW_PATTERN": "S", "VE_EVERY": 3},
    "one layer": {"DEPTH": 1, "ASPECT_RATIO": 64},
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_model_with_this_switched_trains(monkeypatch, switch):
    """Sets each knob that may be 0 or None."""
    shape = {"DEPTH": 3, "ASPECT_RATIO": 32, "HEAD_DIM": 32, "SHORT_WINDOW": 8}
    set_knobs(monkeypatch, **(shape | {"MAX_SEQ_LEN": 32} | SWITCHES[switch]))
    model = build(train.derive_config(61, torch.float32), scramble=False)
    assert check_training(model)[0] == pytest.approx(4.11, abs=0.02)  # ln 61


def test_a_cpu_reads_tables_by_gather_with_the_same_gradient():
    """Also of a table in bf16, whose gradient is summed in fp32 and then rounded once."""
    idx = torch.randint(0, 5, (4, 16), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        table = torch.nn.Embedding(5, 8, dtype=dtype)
        grad = torch.randn(4, 16, 8)
        looked_up = train.look_up(table, idx)
        torch.testing.assert_close(looked_up, table(idx).float(), rtol=0, atol=0)
        [got] = torch.autograd.grad(looked_up, table.weight, grad)
        wanted = torch.zeros(5, 8).index_add(0, idx.flatten(), grad.flatten(0, 1)).to(dtype)
        torch.testing.assert_close(got, wanted)
