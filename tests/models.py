"""Made-up rows and the small models with random weights that the metric is tried on."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

V = 96  # tokens; the last is special
T = 64
C = 32


def make_rows():
    """Packed rows of a made-up vocabulary, uint16 [64, T + 1], and the bytes of its tokens."""
    rng = np.random.default_rng(0)
    table = np.append(rng.integers(1, 6, V - 1), 0).astype(np.int32)
    return rng.integers(0, V, (64, T + 1)).astype(np.uint16), table


class Tiny(nn.Module):
    """One block of causal attention and an MLP, with places where a variant may reach in."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(V, C)
        self.head = nn.Linear(C, V, bias=False)
        self.q = nn.Linear(C, C, bias=False)
        self.k = nn.Linear(C, C, bias=False)
        self.v = nn.Linear(C, C, bias=False)
        self.up = nn.Linear(C, C, bias=False)
        self.down = nn.Linear(C, C, bias=False)
        with torch.no_grad():
            self.head.weight.mul_(4)

    def mix(self, x):  # between the embedding and attention
        return x

    def keys(self, k):
        return k

    def mask(self, T):
        return torch.ones(T, T, dtype=torch.bool).tril()

    def channel(self, x):
        return self.down(F.relu(self.up(x)).square())

    def features(self, idx):
        x = self.mix(self.embed(idx))
        k = self.keys(self.k(x))
        v = self.keys(self.v(x))
        scores = (self.q(x) @ k.mT / C**0.5).masked_fill(~self.mask(idx.shape[1]), -math.inf)
        x = x + scores.softmax(-1) @ v
        return x + self.channel(x)

    def forward(self, idx, targets=None):
        logits = self.head(self.features(idx))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def variant(**methods):
    """A Tiny with some of its methods replaced."""
    return type("Variant", (Tiny,), methods)()


class Whole(nn.Module):
    """Logits for a whole vocabulary, each token's from the one before."""

    def __init__(self, size):
        super().__init__()
        self.head = nn.Embedding(size, size)

    def forward(self, idx):
        return self.head(idx)
