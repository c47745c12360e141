"""Compares the model with hand-derived values and naive twins, switches its parts off, and checks
its initialisation."""

import importlib.util
import math
import re

import prepare
import train
from tests.common import ROOT
from tests.tiny import build, check_training, record_inputs, set_knobs, tiny, tokens

import pytest
import torch
import torch.nn.functional as F


# ---- Golden values ----
def import_profile(monkeypatch, profile):
    """Imports train.py as a module of its own, since knobs are read once, at import."""
    monkeypatch.setattr(prepare, "PROFILE", profile)
    monkeypatch.setattr(prepare, "MAX_SEQ_LEN", 512 if profile == "small" else 2048)
    spec = importlib.util.spec_from_file_location(profile, ROOT / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("profile", "depth", "width", "windows", "micro_batches"),
    [
        ("full", 8, 512, {1024, 2048}, 2),
        ("medium", 4, 512, {256, 2048}, 1),
        ("small", 3, 192, {0, 32, 512}, 1),
    ],
)
def test_the_knobs_of_a_profile_fit_each_other(
    monkeypatch, profile, depth, width, windows, micro_batches
):
    module = import_profile(monkeypatch, profile)
    config = module.derive_config(8192, torch.float32)
    assert (len(config.windows), config.n_embd, set(config.windows)) == (depth, width, windows)
    assert module.accumulation_steps(module.DEVICE_BATCH_SIZE) == micro_batches


def test_the_full_default_has_50_million_parameters(monkeypatch):
    """A layer has 12 * 512^2 weights. There are 4 gates of 32 * 4, 6 tables of V * C,
    16 scalars."""
    full = import_profile(monkeypatch, "full")
    with torch.device("meta"):
        model = full.GPT(full.derive_config(8192, torch.float32), None)
    S = 1024
    L = 2048
    matrices = 8 * 12 * 512**2 + 4 * 32 * 4 + 8192 * 512
    assert sum(p.numel() for p in model.parameters()) == matrices + 5 * 8192 * 512 + 16
    assert model.flops_per_token() == 6 * matrices + 12 * 512 * (6 * S + 2 * L)
    assert model.config.windows == [S, S, S, L, S, S, S, L]
    assert model.config.value_layers == [1, 3, 5, 7]


# ---- Layers ----
def test_rotation_turns_pairs_by_their_position(monkeypatch):
    """Channels d and d + D / 2 are the two coordinates of a point, which at position t turns by
    t * base ** (-2 d / D)."""
    set_knobs(monkeypatch, ROPE_BASE=50)
    model = build(tiny())
    x = torch.randn(1, 32, 2, 32)
    angle = torch.outer(torch.arange(32), 50 ** (-torch.arange(16) / 16))
    turn = torch.polar(torch.ones(32, 16), -angle)
    points = torch.complex(*x.chunk(2, dim=-1)) * turn[:, None]
    expected = torch.cat((points.real, points.imag), dim=-1)
    turned = train.rotate(x, model.cos, model.sin)
    torch.testing.assert_close(turned, expected, rtol=1e-4, atol=1e-5)


def test_attention_gets_the_right_inputs():
    """Queries and keys are rotated and have an RMS of one, so a norm of sqrt(D). Values only gain
    their embedding, times a gate per key-value head that reads the first channels."""
    calls = []

    def attend(q, k, v, window):
        calls.append((q, k, v, window))
        return q

    config = tiny(heads=4, kv_heads=2, windows=[4, 8, 3, 32])
    model = build(config, attend=attend)
    attention = model.blocks[1].attention
    inputs = record_inputs(attention)
    idx = tokens(config)
    model(idx)
    assert [window for *_, window in calls] == config.windows
    [x] = inputs
    q, k, v, _ = calls[1]
    for got, layer in ((q, attention.q), (k, attention.k)):
        heads = F.linear(x, layer.weight).unflatten(-1, (-1, 32))
        turned = train.rotate(heads, model.cos, model.sin)
        torch.testing.assert_close(got, turned * 32**0.5 / turned.norm(dim=-1, keepdim=True))
    gate = 2 / (1 + (-x[..., : train.VE_GATE_CHANNELS] @ attention.gate.weight.T).exp())
    ve = model.value_embeddings["1"](idx)
    expected = F.linear(x, attention.v.weight) + gate.repeat_interleave(32, -1) * ve
    torch.testing.assert_close(v.flatten(2), expected)


def test_a_layer_without_a_window_has_no_attention():
    """Its block adds the MLP alone."""
    model = build(tiny(windows=[0, 32]))
    [block, other] = model.blocks
    assert (block.attention is None, other.attention is None) == (True, False)
    x = torch.randn(2, 32, 64)
    torch.testing.assert_close(block(x, None, None, None), x + block.mlp(train.norm(x)))


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


def test_hashed_pairs_and_triples_are_added_to_the_embedding(monkeypatch):
    """Before a row's first token there are zeros, also in a row of one token."""
    set_knobs(monkeypatch, NGRAM_ROWS=3)
    model = build(tiny())
    [block, _] = model.blocks
    inputs = record_inputs(block)
    weight = model.resid_lambdas[0] + model.x0_lambdas[0]
    for T in (32, 1):
        idx = tokens(model.config)[:, :T]
        model(idx)
        expected = train.norm(model.wte(idx))
        for b, row in enumerate(idx.tolist()):
            for t, (before, last, this) in enumerate(zip([0, 0, *row], [0, *row], row)):
                pair = (this * 36313) ^ (last * 27191)
                for code in (pair, pair ^ (before * 51749)):
                    expected[b, t] += model.ngram_lambda * model.ngrams.weight[code % (3 * 61)]
        torch.testing.assert_close(inputs.pop(), weight * expected)


def test_a_cpu_reads_tables_by_gather_with_the_same_gradient():
    """Also of a table in bf16, whose gradient is summed in fp32 and then rounded once."""
    torch.manual_seed(0)
    idx = torch.randint(5, (4, 16))
    grad = torch.randn(4, 16, 8)
    for dtype in (torch.float32, torch.bfloat16):
        table = torch.nn.Embedding(5, 8, dtype=dtype)
        looked_up = train.look_up(table, idx)
        torch.testing.assert_close(looked_up, table(idx).float(), rtol=0, atol=0)
        [got] = torch.autograd.grad(looked_up, table.weight, grad)
        wanted = torch.zeros(5, 8).index_add(0, idx.flatten(), grad.flatten(0, 1)).to(dtype)
        torch.testing.assert_close(got, wanted)


# ---- Parts switched off ----
ZERO = "LOGIT_SOFTCAP SHORT_WINDOW VE_EVERY NGRAM_ROWS WEIGHT_DECAY WARMDOWN_RATIO MOMENTUM_STEPS"
SWITCHES = {
    "as it is": {},
    "all off": dict.fromkeys(ZERO.split(), 0) | {"X0_INIT": None},
    "all on": {"WARMUP_RATIO": 0.3, "VE_EVERY": 1, "X0_INIT": 0, "KV_HEADS": 1},
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_model_with_this_switched_trains(monkeypatch, switch):
    """Sets each knob that may be 0 or None."""
    shape = {"DEPTH": 3, "ASPECT_RATIO": 32, "HEAD_DIM": 32, "SHORT_WINDOW": 8}
    set_knobs(monkeypatch, **(shape | {"MAX_SEQ_LEN": 32} | SWITCHES[switch]))
    model = build(train.derive_config(61, torch.float32), scramble=False)
    assert check_training(model)[0] == pytest.approx(4.11, abs=0.02)  # ln 61


# ---- Initialisation ----
def test_initialisation_follows_the_knobs_and_the_seed(monkeypatch):
    set_knobs(monkeypatch, EMBEDDING_STD=3.0, UNEMBEDDING_STD=0.5, MATRIX_SCALE=0.25)
    set_knobs(monkeypatch, RESID_INIT=0.75, X0_INIT=-2.0, NGRAM_INIT=0.3)
    model, other = (build(tiny(layers=3), seed=seed, scramble=False) for seed in (1, 2))
    assert model.wte.weight.std().item() == pytest.approx(3, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert model.resid_lambdas.tolist() == [0.75] * 3
    assert model.x0_lambdas.tolist() == [-2.0] * 3
    assert model.ngram_lambda.item() == pytest.approx(0.3)
    s = 0.25 * math.sqrt(3 / 64)
    named = dict(model.named_parameters())
    assert len(named) == 2 + 2 + 2 + 2 + 3 * 6 + 2  # outside, lambdas, n-grams, ve, matrices, gates
    for name, weight in named.items():
        constant = bool(re.search(r"\.(out|down|gate)\.|lambda|ngrams", name))
        assert constant == weight.equal(other.get_parameter(name)), name
        if constant:
            assert "lambda" in name or not weight.any()
        elif "." in name.removesuffix(".weight"):  # a value table or a matrix in a block
            assert -s <= weight.min() < -0.9 * s < 0.9 * s < weight.max() <= s


@pytest.mark.parametrize(
    ("dtype", "tables"),
    [
        (torch.bfloat16, {"wte.weight", "value_embeddings.1.weight", "ngrams.weight"}),
        (torch.float16, set()),
    ],
)
def test_tables_take_the_precision_and_matrices_stay_in_fp32(dtype, tables):
    """In fp16 the tables stay in fp32 too, and with them AdamW's second moments."""
    model = build(tiny(dtype=dtype), scramble=False)
    low = {name for name, p in model.named_parameters() if p.dtype != torch.float32}
    assert low == tables
    seen = record_inputs(model.blocks[1])
    assert model(tokens(model.config)).dtype == torch.float32
    assert seen[0].dtype == dtype
