"""Small models: train.py's own, with its tokens, optimizer and steps, and made-up ones to score."""

import math
from types import SimpleNamespace

import train

import numpy as np
import torch
from torch import nn


# ---- The model of train.py ----
def tiny(layers=2, heads=2, kv_heads=2, head_dim=32, T=32, windows=None, dtype=torch.float32):
    """Returns a config. The last layer and every second one before it have a value embedding."""
    windows = windows or [T] * layers
    return SimpleNamespace(
        dtype=dtype,
        vocab_size=61,
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
    """Builds a model; `scramble` leaves no weight at zero, so that every path matters."""
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
    optimizer = train.MuonAdamW(train.parameter_groups(model), model.config.dtype)
    train.set_schedules(optimizer, 0.0, 0)
    return optimizer


def take_steps(model, optimizer, count, micro_batches=1):
    """Returns the losses of a whole run of `count` steps on one batch."""
    x = tokens(model.config, B=4)
    batches = [(x, x.roll(-1, 1), 1)] * micro_batches
    losses = []
    for step in range(count):
        train.set_schedules(optimizer, step / count, step)
        losses.append(train.train_step(model, optimizer, batches).item())
    return losses


def check_training(model):
    """Checks that 16 steps fit one batch and change every parameter. Returns the losses."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = take_steps(model, build_optimizer(model), 16)
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


# ---- Made-up rows and models with random weights, for the metric ----
V = 96  # tokens; the last is special
T = 64
C = 32


def make_rows():
    """Returns packed rows of a made-up vocabulary, uint16 [64, T + 1], and the bytes per token."""
    rng = np.random.default_rng(0)
    table = np.append(rng.integers(1, 6, V - 1), 0).astype(np.int32)
    return rng.integers(0, V, (64, T + 1)).astype(np.uint16), table


class Tiny(nn.Module):
    """One block of causal attention; a variant may change `mix`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, C)
        self.q, self.k, self.v = (nn.Linear(C, C, bias=False) for _ in range(3))
        self.head = nn.Linear(C, V, bias=False)
        self.head.weight.data *= 4

    def mix(self, x):  # between the embedding and attention
        return x

    def forward(self, idx):
        x = self.mix(self.embed(idx))
        later = torch.ones(idx.shape[1], idx.shape[1], dtype=torch.bool).triu(1)
        scores = (self.q(x) @ self.k(x).mT / C**0.5).masked_fill(later, -math.inf)
        return self.head(x + scores.softmax(-1) @ self.v(x))


def variant(**methods):
    """Returns a Tiny with some of its methods replaced."""
    return type("Variant", (Tiny,), methods)()
