"""Tests train_step and train: the parts of a step, when its loss is read, when training ends."""

import gc
import itertools
import math
import weakref

import train
from tests.tiny import build, build_optimizer, set_knobs, steps_taken, take_steps, tiny, tokens

import pytest
import torch


# ---- A step ----
def test_a_few_steps_learn():
    losses = take_steps(build(tiny(), scramble=False), 30)
    assert abs(losses[0] - math.log(61)) < 0.05
    assert losses[-1] < 1.0


def test_micro_batches_add_up_to_the_batch():
    results = []
    for split in (1, 4):
        model = build(tiny())
        x = tokens(model.config, B=4).chunk(split)
        y = tokens(model.config, B=4, seed=5).chunk(split)
        batches = iter([*zip(x, y, range(split), strict=True), (None, None, "next"), "later"])
        optimizer = build_optimizer(model)
        loss, batch = train.train_step(model, optimizer, next(batches), batches, split)
        assert batch[2] == "next" and list(batches) == ["later"]
        assert steps_taken(optimizer) == 1
        assert loss.shape == () and not loss.requires_grad
        results.append((loss, [p.detach() for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


# ---- The loop ----
class Machine:
    """Replaces the clock, log_step, set_schedules and train_step; the loss of step i is i. A step
    takes `launch` seconds and then `cost` seconds of the device; reading its loss waits until the
    device is done with it."""

    def __init__(self, monkeypatch, cost, launch=0.0):
        self.cost = cost
        self.launch = launch
        self.now = 0.0
        self.device = 0.0  # when it will have done all that is queued
        self.steps = 0
        self.queued = []  # at each reading of a loss: how many steps follow it
        self.logged = []  # (step, loss, what is shown)
        self.schedules = []  # (progress, step)
        names = ("set_schedules", "train_step", "log_step")
        set_knobs(monkeypatch, **{name: getattr(self, name) for name in names})
        set_knobs(monkeypatch, elapsed=lambda: self.now, TIME_BUDGET=10.0)
        batches = ((None, None, epoch) for epoch in itertools.count())
        steps = train.train(None, None, batches, 1)
        assert steps == self.steps
        self.now = max(self.now, self.device)

    def set_schedules(self, optimizer, progress, step):
        self.schedules.append((progress, step))

    def train_step(self, model, optimizer, batch, batches, micro_batches):
        self.now += self.launch
        self.device = max(self.device, self.now) + self.cost
        self.steps += 1
        return Loss(self, self.steps), next(batches)

    def log_step(self, step, loss, **shown):
        self.logged.append((step, float(loss), shown))


class Loss:
    def __init__(self, machine, value):
        self.machine = machine
        self.value = value
        self.ready = machine.device

    def item(self):
        machine = self.machine
        machine.now = max(machine.now, self.ready)
        machine.queued.append(machine.steps - self.value)
        return float(self.value)

    __float__ = item


@pytest.mark.parametrize(
    ("cost", "launch"), [(0.25, 0), (0, 0.25), (0.001, 0.002), (0.3, 0.9), (0.7, 0.002), (25, 0)]
)
def test_training_ends_once_the_budget_is_over_with_two_steps_queued_at_most(
    monkeypatch, cost, launch
):
    """Each loss is read after the next step's launch, so that the device always has a step."""
    machine = Machine(monkeypatch, cost, launch)
    assert 10 <= machine.now < 10 + 2 * (cost + launch) + 1e-9
    assert machine.queued == [1] * (machine.steps - 1) + [0]
    assert [(step, loss) for step, loss, _ in machine.logged] == [
        (step, step) for step in range(1, machine.steps + 1)
    ]


def test_a_line_of_progress_has_the_learning_rate_and_the_epoch(monkeypatch):
    machine = Machine(monkeypatch, 0.0, 0.5)
    *shown, last = [shown for *_, shown in machine.logged]
    assert shown[0] == {"lr": "x1.00", "epoch": 2} and last == {}
    assert [each["lr"] for each in shown[-4:]] == ["x0.40", "x0.30", "x0.20", "x0.10"]
    assert machine.schedules[:2] == [(0.0, 0), (0.05, 1)]


def test_garbage_that_holds_tensors_is_collected(monkeypatch):
    """An agent's cycle would otherwise fill the memory."""

    class Node:
        def __init__(self):
            self.tensor = torch.ones(1)
            self.itself = self

    alive = weakref.WeakSet()
    elapsed = itertools.count()

    def train_step(*_):
        alive.add(Node())
        return torch.tensor(1.0), (None, None, 1)

    names = {"set_schedules": lambda *_: None, "log_step": lambda *_, **__: None}
    set_knobs(monkeypatch, **names, train_step=train_step)
    set_knobs(monkeypatch, elapsed=lambda: next(elapsed), TIME_BUDGET=10_000)
    train.train(None, None, itertools.repeat((None, None, 1)), 1)
    assert gc.isenabled() and len(alive) < 2000


# ---- The share of the card's peak ----
@pytest.mark.parametrize(("card", "tflops"), [("NVIDIA H100 PCIe", 756), ("NVIDIA L40", None)])
def test_mfu_is_that_of_the_whole_run_on_this_card(monkeypatch, card, tflops):
    set_knobs(monkeypatch, tokens_per_second=lambda: 2e6, DEVICE_NAME=card)
    expected = tflops and pytest.approx(100 * 4e7 * 2e6 / (tflops * 1e12))
    assert train.mfu_percent(4e7) == expected
