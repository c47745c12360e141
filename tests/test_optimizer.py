"""Compares parameter groups, AdamW, Muon and the schedules with naive twins or torch's own."""

import train
from tests.tiny import build, build_optimizer, check_training, set_knobs, take_steps, tiny

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


# ---- Groups ----
def test_each_row_has_the_values_of_its_knobs(monkeypatch):
    set_knobs(monkeypatch, EMBEDDING_LR=2, UNEMBEDDING_LR=3, MATRIX_LR=5, SCALAR_LR=7, RESID_LR=11)
    set_knobs(monkeypatch, ADAM_BETAS=(0.1, 0.2), X0_BETAS=(0.3, 0.4), MUON_BETAS=(0.5, 0.6))
    set_knobs(monkeypatch, WIDTH_LR_POWER=-2, WEIGHT_DECAY=13, EPS=17)
    model = build(tiny(heads=3, kv_heads=3, head_dim=16))  # C 48, a sixteenth of 768
    names = {p: name for name, p in model.named_parameters()}
    found = {}
    for group in train.parameter_groups(model):
        assert group["eps"] == 17 and group["params"]
        values = (group["kind"], group["peak_lr"], group["betas"], group["peak_decay"])
        found |= dict.fromkeys((names[p] for p in group["params"]), values)
    scale = 16**2
    tables = ("adamw", 2 * scale, (0.1, 0.2), 0)
    matrices = dict.fromkeys(names.values(), ("muon", 5, (0.5, 0.6), 13))
    assert found == matrices | {
        "lm_head.weight": ("adamw", 3 * scale, (0.1, 0.2), 0),
        "wte.weight": tables,
        "value_embeddings.1.weight": tables,
        "ngrams.weight": tables,
        "resid_lambdas": ("adamw", 11, (0.1, 0.2), 0),
        "ngram_lambda": ("adamw", 11, (0.1, 0.2), 0),
        "x0_lambdas": ("adamw", 7, (0.3, 0.4), 0),
    }


def test_vectors_in_the_blocks_are_trained_by_adamw(monkeypatch):
    """An experimenter may add a bias."""
    set_knobs(monkeypatch, VECTOR_LR=0.07)
    model = build(tiny(), scramble=False)
    mlp = model.blocks[1].mlp
    mlp.up = train.Linear(64, mlp.up.out_features, bias=True)
    vector = mlp.up.bias
    [row] = [g for g in train.parameter_groups(model) if g["params"][0] is vector]
    assert (row["kind"], row["peak_lr"], row["peak_decay"]) == ("adamw", 0.07, 0)
    check_training(model)


def test_a_parameter_that_is_not_in_exactly_one_row_ends_the_run(capsys):
    """It is in none, in two, or like stacked experts, which suit neither Muon nor VECTOR_LR."""
    model = build(tiny())
    model.extra = torch.nn.Parameter(torch.zeros(1))
    model.lm_head.weight = model.wte.weight
    model.blocks[0].experts = torch.nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(SystemExit, match="2"):
        train.parameter_groups(model)
    names = "extra, wte.weight, blocks.0.experts"
    error = f"error: not in exactly one row of parameter_groups: {names}; "
    assert capsys.readouterr().err.startswith(error)


# ---- AdamW ----
def optimizer_of(kind, params, **changes):
    """Adds an idle row for torch's AdamW, which cannot do without one."""
    row = {"kind": kind, "params": params, "peak_lr": 0.1, "betas": (0.8, 0.95)}
    row |= {"peak_decay": 0.0, "eps": 1e-10}
    idle = row | {"kind": "adamw", "params": [torch.nn.Parameter(torch.zeros(1))]}
    optimizer = train.MuonAdamW([row | changes, idle], torch.float32)
    train.set_schedules(optimizer, 0.0, 0)
    return optimizer


def test_adamw_follows_the_schedules():
    """Rate, decay, betas and an eps that matters reach torch's AdamW, step by step."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours = optimizer_of("adamw", params, peak_decay=0.4, eps=0.5)
    theirs = torch.optim.AdamW(twins, lr=0.1, betas=(0.8, 0.95), eps=0.5)
    for step, progress in enumerate((0.0, 0.25, 0.5, 1.0)):
        train.set_schedules(ours, progress, step)
        theirs.param_groups[0]["lr"] = 0.1 * train.lr_factor(progress)
        theirs.param_groups[0]["weight_decay"] = 0.4 * (1 - progress)
        for p, twin in zip(params, twins, strict=True):
            p.grad = torch.randn_like(p)
            twin.grad = p.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(params, twins)


# ---- Muon ----
@given(st.integers(1, 12), st.integers(1, 24), st.integers(0, 100))
def test_polar_express_drives_singular_values_to_one(rows, cols, seed):
    g = torch.randn(2, rows, cols, generator=torch.Generator().manual_seed(seed))
    kept = torch.linalg.svdvals(g)
    values = torch.linalg.svdvals(train.orthogonalise(g, torch.float32))
    well_off = kept > 0.02 * kept[:, :1]  # five steps lift what is not hopelessly small
    assert (values[well_off] > 0.6).all()
    assert (values < 1.3).all()


def one_muon(p, grad, velocity, square, lr, momentum, beta2, decay):
    """Takes a step of Muon on a single matrix, as the papers write it."""
    velocity.copy_(momentum * velocity + (1 - momentum) * grad)
    nesterov = momentum * velocity + (1 - momentum) * grad
    x = nesterov / (nesterov.norm() * 1.02 + 1e-6)
    for a, b, c in train.POLAR_EXPRESS:
        A = x @ x.T
        x = a * x + (b * A + c * A @ A) @ x
    size = x.norm()
    by_row = p.shape[0] >= p.shape[1]
    square.copy_(beta2 * square + (1 - beta2) * (x * x).mean(1 if by_row else 0))
    x = x / (square.sqrt()[:, None] if by_row else square.sqrt()[None])
    x = x / x.norm() * size
    lr = lr * max(1, p.shape[0] / p.shape[1]) ** 0.5
    p.sub_(lr * x + lr * decay * torch.where(x * p >= 0, p, 0))


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)])
def test_stacked_muon_is_muon_one_matrix_at_a_time(shape):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for _ in range(3)]
    twins = [p.detach().clone() for p in params]
    optimizer = optimizer_of("muon", params, betas=(0.9, 0.6))
    states = [(torch.zeros(shape), torch.zeros(max(shape))) for _ in params]
    for step in range(4):
        momentum = 0.8 + 0.01 * step
        optimizer.param_groups[0] |= {"lr": 0.1, "momentum": momentum, "weight_decay": 0.3}
        for p, twin, state in zip(params, twins, states, strict=True):
            p.grad = torch.randn(shape)
            one_muon(twin, p.grad, *state, 0.1, momentum, 0.6, 0.3)
        optimizer.step()
    torch.testing.assert_close([p.detach() for p in params], twins, rtol=1e-4, atol=1e-5)


# ---- Both ----
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_parameter_without_a_gradient_stays_as_it_is(kind):
    """It may belong to a layer that joins later. It is treated as if its gradient were zero."""
    p, idle = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = optimizer_of(kind, [p, idle])
    p.grad = torch.eye(4)
    optimizer.step()
    assert torch.equal(idle, torch.ones(4, 4))
    assert not torch.equal(p, torch.ones(4, 4))


def test_in_fp16_the_loss_is_scaled_and_an_overflow_changes_nothing():
    """A scale of 2 ** 30 makes gradients overflow: GradScaler skips each step and halves it."""
    for scale, skips in ((2.0**12, False), (2.0**30, True)):
        model = build(tiny(dtype=torch.float16), scramble=False)
        optimizer = build_optimizer(model)
        assert optimizer.scaler.is_enabled()
        optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        first, _, last = take_steps(model, optimizer, 3)
        assert first == pytest.approx(4.11, abs=0.02)
        assert last == first if skips else last < 4
        assert optimizer.scaler.get_scale() == (2**27 if skips else scale)
        assert all(p.grad is None for p in model.parameters())
    assert not build_optimizer(build(tiny(dtype=torch.bfloat16))).scaler.is_enabled()


# ---- Schedules ----
@pytest.mark.parametrize(
    ("up", "down", "final", "expected"),
    [
        (0.2, 0.4, 0.1, {0: 0, 0.1: 0.5, 0.2: 1, 0.6: 1, 0.8: 0.55, 1: 0.1}),
        # Overlapping ramps multiply.
        (0.75, 0.5, 0, {0: 0, 0.25: 1 / 3, 0.5: 2 / 3, 0.6: 0.64, 0.75: 0.5, 1: 0}),
    ],
)
def test_learning_rates_rise_stay_and_fall(monkeypatch, up, down, final, expected):
    set_knobs(monkeypatch, WARMUP_RATIO=up, WARMDOWN_RATIO=down, FINAL_LR_FRAC=final)
    assert {share: train.lr_factor(share) for share in expected} == pytest.approx(expected)


def test_each_group_follows_its_own_row(monkeypatch):
    set_knobs(monkeypatch, MUON_BETAS=(0.9, 0.7), FINAL_LR_FRAC=0.1)
    optimizer = build_optimizer(build(tiny()))
    expected = ((0, 0, 1.0, 0.85), (0.75, 150, 0.55, 0.875), (1, 10**6, 0.1, 0.9))
    for progress, step, factor, momentum in expected:
        train.set_schedules(optimizer, progress, step)
        for group in optimizer.param_groups:
            muon = group["kind"] == "muon"
            assert group["lr"] == pytest.approx(group["peak_lr"] * factor)
            assert group["weight_decay"] == pytest.approx(0.2 * (1 - progress) if muon else 0)
            assert not muon or group["momentum"] == pytest.approx(momentum)
