"""train_step and train: what a step is made of, and when the last one is."""

import math
from functools import partial

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
        optimizer = build_optimizer(model)
        x = tokens(model.config, B=4).chunk(split)
        y = tokens(model.config, B=4, seed=5).chunk(split)
        batches = zip(x, y, [1] * split, strict=True)
        loss, _ = train.train_step(model, optimizer, batches, split)
        results.append((loss, torch.cat([p.detach().flatten() for p in model.parameters()])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-3)


def test_a_step_takes_its_batches_and_no_more():
    model = build(tiny())
    x = tokens(model.config)
    batches = iter([(x, x, epoch) for epoch in (3, 4, 5)])
    optimizer = build_optimizer(model)
    loss, epoch = train.train_step(model, optimizer, batches, 2)
    assert epoch == 4
    assert steps_taken(optimizer) == 1
    assert len(list(batches)) == 1
    assert loss.shape == ()
    assert not loss.requires_grad


# ---- The loop ----
class Clock:
    """In place of the ruler's: it starts with the first batch, and each batch takes `cost`
    seconds, nothing else takes any."""

    def __init__(self, cost):
        self.cost = cost
        self.now = 100.0
        self.first = None

    def elapsed(self):
        return 0.0 if self.first is None else self.now - self.first

    def monotonic(self):
        return self.now

    def batches(self):
        x = tokens(tiny())
        self.first = self.now
        epoch = 0
        while True:
            self.now += self.cost
            epoch += 1
            yield x[:, :-1], x[:, 1:], epoch


class Log:
    """In place of log_step."""

    def __init__(self):
        self.steps = []
        self.losses = []
        self.others = []

    def __call__(self, step, loss, **others):
        self.steps.append(step)
        self.losses.append(loss)
        self.others.append(others)


@pytest.fixture
def log(monkeypatch):
    log = Log()
    set_knobs(monkeypatch, log_step=log, TIME_BUDGET=10.0, TOTAL_BATCH_SIZE=62)
    return log


def train_by(monkeypatch, clock, micro_batches=1):
    """(steps, the losses of steps) of a run by this clock."""
    set_knobs(monkeypatch, elapsed=clock.elapsed, monotonic=clock.monotonic)
    losses = []
    step = train.train_step

    def watched(*arguments):
        loss, epoch = step(*arguments)
        losses.append(loss)
        return loss, epoch

    set_knobs(monkeypatch, train_step=watched)
    model = build(tiny(), scramble=False)
    optimizer = build_optimizer(model)
    steps = train.train(model, optimizer, clock.batches(), micro_batches, 1.5)
    assert steps_taken(optimizer) == steps == len(losses)
    return steps, [loss.item() for loss in losses]


@pytest.mark.parametrize(
    ("cost", "micro_batches", "steps"),
    [(1, 1, 10), (1, 2, 5), (3, 1, 3), (4, 1, 2), (9.5, 1, 1), (25, 1, 1)],
)
def test_no_step_begins_that_would_end_late(monkeypatch, log, cost, micro_batches, steps):
    clock = Clock(cost)
    assert train_by(monkeypatch, clock, micro_batches)[0] == steps
    assert clock.elapsed() == steps * micro_batches * cost


def test_each_step_is_logged_with_its_loss(monkeypatch, log):
    steps, losses = train_by(monkeypatch, Clock(1))
    assert log.steps == list(range(1, steps + 1))
    assert log.losses == losses
    assert log.others[0] == {"lr": "x1.00", "tokens_per_second": "62", "mfu": "n/a", "epoch": 1}
    assert [others["epoch"] for others in log.others] == log.steps
    factors = [float(others["lr"].removeprefix("x")) for others in log.others]
    assert factors == [1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]


def test_the_schedules_follow_the_clock(monkeypatch, log):
    seen = []
    schedules = train.set_schedules

    def watched(optimizer, progress, step):
        seen.append((progress, step))
        schedules(optimizer, progress, step)

    set_knobs(monkeypatch, set_schedules=watched)
    train_by(monkeypatch, Clock(3))
    assert seen[1:] == [(0.0, 0), (0.3, 1), (0.6, 2)]  # the first comes from build_optimizer


def stand_in_card(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)


class Gpu(Clock):
    """A GPU that works off a queue: a step costs the CPU `launch` seconds and the GPU `cost`."""

    def __init__(self, monkeypatch, launch, cost):
        super().__init__(launch)
        self.busy_until = self.now  # with all that is queued
        self.idle = 0.0  # seconds between steps
        stand_in_card(monkeypatch, "NVIDIA L4")
        monkeypatch.setattr(torch.cuda, "Event", partial(GpuEvent, self))
        step = train.train_step

        def queued(*arguments):
            loss, epoch = step(*arguments)
            if epoch > 1:
                self.idle += max(self.now - self.busy_until, 0)
            self.busy_until = max(self.busy_until, self.now) + cost
            return GpuLoss(self, loss), epoch

        set_knobs(monkeypatch, train_step=queued)

    def wait_until(self, moment):
        self.now = max(self.now, moment)


class GpuEvent:
    def __init__(self, gpu):
        self.gpu = gpu
        self.moment = None

    def record(self):
        self.moment = self.gpu.busy_until

    def synchronize(self):
        self.gpu.wait_until(self.moment)


class GpuLoss:
    """A 0-D tensor on that GPU, or its copy on the CPU, which must not be read before `ready`."""

    device = torch.device("cuda")

    def __init__(self, gpu, value):
        self.gpu = gpu
        self.value = value
        self.ready = None  # of a copy: when it has arrived

    def to(self, device, non_blocking):
        assert device == "cpu" and non_blocking
        copy = GpuLoss(self.gpu, self.value)
        copy.ready = self.gpu.busy_until
        return copy

    def item(self):
        if self.ready is None:  # torch copies it then, behind all that is queued
            self.gpu.wait_until(self.gpu.busy_until)
        else:
            assert self.gpu.now >= self.ready
        return self.value.item()


@pytest.mark.parametrize(("launch", "cost"), [(0.1, 1), (0.01, 0.3), (0.9, 1), (0.001, 0.25)])
def test_a_gpu_never_waits_between_steps(monkeypatch, log, launch, cost):
    """It gets a step before it is through with the one before. All of them are in time."""
    gpu = Gpu(monkeypatch, launch, cost)
    steps, losses = train_by(monkeypatch, gpu)
    assert gpu.idle == 0
    assert log.steps == list(range(1, steps + 1))
    assert log.losses == losses
    assert [others["epoch"] for others in log.others] == log.steps
    assert 10 - 2.1 * cost < gpu.elapsed() <= 10


def test_a_gpu_that_is_faster_than_its_launches(monkeypatch, log):
    gpu = Gpu(monkeypatch, launch=1, cost=0.1)
    steps, losses = train_by(monkeypatch, gpu)
    assert log.losses == losses
    assert steps == 9 and gpu.elapsed() < 10


def test_a_loader_of_ones_own_does_not_train_for_ever(fresh_run):
    """The clock starts with the ruler's first batch; without one the loop ends, and evaluation
    will refuse."""
    model = build(tiny(), scramble=False)
    x = tokens(model.config)
    batches = iter([(x[:, :-1], x[:, 1:], 1)] * 50)
    steps = train.train(model, build_optimizer(model), batches, 1, 1.0)
    assert steps == 1
    assert len(list(batches)) == 49
    assert not fresh_run.served


# ---- The share of the card's peak ----
@pytest.mark.parametrize(
    ("card", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_mfu_is_of_the_whole_run_and_of_no_other_card(monkeypatch, card, tflops):
    set_knobs(monkeypatch, elapsed=lambda: 50.0)
    assert train.mfu_percent(2.4e8, 2**24) is None  # on a CPU
    stand_in_card(monkeypatch, card)
    share = train.mfu_percent(2.4e8, 2**24)
    if tflops is None:
        assert share is None
    else:
        assert share == pytest.approx(100 * 2.4e8 * 2**24 / 50 / (tflops * 1e12))
