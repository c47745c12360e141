"""Made-up rows and small models with random weights, for tests of the metric."""

import math

import numpy as np
import torch
from torch import nn

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
        self.q = nn.Linear(C, C, bias=False)
        self.k = nn.Linear(C, C, bias=False)
        self.v = nn.Linear(C, C, bias=False)
        self.head = nn.Linear(C, V, bias=False)
        with torch.no_grad():
            self.head.weight.mul_(4)

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
