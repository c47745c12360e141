"""Tests the metric with honest models, which keep their score, and with tricks, which are
neutralised or refused.

Rows of 64 tokens are made up, and models are small and random: leaks show without training.
"""

import math

import prepare
from tests.models import T, Tiny, V, make_rows, variant

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.fixture
def rows():
    return make_rows()


def score(model, rows, rng=0):
    """Scores rows as evaluate_bpb does. Returns (bits per byte, probes)."""
    return prepare.score(model.eval(), *rows, rng)


def by_definition(model, rows):
    """Returns bits per byte from a log-softmax in fp64, all rows at once."""
    tokens = torch.from_numpy(rows[0].astype(np.int64))
    targets = tokens[:, 1:]
    with torch.no_grad():
        logits = model.eval()(tokens[:, :-1].clone())
    nats = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    length = torch.from_numpy(rows[1])[targets]
    return (nats[length > 0].sum() / math.log(2) / length.sum()).item()


# ---- The number itself ----
def test_a_constant_added_to_the_logits_is_no_gain(rows):
    """By logsumexp - gather in fp32, logits plus 2**28 scored 0.000000. What this sum rounds away
    must count against the model, as it does in by_definition."""
    lifted = variant(forward=lambda self, x: Tiny.forward(self, x) + 2.0**28)
    assert score(lifted, rows)[0] == pytest.approx(by_definition(lifted, rows), rel=1e-6)


# ---- Honest variants: the identical score ----
def in_place(self, idx):
    logits = Tiny.forward(self, idx)
    idx.zero_()
    return logits


def autocast(self, idx):
    with torch.autocast("cpu", torch.bfloat16):
        return Tiny.forward(self, idx)


def without_special_tokens(self, idx):
    """Special tokens have no bytes: as targets their loss is infinite, and is not counted."""
    return Tiny.forward(self, idx).index_fill(-1, torch.tensor([V - 1]), -math.inf)


HONEST = {  # name: (model, digits to which its score agrees with the definition)
    "fp32": (Tiny(), 6),
    "special tokens ruled out": (variant(forward=without_special_tokens), 6),
    "input changed in place": (variant(forward=in_place), 6),
    "bf16 autocast": (variant(forward=autocast), 2),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_models_pass_with_the_identical_score(name, rows):
    model, digits = HONEST[name]
    twin = model if digits == 6 else Tiny()
    bpb, probes = score(model, rows)
    assert bpb == pytest.approx(by_definition(twin, rows), abs=10**-digits)
    for change in probes.values():
        assert change.mean() <= 2e-5 and change.max() <= 0.02  # far below what is refused


# ---- Neutralised ----
def test_a_tampered_loss_changes_nothing(rows, monkeypatch):
    honest = score(Tiny(), rows)[0]
    monkeypatch.setattr(F, "cross_entropy", lambda *a, **k: torch.zeros(()))
    monkeypatch.setattr(F, "log_softmax", lambda x, *a, **k: x * 0)
    assert score(Tiny(), rows)[0] == honest


# ---- Refused, with the probe's name ----
def batch_norm(self, x):
    return (x - x.mean((0, 1))) / (x.var((0, 1)) + 1e-5).sqrt()


def one_nan(self, idx):
    return Tiny.forward(self, idx).index_fill(1, torch.tensor([5]), math.nan)


REFUSED = {  # name: (model, the probe)
    "roll(-1)": (variant(mix=lambda self, x: x + x.roll(-1, 1)), "causality"),
    "batch norm": (variant(mix=batch_norm), "isolation"),
    "one NaN": (variant(forward=one_nan), "finite: 63 losses"),
    "short vocabulary": (variant(forward=lambda self, x: Tiny.forward(self, x)[..., :-1]), "shape"),
    "short row": (variant(forward=lambda self, x: Tiny.forward(self, x)[:, :-1]), "shape"),
    "logits and a loss": (variant(forward=lambda self, x: (Tiny.forward(self, x), 0)), "shape"),
    "no parameters": (torch.nn.Module(), "model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trusted_is_refused(name, rows):
    model, probe = REFUSED[name]
    with pytest.raises(prepare.IntegrityError, match=f"^({probe})"):
        score(model, rows)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_faint_leak_is_seen_wherever_the_cut_falls(rows, shift):
    """One position of each row changes slightly, which is lost in the mean over all positions and
    below the limit for a single one."""
    model = variant(mix=lambda self, x: x + 0.002 * x.roll(shift, 1))
    for rng in range(20):
        with pytest.raises(prepare.IntegrityError, match="edges: "):
            score(model, rows, rng)


def looking_ahead(idx, strength, leaking):
    """Returns logits of a model that has learnt to see the next token where `leaking` is true."""
    seen = F.one_hot(idx.roll(-1, 1), V).float()
    seen[:, -1] = 0
    return strength * seen * leaking[..., None]


positions = torch.arange(T)
LEAKS = {f"prefix of {n}": positions < n - 1 for n in (4, 32)}
LEAKS |= {f"last of each {n}": positions % n == n - 1 for n in (8, 24)}
LEAKS |= {f"last {n}": positions >= T - n for n in (4, 16)}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_bound_to_positions_is_seen_in_every_draw(rows, name):
    def forward(self, idx):
        return Tiny.forward(self, idx) + looking_ahead(idx, 4, LEAKS[name])

    for rng in range(20):
        with pytest.raises(prepare.IntegrityError, match="causality|edges"):
            score(variant(forward=forward), rows, rng)


@pytest.mark.parametrize(
    ("first", "last", "least"),
    [(3, 3, 19), (10, 10, 19), (20, 20, 17), (60, 66, 12)],  # 5, 2 and 1 % of the text; rarer: 2 %
)
def test_a_leak_bound_to_contents_is_seen_in_most_draws(first, last, least):
    """At some tokens the model sees the next one. As in text, few tokens are common (Zipf)."""
    tokens = V ** np.random.default_rng(0).random((128, 4 * T)) - 1
    rows = (tokens.astype(np.uint16), make_rows()[1])

    def forward(self, idx):
        return Tiny.forward(self, idx) + looking_ahead(idx, 8, (idx >= first) & (idx <= last))

    seen = 0
    for rng in range(20):
        try:
            score(variant(forward=forward), rows, rng)
        except prepare.IntegrityError:
            seen += 1
    assert seen >= least


def test_cuts_follow_common_tokens_chunks_and_chance(rows, monkeypatch):
    """The tokens that are scored again show each row's cut. One row in eight has none; the others
    are cut in turn at a multiple of 8, after a common token and anywhere, two near the ends."""
    seen = []
    monkeypatch.setattr(prepare, "PROBE_ROWS", 64)  # all rows, once

    def forward(self, idx):
        seen.append(idx.numpy().copy())
        return Tiny.forward(self, idx)

    tokens, table = rows
    tokens = np.where(tokens % 2, tokens, 7)  # 7 is in half of all places
    losses = np.zeros((len(tokens), T), dtype=np.float32)
    model = variant(forward=forward)
    firsts = []
    for seed in range(20):
        with torch.no_grad():
            prepare.probe(model, tokens, losses, table, np.random.default_rng(seed))
        originals = tokens[np.random.default_rng(seed).permutation(len(tokens))][:, :-1]
        changed = np.concatenate(seen) != originals
        seen.clear()
        # Where a replacement happens to be the same token, the first change comes after the cut.
        first = np.where(changed.any(axis=1), changed.argmax(axis=1), T)
        assert (first[::8] == T).all()
        assert 2 <= first[2] <= 12 and first[5] >= T - 1
        assert 7 in originals[1, : first[1]]
        firsts.append(first)
    firsts = np.array(firsts)
    chunks = firsts[:, [3, 6, 9, 12, 15]]
    anywhere = firsts[:, [11, 14, 17, 20, 23]]
    assert (chunks % 8 == 0).mean() > 0.4 and (anywhere % 8 == 0).mean() < 0.25
    assert len(np.unique(anywhere)) > 40


def test_rows_are_scored_and_probed_in_an_order_that_is_drawn(rows):
    """A model must not be able to tell a probe by counting batches."""
    seen = []

    def forward(self, idx):
        seen.append(tuple(idx[0].tolist()))
        return Tiny.forward(self, idx)

    orders = []
    for rng in (1, 2):
        seen.clear()
        score(variant(forward=forward), rows, rng)
        orders.append(list(seen))
    first, second = orders
    assert len(first) == len(second) == 4 + prepare.PROBE_ROWS // 16
    assert first[:4] != second[:4] and first[4:] != second[4:]  # the rows, the probes
    real = {tuple(row[:-1]) for row in rows[0].tolist()}
    assert real.issuperset(first) and real.issuperset(second)  # a batch's first row is uncut


def test_few_rows_are_probed_as_often_as_many(rows):
    """Each row comes up equally often, with cuts of its own, so that a leak at one position in 16
    is seen in every draw of 32 rows."""
    few = (rows[0][:32], rows[1])

    def forward(self, idx):
        return Tiny.forward(self, idx) + looking_ahead(idx, 4, positions % 16 == 15)

    for rng in range(20):
        _, probes = score(Tiny(), few, rng)
        assert len(probes["isolation"]) == prepare.PROBE_ROWS // 8
        with pytest.raises(prepare.IntegrityError, match="causality|edges"):
            score(variant(forward=forward), few, rng)


# ---- The state of the model ----
def test_the_state_is_compared_bit_by_bit(rows):
    """NaN is the same as NaN, 0-D tensors and buffers are compared too, 0 to -0 is a change."""
    model = Tiny()
    model.unused = nn.Parameter(torch.full((3, 2), math.nan).mT)
    model.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    model.register_buffer("mask", torch.ones(3, 3).tril().bool(), persistent=False)
    assert score(model, rows)[0] == score(Tiny(), rows)[0]
    for zero in (nn.Parameter(torch.tensor(0.0)), nn.Buffer(torch.zeros(3, dtype=torch.float16))):
        model = variant(mix=negate_zero)
        model.zero = zero
        with pytest.raises(prepare.IntegrityError, match="^state: zero changed; .*self.training"):
            score(model, rows)


def negate_zero(self, x):
    self.zero.data.copy_(torch.tensor(-0.0))
    return x


class Memory(Tiny):
    """Notes in a buffer which token followed the last k ones where that was first seen, in
    evaluation too, and predicts it from then on."""

    def __init__(self, k):
        super().__init__()
        self.order = k
        self.register_buffer("followed", torch.full((2**16,), -1))

    def forward(self, idx):
        context = torch.zeros_like(idx)
        for back in range(self.order):
            context = (context * 31 + idx.roll(back, 1) + 1) % 2**16
        logits = super().forward(idx)
        known = self.followed[context]
        logits += 20 * F.one_hot(known.clamp_min(0), V) * (known >= 0)[..., None]
        for key, token in zip(context[:, :-1].flatten(), idx[:, 1:].flatten(), strict=True):
            if self.followed[key] < 0:
                self.followed[key] = token
        return logits


@pytest.mark.parametrize("k", [3, 6, 12])
def test_a_memory_that_evaluation_fills_is_refused(rows, k):
    """Where the first entry wins, another score of the same row finds what it found before."""
    few = (rows[0][:16], rows[1])
    with pytest.raises(prepare.IntegrityError, match="^(state: followed changed|causality)"):
        score(Memory(k), few)
