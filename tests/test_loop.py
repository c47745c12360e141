"""train_step and train: what a step is made of, when the loss is read, which step is the last."""

import itertools
import math

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
    """In place of the ruler's clock, of the model's steps, whose loss is their number, and of
    log_step. A step costs `launch` seconds and then the device `cost`; to read a loss, or a sum of
    them, is to wait for the device."""

    def __init__(self, monkeypatch, cost, launch=0.0):
        self.cost = cost
        self.launch = launch
        self.now = 0.0
        self.device = 0.0  # when it is through with all that is queued
        self.steps = 0
        self.reads = []  # (time, steps) of each
        self.logged = []  # (step, loss, what is shown)
        self.schedules = []  # (progress, step)
        names = ("set_schedules", "train_step", "log_step")
        set_knobs(monkeypatch, **{name: getattr(self, name) for name in names})
        set_knobs(monkeypatch, elapsed=lambda: self.now, TIME_BUDGET=10.0, TOTAL_BATCH_SIZE=64)
        batches = ((None, None, epoch) for epoch in itertools.count())
        steps = train.train(None, None, batches, 1)
        assert steps == self.steps
        assert [step for step, *_ in self.logged] == [step for _, step in self.reads]

    def set_schedules(self, optimizer, progress, step):
        self.schedules.append((progress, step))

    def train_step(self, model, optimizer, batch, batches, micro_batches):
        self.now += self.launch
        self.device = max(self.device, self.now) + self.cost
        self.steps += 1
        return Loss(self, self.steps), next(batches)

    def log_step(self, step, loss, **shown):
        self.logged.append((step, loss, shown))


class Loss:
    def __init__(self, machine, value):
        self.machine = machine
        self.value = value

    def __radd__(self, other):
        return Loss(self.machine, self.value + getattr(other, "value", other))

    __add__ = __radd__

    def __float__(self):
        machine = self.machine
        machine.now = max(machine.now, machine.device)
        machine.reads.append((machine.now, machine.steps))
        return float(self.value)


@pytest.mark.parametrize(
    ("cost", "reads"),
    [(0.25, [1, *range(5, 38, 4), 40]), (1, range(1, 11)), (3, [1, 2, 3]), (4, [1, 2]), (25, [1])],
)
def test_the_loss_is_read_once_a_second_and_no_step_ends_late(monkeypatch, cost, reads):
    machine = Machine(monkeypatch, cost)
    assert [steps for _, steps in machine.reads] == list(reads)
    assert machine.now == cost * machine.steps
    if cost == 3:
        assert machine.schedules == [(0.0, 0), (0.3, 1), (0.6, 2)]


@pytest.mark.parametrize(
    ("cost", "launch"), [(0.001, 0.002), (0.01, 0.0), (0.3, 0.9), (0.7, 0.002), (1.5, 0.9)]
)
def test_all_of_the_budget_is_used_with_few_reads(monkeypatch, cost, launch):
    machine = Machine(monkeypatch, cost, launch)
    longest = cost + launch
    times = [time for time, _ in machine.reads]
    assert 10 - 2 * longest < machine.now < 10 + 1e-9
    assert all(after - time <= 1.01 + longest for time, after in itertools.pairwise(times))
    assert len(times) <= 12


def test_each_window_is_logged_with_its_mean_loss(monkeypatch):
    """Steps of half a second: the first alone, then by twos."""
    logged = Machine(monkeypatch, 0.5).logged
    assert [loss for _, loss, _ in logged] == [1, *(n + 0.5 for n in range(2, 20, 2)), 20]
    assert logged[0][2] == {"lr": "x1.00", "tokens_per_second": "128", "epoch": 1}
    factors = [float(shown["lr"].removeprefix("x")) for *_, shown in logged]
    assert factors == [1, 1, 1, 1, 1, 1, 0.9, 0.7, 0.5, 0.3, 0.1]  # of each window's last step


# ---- The share of the card's peak ----
@pytest.mark.parametrize(("card", "tflops"), [("NVIDIA H100 PCIe", 756), ("NVIDIA L40", None)])
def test_mfu_is_of_the_whole_run_and_of_no_other_card(monkeypatch, card, tflops):
    set_knobs(monkeypatch, elapsed=lambda: 50.0, DEVICE_NAME=card)
    expected = tflops and pytest.approx(100 * 2.4e8 * 2**24 / 50 / (tflops * 1e12))
    assert train.mfu_percent(2.4e8, 2**24) == expected
