"""A model small enough for a test, its tokens, its optimizer and its training steps."""

import itertools
from types import SimpleNamespace

import train

import torch


def tiny(layers=2, heads=2, kv_heads=2, head_dim=32, T=32, V=61, window=None, windows=None):
    """Returns a config. The last layer sees all T positions, the others `window`, unless `windows`
    says otherwise. The last layer and every second one before it have a value embedding."""
    windows = windows or [*[window or T] * (layers - 1), T]
    return SimpleNamespace(
        dtype=torch.float32,
        vocab_size=V,
        sequence_len=T,
        n_embd=heads * head_dim,
        n_head=heads,
        n_kv_head=kv_heads,
        head_dim=head_dim,
        kv_dim=kv_heads * head_dim,
        windows=windows,
        value_layers=list(range((len(windows) - 1) % 2, len(windows), 2)),
    )


def set_knobs(monkeypatch, **knobs):
    for name, value in knobs.items():
        monkeypatch.setattr(train, name, value)


def build(config, seed=1, attend=train.attend_sdpa, scramble=True):
    """Builds a model in fp32; `scramble` leaves no weight at zero, so that every path matters."""
    model = train.GPT(config, attend)
    train.initialise(model, seed)
    if scramble:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tokens(config, B=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (B, config.sequence_len), generator=generator)


def build_optimizer(model):
    """Builds the optimizer, ready for the first step."""
    optimizer = train.MuonAdamW(train.parameter_groups(model), torch.float32)
    train.set_schedules(optimizer, 0.0, 0)
    return optimizer


def take_steps(model, count):
    """Returns the losses of a whole run of `count` steps on one batch."""
    optimizer = build_optimizer(model)
    x = tokens(model.config)
    batch = (x[:, :-1], x[:, 1:], 1)
    losses = []
    for step in range(count):
        train.set_schedules(optimizer, step / count, step)
        loss, _ = train.train_step(model, optimizer, batch, itertools.repeat(batch), 1)
        losses.append(loss.item())
    return losses


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def check_training(model):
    """Checks that 16 steps fit one batch and change every parameter. Returns the losses."""
    before = snapshot(model)
    losses = take_steps(model, 16)
    assert losses[-1] < 2.0
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert not torch.equal(before[name], parameter), name
    return losses


def record_inputs(module):
    """Returns a list to which each call adds its first input."""
    seen = []
    module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    return seen


def steps_taken(optimizer):
    """Returns the step count of all AdamW tensors, 0 before they have a state."""
    [count] = {int(state["step"]) for state in optimizer.adamw.state.values()} or {0}
    return count
