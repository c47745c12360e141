"""The subject: model, attention, optimizer, schedules, warm-up, each beside a value derived on paper or a naive twin."""

import ast
import itertools
import math
import subprocess
import sys

import prepare
import train
from tests.common import ROOT

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st


def tiny(layers=2, heads=2, kv_heads=2, head_dim=32, T=32, V=61, window=None):
    windows = (*(window or T,) * (layers - 1), T)
    return train.Config(V, T, heads, kv_heads, head_dim, windows)


def build(config, seed=1, attend=None, scramble=True):
    """A model in fp32; with `scramble` no weight is left at zero, so that every path matters."""
    model = train.GPT(config, attend or train.load_sdpa(None, config))
    train.initialise(model, torch.float32, seed)
    if scramble:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tokens(config, B=2, seed=0):
    return torch.randint(config.vocab_size, (B, config.sequence_len), generator=torch.Generator().manual_seed(seed))


# ---- Model: golden values --------------------------------------------------------------------------------------------
def test_parameters_and_flops_by_hand():
    """V 61, C 64, two layers, 2 heads of 32, MLP 256, value embeddings on the second layer alone.
    Matrices: per layer q, k, v, out 4 * 64 * 64 and MLP 2 * 64 * 256; one gate 32 * 2. Then wte, lm_head, one value
    embedding of 61 * 64 each and 2 + 2 scalars."""
    model = build(tiny())
    blocks = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 64
    assert sum(p.numel() for p in model.blocks.parameters()) == blocks
    assert sum(p.numel() for p in model.parameters()) == blocks + 3 * 61 * 64 + 4
    config = tiny(window=8)
    assert config.flops_per_token(blocks + 61 * 64) == 6 * (blocks + 61 * 64) + 12 * 64 * (8 + 32)


def test_the_full_default_has_50_million_parameters(monkeypatch):
    """In a process of its own: knobs are read once, at import. 12 * 512^2 a layer, 4 gates of 32 * 4, 6 tables of V * C."""
    program = (
        "import train; config = train.derive_config(8192)\n"
        "model = train.GPT(config, None)\n"
        "matrices = sum(p.numel() for p in (*model.blocks.parameters(), model.lm_head.weight))\n"
        "print(sum(p.numel() for p in model.parameters()), config.flops_per_token(matrices), config.windows)"
    )
    monkeypatch.setenv("AUTORESEARCH_PROFILE", "full")
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    S, L = 1024, 2048
    matrices = 8 * 12 * 512**2 + 4 * 32 * 4 + 8192 * 512
    flops = 6 * matrices + 12 * 512 * (6 * S + 2 * L)
    assert out.split(maxsplit=2)[:2] == [str(matrices + 5 * 8192 * 512 + 16), str(flops)]
    assert ast.literal_eval(out.split(maxsplit=2)[2]) == (S, S, S, L, S, S, S, L) and round(flops / 1e8, 2) == 2.39


def test_an_untrained_model_is_uniform():
    config = tiny()
    model = build(config, scramble=False)
    loss = model(tokens(config), tokens(config, seed=1)).item()
    assert abs(loss - math.log(61)) < 0.01


def test_logits_and_losses_agree():
    config = tiny()
    model, x, y = build(config), tokens(config), tokens(config, seed=1)
    logits = model(x)
    assert logits.shape == (2, 32, 61) and logits.abs().max() < train.LOGIT_SOFTCAP
    each = model(x, y, reduction="none")
    torch.testing.assert_close(each, F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y))
    torch.testing.assert_close(model(x, y), each.mean())


def test_initialisation_follows_the_table():
    config = tiny(layers=3)
    model = build(config, scramble=False)
    s = math.sqrt(3 / 64)
    assert 0.95 < model.wte.weight.std() < 1.05 and 0.0009 < model.lm_head.weight.std() < 0.0011
    for block in model.blocks:
        for layer in (block.attention.q, block.attention.k, block.attention.v, block.up):
            assert 0.9 * s < layer.weight.abs().max() <= s
        assert not block.attention.out.weight.any() and not block.down.weight.any()
        assert block.attention.gate is None or not block.attention.gate.weight.any()
    assert list(model.value_embeddings) == ["0", "2"] and 0.9 * s < model.value_embeddings["2"].weight.abs().max() <= s
    assert model.resid_lambdas.tolist() == [1.0] * 3 and model.x0_lambdas.tolist() == pytest.approx([0.1] * 3)


def test_value_embeddings_begin_with_factor_one():
    config = tiny(layers=1)
    attention = build(config, scramble=False).blocks[0].attention
    ve = torch.randn(1, 32, 64)
    seen = []
    attention.attend = lambda q, k, v, window: seen.append(v) or q
    x = torch.randn(1, 32, 64)
    attention(x, ve, torch.ones(32, 1, 16), torch.zeros(32, 1, 16))
    torch.testing.assert_close(seen[0].flatten(2), F.linear(x, attention.v.weight) + ve)


def test_rotation_depends_on_distance_alone():
    model = build(tiny())
    q, k = torch.randn(2, 1, 1, 1, 32).expand(2, 1, 32, 1, 32)
    q, k = train.rotate(q, model.cos, model.sin)[0, :, 0], train.rotate(k, model.cos, model.sin)[0, :, 0]
    scores = q @ k.T
    torch.testing.assert_close(scores.diagonal(3), scores[3 - 3, 3].expand(29), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [4, 32])
def test_the_model_is_causal_and_its_window_reaches_no_further(window):
    config = train.Config(61, 32, 2, 2, 32, (window,))
    model, x = build(config), tokens(config, B=1)
    changed = x.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 61
    moved = (model(x) - model(changed)).abs().amax(-1)[0] > 1e-6
    assert not moved[:10].any() and moved[10 : min(11 + window, 32)].all() and not moved[11 + window :].any()


# ---- The loss, in chunks ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_chunked_loss_has_the_value_and_gradients_of_the_plain_one(monkeypatch, chunk):
    monkeypatch.setattr(train, "LOSS_CHUNK", chunk)
    torch.manual_seed(0)
    x, weight, y = torch.randn(100, 16) * 3, torch.randn(50, 16) * 3, torch.randint(50, (100,))
    results = []
    for plain in (False, True):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = train.LOGIT_SOFTCAP * torch.tanh(a @ b.T / train.LOGIT_SOFTCAP)
        loss = F.cross_entropy(logits, y) if plain else train.ChunkedLoss.apply(a, b, y)
        (3 * loss).backward()
        results.append((loss.detach(), a.grad, b.grad))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


# ---- Attention -------------------------------------------------------------------------------------------------------
def masked_softmax(q, k, v, window):
    """One query, one head, one key at a time."""
    B, T, H, _ = q.shape
    group, out = H // k.shape[2], torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for i in range(T):
                keys = [j for j in range(T) if 0 <= i - j <= window]
                scores = torch.stack([q[b, i, h] @ k[b, j, h // group] for j in keys]) / math.sqrt(q.shape[-1])
                out[b, i, h] = sum(p * v[b, j, h // group] for p, j in zip(scores.softmax(0), keys))
    return out


RUNGS = {
    "reference": train.reference_attention,
    "sdpa": train.load_sdpa(None, None),
    "blocks": train.load_blocks(torch.device("cpu"), tiny()),
    "blocks of 4": train.by_blocks(F.scaled_dot_product_attention, 4),
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 1, 3, 5, 8, 12, 18, 19, 100])
@pytest.mark.parametrize("rung", RUNGS)
def test_attention_is_a_masked_softmax(rung, window, kv_heads):
    torch.manual_seed(window)
    T = 20  # no multiple of the blocks
    inputs = [torch.randn(1, T, heads, 8) for heads in (4, kv_heads, kv_heads)]
    grad, results = torch.randn(1, T, 4, 8), []
    for function in (RUNGS[rung], masked_softmax):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves, window)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def fake_ladder(monkeypatch, **rungs):
    monkeypatch.setattr(train, "LADDER", rungs)
    return train.choose_attention(torch.device("cpu"), torch.float32, tiny(window=8))


def failing(message):
    def load(device, config):
        raise ImportError(message)

    return load


def test_the_first_rung_that_passes_the_probe_is_taken(monkeypatch, capsys):
    def dies(device, config):
        return lambda *_: (_ for _ in ()).throw(RuntimeError("no kernel image is available\nfor this device"))

    def wrong_window(device, config):
        return lambda q, k, v, window: train.reference_attention(q, k, v, window - 1).to(q.dtype)

    def unmasked(device, config):
        return lambda q, k, v, window: train.reference_attention(q.flip(1), k, v, window)

    name, attention = fake_ladder(
        monkeypatch, a=failing("no such module"), b=dies, c=wrong_window, d=unmasked, e=train.load_sdpa, f=failing("?")
    )
    lines = capsys.readouterr().out.splitlines()
    assert name == "e" and len(lines) == 4 and "no such module" in lines[0] and lines[1].endswith("is available")
    assert "off by" in lines[2] and "off by" in lines[3]


def test_every_gpu_rung_declines_a_cpu(capsys):
    name, _ = train.choose_attention(torch.device("cpu"), torch.float32, tiny())
    assert name == "blocks"
    assert [line.split(":")[1].strip() for line in capsys.readouterr().out.splitlines()] == [
        "not fa3",
        "not varlen",
        "not flex",
    ]


@pytest.mark.parametrize(("forced", "words"), [("fa3", "no attention works"), ("nonsense", "choose auto or one of")])
def test_a_forced_rung_that_fails_ends_the_run(monkeypatch, capsys, forced, words):
    monkeypatch.setattr(train, "ATTENTION", forced)
    with pytest.raises(SystemExit) as stop:
        train.choose_attention(torch.device("cpu"), torch.float32, tiny())
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_rungs_are_loaded_with_what_their_packages_take(monkeypatch):
    """The kernel hub refuses a call without a version; its attention takes causal and (left, right) windows."""
    import kernels

    calls = {}
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    flash = lambda q, k, v, **options: (q, calls.update(options))  # noqa: E731
    hub = type("module", (), {"flash_attn_func": staticmethod(flash)})
    monkeypatch.setattr(kernels, "get_kernel", lambda name, **options: calls.update(options, name=name) or hub)
    q = torch.randn(1, 4, 2, 8)
    assert train.load_fa3(cuda, tiny())(q, q, q, 3) is q
    assert calls == {"name": "kernels-community/flash-attn3", "version": 1, "causal": True, "window_size": (3, 0)}

    from torch.nn.attention import varlen

    def varlen_attn(q, k, v, ends_q, ends_k, max_q, max_k, window_size):
        assert ends_q.tolist() == ends_k.tolist() == [0, 6, 12] and (max_q, max_k) == (6, 6)
        per_row = (x.view(2, 6, 2, 8) for x in (q, k, v))
        return train.reference_attention(*per_row, window_size[0]).flatten(0, 1)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    q, k, v = torch.randn(2, 6, 2, 8), torch.randn(2, 6, 1, 8), torch.randn(2, 6, 1, 8)
    torch.testing.assert_close(train.load_varlen(cuda, tiny())(q, k, v, 2), train.reference_attention(q, k, v, 2))
    for capability, load in (((8, 9), train.load_fa3), ((12, 0), train.load_fa3), ((7, 5), train.load_varlen)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        with pytest.raises(RuntimeError, match="compute capability"):
            load(cuda, tiny())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_means_the_same_window(monkeypatch):
    """FlexAttention runs eagerly on a CPU, slowly: its mask is checked there, its speed on a GPU."""
    from torch.nn.attention import flex_attention as module

    create = module.create_block_mask
    monkeypatch.setattr(module, "create_block_mask", lambda *args, device: create(*args, device="cpu"))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    config = tiny(window=5, kv_heads=1)
    attention = train.load_flex(torch.device("cuda"), config)
    q, k, v = torch.randn(2, 32, 2, 32), torch.randn(2, 32, 1, 32), torch.randn(2, 32, 1, 32)
    for window in (5, 32):
        torch.testing.assert_close(attention(q, k, v, window), train.reference_attention(q, k, v, window))


# ---- Optimizer -------------------------------------------------------------------------------------------------------
@given(st.integers(1, 12), st.integers(1, 24), st.integers(0, 100))
def test_polar_express_drives_singular_values_to_one(rows, cols, seed):
    g = torch.randn(2, rows, cols, generator=torch.Generator().manual_seed(seed))
    kept = torch.linalg.svdvals(g)
    values = torch.linalg.svdvals(train.orthogonalise(g, torch.float32))
    well_off = kept > 0.02 * kept[:, :1]  # five steps lift what is not hopelessly small
    assert (values[well_off] > 0.6).all() and (values < 1.3).all()


@given(st.floats(0.01, 100), st.integers(0, 20))
def test_orthogonalisation_ignores_scale_and_follows_transposition(scale, seed):
    g = torch.randn(1, 6, 10, generator=torch.Generator().manual_seed(seed))
    x = train.orthogonalise(g, torch.float32)
    torch.testing.assert_close(train.orthogonalise(g * scale, torch.float32), x, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(train.orthogonalise(g.mT, torch.float32), x.mT, rtol=1e-3, atol=1e-3)


def one_muon(p, grad, velocity, square, lr, momentum, decay):
    """Muon on a single matrix, step by step as the papers write it."""
    velocity.copy_(momentum * velocity + (1 - momentum) * grad)
    nesterov = momentum * velocity + (1 - momentum) * grad
    x = nesterov / (nesterov.norm() * 1.02 + 1e-6)
    for a, b, c in train.POLAR_EXPRESS:
        A = x @ x.T
        x = a * x + (b * A + c * A @ A) @ x
    size = x.norm()
    by_row = p.shape[0] >= p.shape[1]
    square.copy_(train.MUON_BETA2 * square + (1 - train.MUON_BETA2) * (x * x).mean(1 if by_row else 0))
    x = x / (square.sqrt()[:, None] if by_row else square.sqrt()[None])
    x = x / x.norm() * size
    lr = lr * max(1, p.shape[0] / p.shape[1]) ** 0.5
    p.sub_(lr * x + lr * decay * torch.where(x * p >= 0, p, 0))


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)])
def test_stacked_muon_is_muon_one_matrix_at_a_time(shape):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for _ in range(3)]
    twins = [p.detach().clone() for p in params]
    optimizer = train.MuonAdamW([dict(kind="muon", params=params, peak_lr=0.1)], torch.float32)
    states = [(torch.zeros(shape), torch.zeros(max(shape))) for _ in params]
    for step in range(4):
        optimizer.param_groups[0].update(lr=0.1, momentum=0.8 + 0.01 * step, weight_decay=0.3)
        for p, twin, state in zip(params, twins, states):
            p.grad = torch.randn(shape)
            one_muon(twin, p.grad, *state, 0.1, 0.8 + 0.01 * step, 0.3)
        optimizer.step()
    for p, twin in zip(params, twins):
        torch.testing.assert_close(p.detach(), twin, rtol=1e-4, atol=1e-5)


def test_adamw_is_torchs():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours = train.MuonAdamW([dict(kind="adamw", params=params, peak_lr=0.1, betas=(0.8, 0.95))], torch.float32)
    theirs = torch.optim.AdamW(twins, lr=0.1, betas=(0.8, 0.95), eps=train.EPS, weight_decay=0)
    ours.param_groups[0]["lr"] = 0.1
    for _ in range(10):
        for p, twin in zip(params, twins):
            p.grad = torch.randn_like(p)
            twin.grad = p.grad.clone()
        ours.step(), theirs.step()
    for p, twin in zip(params, twins):
        torch.testing.assert_close(p, twin)


def test_a_model_without_value_embeddings_trains(monkeypatch):
    """The first thing an experimenter takes away."""
    monkeypatch.setattr(train.Config, "has_value_embedding", lambda self, layer: False)
    model = build(tiny())
    optimizer = train.MuonAdamW(train.parameter_groups(model), torch.float32)
    train.set_schedules(optimizer, 0.0, 0)
    before = model.wte.weight.clone()
    model(tokens(model.config), tokens(model.config, seed=1)).backward()
    optimizer.step()
    assert not torch.equal(before, model.wte.weight)


@given(st.integers(1, 5), st.sampled_from([(2, 2), (4, 2), (4, 1)]))
def test_groups_partition_the_model(layers, heads):
    groups = train.parameter_groups(build(tiny(layers, *heads, head_dim=32), scramble=False))
    assert all(p.ndim == 2 for group in groups if group["kind"] == "muon" for p in group["params"])
    assert [group["kind"] for group in groups[:5]] == ["adamw"] * 5


def test_a_parameter_without_a_group_is_noticed():
    model = build(tiny())
    model.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(AssertionError, match="partition"):
        train.parameter_groups(model)


def test_reset_forgets_everything():
    model = build(tiny(), scramble=False)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = train.MuonAdamW(train.parameter_groups(model), torch.float32)
    ends = []
    for _ in range(2):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name])
        optimizer.reset()
        for step in range(3):
            train.set_schedules(optimizer, 0.2, step)
            model(tokens(model.config, seed=step), tokens(model.config, seed=step + 1)).backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def test_a_few_steps_learn():
    model = build(tiny(), scramble=False)
    optimizer = train.MuonAdamW(train.parameter_groups(model), torch.float32)
    x = tokens(model.config)
    losses = []
    for step in range(30):
        train.set_schedules(optimizer, step / 30, step)
        loss, _ = train.train_step(model, optimizer, iter([(x[:, :-1], x[:, 1:], 1)]), 1)
        losses.append(loss.item())
    assert abs(losses[0] - math.log(61)) < 0.05 and losses[-1] < 1.0


def test_a_loader_of_ones_own_does_not_train_for_ever(fresh_run):
    """The clock starts with the ruler's first batch; without one the loop ends, and evaluation will refuse."""
    model, x = build(tiny(), scramble=False), tokens(tiny())
    optimizer = train.MuonAdamW(train.parameter_groups(model), torch.float32)
    taken = []
    batches = iter(lambda: taken.append(1) or (x[:, :-1], x[:, 1:], 1), None)
    steps, _ = train.train(model, optimizer, itertools.islice(batches, 50), 1, 1.0, None)
    assert steps == len(taken) == 1


def test_micro_batches_add_up_to_the_batch():
    results = []
    for split in (1, 4):
        model = build(tiny())
        optimizer = train.MuonAdamW(train.parameter_groups(model), torch.float32)
        train.set_schedules(optimizer, 0.0, 0)
        x, y = tokens(model.config, B=4), tokens(model.config, B=4, seed=5)
        batches = zip(x.chunk(split), y.chunk(split), [1] * split)
        loss, _ = train.train_step(model, optimizer, batches, split)
        results.append((loss, torch.cat([p.detach().flatten() for p in model.parameters()])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-3)


# ---- Schedules and derived values ------------------------------------------------------------------------------------
@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_learning_rates_stay_between_zero_and_peak(warm_up, warm_down, final, progress):
    knobs = {"WARMUP_RATIO": warm_up, "WARMDOWN_RATIO": warm_down, "FINAL_LR_FRAC": final}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in knobs.items():
            patch.setattr(train, name, value)
        assert 0 <= train.lr_factor(progress) <= 1


def test_schedules_at_their_ends(monkeypatch):
    assert [train.lr_factor(p) for p in (0.0, 1 - train.WARMDOWN_RATIO, 1.0)] == pytest.approx([1.0, 1.0, 0.0])
    monkeypatch.setattr(train, "WARMUP_RATIO", 0.2), monkeypatch.setattr(train, "WARMDOWN_RATIO", 0.4)
    monkeypatch.setattr(train, "FINAL_LR_FRAC", 0.1)
    assert [train.lr_factor(p) for p in (0, 0.1, 0.2, 0.6, 0.8, 1)] == pytest.approx([0, 0.5, 1, 1, 0.55, 0.1])
    assert train.muon_momentum(0) == 0.85 and train.muon_momentum(150) == pytest.approx(0.9)
    assert train.muon_momentum(300) == train.muon_momentum(10**6) == pytest.approx(0.95)
    optimizer = train.MuonAdamW(train.parameter_groups(build(tiny())), torch.float32)
    train.set_schedules(optimizer, 1.0, 10**6)
    assert [group["lr"] / group["peak_lr"] for group in optimizer.param_groups] == pytest.approx([0.1] * 9)
    assert optimizer.param_groups[0]["weight_decay"] == 0


def test_width_is_rounded_aloud(monkeypatch, capsys):
    monkeypatch.setattr(train, "DEPTH", 9), monkeypatch.setattr(train, "ASPECT_RATIO", 57)
    monkeypatch.setattr(train, "HEAD_DIM", 128)
    assert train.derive_config(100).n_embd == 640
    assert "513 is rounded up to 640" in capsys.readouterr().out


@pytest.mark.parametrize(("knob", "value"), [("WINDOW_PATTERN", "SXL"), ("WINDOW_PATTERN", ""), ("KV_HEADS", 3)])
def test_impossible_shapes_get_one_sentence(monkeypatch, capsys, knob, value):
    monkeypatch.setattr(train, "DEPTH", 4), monkeypatch.setattr(train, "ASPECT_RATIO", 64)
    monkeypatch.setattr(train, "HEAD_DIM", 64), monkeypatch.setattr(train, knob, value)
    with pytest.raises(SystemExit):
        train.derive_config(100)
    assert knob in capsys.readouterr().err


def test_the_last_layer_sees_everything(monkeypatch):
    monkeypatch.setattr(train, "DEPTH", 6), monkeypatch.setattr(train, "WINDOW_PATTERN", "SSSL")
    monkeypatch.setattr(train, "SHORT_WINDOW", 7)
    assert train.derive_config(100).windows == (7, 7, 7, 512, 7, 512)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
        ("NVIDIA GB200", 2500), ("NVIDIA B200", 2250), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362), ("NVIDIA A40", 149.7), ("NVIDIA GeForce RTX 5090", 209.5), ("NVIDIA GeForce RTX 3060", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None), ("NVIDIA A10", None), ("NVIDIA L40", None),
    ],
)  # fmt: skip
def test_mfu_is_never_against_another_chip(name, tflops):
    assert train.peak_flops(name) == (tflops and tflops * 1e12)


# ---- Warm-up ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def small_run(monkeypatch):
    for knob, value in {"TOTAL_BATCH_SIZE": 64, "DEVICE_BATCH_SIZE": 4, "MAX_SEQ_LEN": 16, "COMPILE": False}.items():
        monkeypatch.setattr(train, knob, value)
    return build(tiny(T=16), scramble=False)


def test_warm_up_leaves_no_trace(small_run):
    before = [p.detach().clone() for p in build(tiny(T=16), seed=train.SEED, scramble=False).parameters()]
    _, optimizer, rows = train.warm_up(small_run, torch.float32, 64)
    assert rows == 4 and optimizer.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, small_run.parameters()))


def test_out_of_memory_halves_the_device_batch(small_run, monkeypatch, capsys):
    seen, forward = [], small_run.forward

    def hungry(x, y=None):
        seen.append(len(x))
        if len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(x, y)

    monkeypatch.setattr(small_run, "forward", hungry)
    _, _, rows = train.warm_up(small_run, torch.float32, 64)
    out = capsys.readouterr().out
    assert rows == 1 and seen[:3] == [4, 2, 1]
    assert "4 -> 2" in out and "2 -> 1" in out and "TOTAL_BATCH_SIZE stays 64" in out


def test_out_of_memory_with_one_row_ends_the_run(small_run, monkeypatch, capsys):
    def forward(x, y=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(small_run, "forward", forward)
    with pytest.raises(SystemExit) as stop:
        train.warm_up(small_run, torch.float32, 64)
    assert stop.value.code == 5 and "smaller" in capsys.readouterr().err


def test_without_a_compiler_the_run_goes_on(small_run, monkeypatch, capsys):
    monkeypatch.setattr(train, "COMPILE", True)

    def broken(function, **_):
        def call(*args, **kwargs):
            raise torch._dynamo.exc.TorchDynamoException(
                "backend='inductor' raised:\nInvalidCxxCompiler: No working C++ compiler found\n\nSet TORCHDYNAMO_VERBOSE=1\n"
            )

        return call

    monkeypatch.setattr(torch, "compile", broken)
    train.warm_up(small_run, torch.float32, 64)
    assert capsys.readouterr().out.count("slower: InvalidCxxCompiler: No working C++ compiler") == 1


def test_an_argument_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 2 and "train.py takes no arguments" in capsys.readouterr().err


def test_an_indivisible_batch_names_both_numbers(monkeypatch, capsys):
    monkeypatch.setattr(train, "TOTAL_BATCH_SIZE", 1000)
    with pytest.raises(SystemExit) as stop:
        train.accumulation_steps(3)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "1000" in error and f"3 * {prepare.MAX_SEQ_LEN}" in error
