"""Tests the metric with honest models, which keep their score, and with mistakes and tricks, which
are refused; train.py's loss; and a run of somebody else's train.py.

Rows of 64 tokens are made up, and models are small and random: leaks show without training.
"""

import json
import math
import runpy

import prepare
from benchmarks.leaks import Memory
from tests import tiny
from tests.test_report import parse_block
from tests.tiny import T, Tiny, V, make_rows, variant

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


def is_refused(model, rows, rng, probes="causality|edges"):
    try:
        score(model, rows, rng)
    except prepare.IntegrityError as error:
        return str(error).startswith(tuple(probes.split("|")))
    return False


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
def lifted(self, idx):
    """By logsumexp - gather in fp32 these logits scored 0. What the sum rounds away must count
    against the model, as it does in by_definition."""
    return Tiny.forward(self, idx) + 2.0**28


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


def padded(self, idx):
    return F.pad(Tiny.forward(self, idx), (0, 5), value=-1e4)


HONEST = {  # name: (model, digits to which its score agrees with the definition)
    "fp32": (Tiny(), 6),
    "a constant added to the logits": (variant(forward=lifted), 6),
    "special tokens ruled out": (variant(forward=without_special_tokens), 6),
    "input changed in place": (variant(forward=in_place), 6),
    "a padded vocabulary": (variant(forward=padded), 6),
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


# ---- Refused, with the probe's name ----
def batch_norm(self, x):
    return (x - x.mean((0, 1))) / (x.var((0, 1)) + 1e-5).sqrt()


def one_nan(self, idx):
    return Tiny.forward(self, idx).index_fill(1, torch.tensor([5]), math.nan)


def once_changed(self, idx):
    """A single loss moves, which is lost in every mean."""
    self.calls = getattr(self, "calls", 0) + 1
    logits = Tiny.forward(self, idx)
    logits[0, 5, : V // 2] += self.calls == 8  # in the second batch of the probe
    return logits


def sparse_buffer():
    model = Tiny()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


def returning(change):
    return variant(forward=lambda self, idx: change(Tiny.forward(self, idx)))


REFUSED = {  # name: (model, the probe)
    "roll(-1)": (variant(mix=lambda self, x: x + x.roll(-1, 1)), "causality"),
    "batch norm": (variant(mix=batch_norm), "isolation"),
    "one loss": (variant(forward=once_changed), "isolation"),
    "one NaN": (variant(forward=one_nan), "finite: the mean loss is nan"),
    "far worse than uniform": (
        returning(lambda x: x * 1e30),
        r"finite: the mean loss is \S+e\+30 nats",
    ),
    "short vocabulary": (returning(lambda x: x[..., :-1]), "shape"),
    "short row": (returning(lambda x: x[:, :-1]), "shape"),
    "logits and a loss": (returning(lambda x: (x, 0)), "shape: .* returned tuple"),
    "numpy": (returning(lambda x: x.numpy()), "shape: .* returned ndarray"),
    "sparse": (returning(lambda x: x.to_sparse()), "shape"),
    "nested": (
        returning(lambda x: torch.nested.as_nested_tensor([*x])),
        "shape",
    ),
    "meta": (returning(lambda x: x.to("meta")), "shape"),
    "sparse buffer": (sparse_buffer(), "state: graph must be a dense tensor"),
    "meta parameter": (Tiny().to("meta"), "state: embed.weight must be a dense tensor"),
    "no parameters": (torch.nn.Module(), "model"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trusted_is_refused(name, rows):
    model, probe = REFUSED[name]
    with pytest.raises(prepare.IntegrityError, match=f"^{probe}"):
        score(model, rows)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_faint_leak_is_seen_wherever_the_cut_falls(rows, shift):
    """One position of each row changes slightly, which is lost in the mean over all positions and
    below the limit for a single one."""
    model = variant(mix=lambda self, x: x + 0.002 * x.roll(shift, 1))
    assert all(is_refused(model, rows, rng, "edges") for rng in range(10))


def looking_ahead(leaks, strength):
    """Returns a model that has learnt to see the next token wherever leaks(idx) is true."""

    def forward(self, idx):
        seen = F.one_hot(idx.roll(-1, 1), V).float()
        seen[:, -1] = 0
        return Tiny.forward(self, idx) + strength * seen * leaks(idx)[..., None]

    return variant(forward=forward)


@pytest.mark.parametrize("full", [1000, math.inf])
def test_a_memory_that_forward_fills_is_seen_in_every_draw(rows, full):
    """It keeps what it saw first, so scoring a row again moves nothing."""
    for rng in range(10):
        model = Memory(Tiny(), length=2, bonus=5.0, full=full)
        assert is_refused(model, rows, rng, "foresight")


def test_a_memory_that_was_filled_in_training_keeps_its_score(rows):
    model = Memory(Tiny(), length=2, bonus=5.0, calls=(1, 2))
    with torch.no_grad():
        model(torch.from_numpy(np.random.default_rng(9).integers(0, V, (16, T))))
    assert model.table
    for rng in range(10):
        assert score(model, rows, rng)[0] == pytest.approx(by_definition(model, rows))


positions = torch.arange(T)
LEAKS = {  # name: (positions, number of rows, of which few are probed repeatedly)
    "prefix of 4": (positions < 3, 64),
    "last of each 24": (positions % 24 == 23, 64),
    "last 4": (positions >= T - 4, 64),
    "last of each 16": (positions % 16 == 15, 32),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_bound_to_positions_is_seen_in_every_draw(rows, name):
    leaking, count = LEAKS[name]
    some = (rows[0][:count], rows[1])
    assert len(score(Tiny(), some)[1]["isolation"]) == prepare.PROBE_ROWS // 8
    model = looking_ahead(lambda idx: leaking, 4)
    assert all(is_refused(model, some, rng) for rng in range(10))


def test_cuts_follow_chunks_common_tokens_and_chance(rows):
    tokens = np.where(rows[0] % 2, rows[0], 7)
    common = np.argsort(-np.bincount(tokens.ravel()))
    assert common[0] == 7
    anywhere = set()
    for seed in range(20):
        cuts = prepare.draw_cuts(tokens, np.random.default_rng(seed))
        assert (cuts[::8] == T).all()  # not cut
        number = np.flatnonzero(np.arange(64) % 8)
        near_ends, others = cuts[number[:2]], number[2:]
        assert near_ends.tolist() == [2, T - 1]
        assert np.isin(cuts[others[::3]], (1, *range(8, T, 8))).all()
        for i, token in zip(others[1::3], common):
            assert tokens[i, cuts[i] - 1] == token or token not in tokens[i, : T - 1]
        anywhere.update(cuts[others[2::3]])
    assert len(anywhere) > 55 and min(anywhere) >= 1 and max(anywhere) < T


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
    assert len(first) == len(second) == 6 + prepare.PROBE_ROWS // 16
    assert first[2:6] != second[2:6] and first[6:] != second[6:]  # the rows, the probes
    real = {tuple(row[:-1]) for row in rows[0].tolist()}
    for order in orders:
        is_real = [row in real for row in order]  # a batch's first row is uncut
        assert is_real == [False, False] + [True] * (len(order) - 2)  # random tokens first


def negate_zero(self, x):
    self.zero.data.copy_(torch.tensor(-0.0))
    return x


class Answering(torch.Tensor):
    """Logits of a class of their own, which finds every target likely."""

    def gather(self, *arguments):
        return torch.zeros_like(super().gather(*arguments))


def test_logits_of_a_class_of_their_own_are_taken_as_numbers(rows):
    model = returning(lambda x: x.as_subclass(Answering))
    assert score(model, rows)[0] == score(Tiny(), rows)[0]


def test_the_state_is_compared_bit_by_bit(rows):
    """NaN is the same as NaN, 0-D tensors and buffers are compared too, 0 to -0 is a change, and
    a tensor may be a view."""
    model = Tiny()
    square = torch.arange(9.0).view(3, 3)
    views = (square[:, 1], square.diag(), torch.ones(1).expand(3), square.mul(1j).conj())
    for i, view in enumerate(views):
        model.register_buffer(f"view{i}", view)
    model.unused = nn.Parameter(torch.full((3, 2), math.nan).mT)
    model.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    model.register_buffer("mask", torch.ones(3, 3).tril().bool(), persistent=False)
    assert score(model, rows)[0] == score(Tiny(), rows)[0]
    for zero in (nn.Parameter(torch.tensor(0.0)), nn.Buffer(torch.zeros(3, dtype=torch.float16))):
        model = variant(mix=negate_zero)
        model.zero = zero
        with pytest.raises(prepare.IntegrityError, match="^state: zero changed; .*self.training"):
            score(model, rows)


# ---- The loss of train.py ----
def test_the_loss_is_the_cross_entropy_of_the_logits_and_a_cap_bends_them(monkeypatch):
    model = tiny.build(tiny.tiny())
    model.lm_head.weight.data *= 40
    inputs = tiny.record_inputs(model.lm_head)
    x = tiny.tokens(model.config)
    y = tiny.tokens(model.config, seed=1)
    tiny.set_knobs(monkeypatch, LOGIT_SOFTCAP=15)
    capped = model(x)
    tiny.set_knobs(monkeypatch, LOGIT_SOFTCAP=0)
    raw = model(x)
    assert raw.dtype == torch.float32 and raw.abs().max() > 30
    torch.testing.assert_close(raw, inputs[0] @ model.lm_head.weight.T)
    torch.testing.assert_close(capped, 15 * (raw / 15).tanh())
    share = raw.double().softmax(-1)
    target = F.one_hot(y, 61)
    loss = model(x, y)
    torch.testing.assert_close(loss.double(), -share[target.bool()].log().mean())
    loss.backward()
    expected = (share - target).float().flatten(0, 1).T @ inputs[0].flatten(0, 1) / y.numel()
    torch.testing.assert_close(model.lm_head.weight.grad, expected, rtol=1e-4, atol=1e-6)


# ---- Somebody else's train.py ----
FOREIGN = """
import torch, time
from torch.nn.functional import cross_entropy
from prepare import MAX_SEQ_LEN, TIME_BUDGET, Tokenizer, evaluate_bpb, make_dataloader

class Model(torch.nn.Embedding):  # of bigrams
    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        if targets is None:
            return logits
        return cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

tokenizer = Tokenizer.from_directory()
model = Model(tokenizer.get_vocab_size(), tokenizer.get_vocab_size())
train_loader = make_dataloader(tokenizer, 4, MAX_SEQ_LEN, "train")
x, y, epoch = next(train_loader)  # prefetch
total_training_time = 0
while total_training_time < TIME_BUDGET:
    t0 = time.time()
    model(x, y).backward()
    x, y, epoch = next(train_loader)
    with torch.no_grad():
        model.weight -= 100 * model.weight.grad
    model.zero_grad(set_to_none=True)
    total_training_time += time.time() - t0
val_bpb = evaluate_bpb(model, tokenizer, 4)
print("---")
print(f"val_bpb:          {val_bpb:.6f}")
"""


def test_a_foreign_train_py_gets_a_number_a_verdict_and_a_record(
    cache, fresh_run, tmp_path, monkeypatch, capsys
):
    """It is in the style of karpathy/autoresearch, with five imports from prepare, its own clock
    and its own block, and runs unchanged."""
    monkeypatch.setattr(prepare, "RUNS", tmp_path)
    monkeypatch.setattr(prepare, "TIME_BUDGET", 0.3)
    (tmp_path / "train.py").write_text(FOREIGN)
    runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    _, _, own = capsys.readouterr().out.partition("\nintegrity: ok\n")
    value = float(parse_block(own)["val_bpb"])
    assert 0.5 < value < 10
    [path] = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert record["val_bpb"] == pytest.approx(value, abs=1e-6)
    assert record["integrity"] == "ok" and record["training_seconds"] >= 0.3
    assert record["total_tokens_M"] > 0 and record["curve"] is None
