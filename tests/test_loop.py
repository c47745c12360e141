"""A step, the loop, and the rehearsal, which runs what training and evaluation will run and leaves
no trace in the run."""

import ctypes
import gc
import itertools
import weakref
from functools import partial
from types import SimpleNamespace

import train
from tests.tiny import build, build_optimizer, set_knobs, take_steps, tiny, tokens

import pytest
import torch
from torch import nn


# ---- A step ----
def test_micro_batches_add_up_to_the_batch():
    results = []
    for split in (1, 4):
        model = build(tiny())
        x = tokens(model.config, B=4).chunk(split)
        y = tokens(model.config, B=4, seed=5).chunk(split)
        optimizer = build_optimizer(model)
        loss = train.train_step(model, optimizer, [*zip(x, y, range(split), strict=True)])
        assert {int(state["step"]) for state in optimizer.adamw.state.values()} == {1}
        assert loss.shape == () and not loss.requires_grad
        results.append((loss, [p.detach() for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


# ---- The loop ----
@pytest.mark.parametrize(
    ("cost", "launch"), [(0.25, 0), (0, 0.25), (0.001, 0.002), (0.3, 0.9), (25, 0)]
)
def test_each_loss_is_read_after_its_step_and_batches_are_packed_meanwhile(
    monkeypatch, cost, launch
):
    """A step takes `launch` seconds and then `cost` seconds of the device. Packing its successor's
    two batches takes 0.1 seconds each, in which the device works. Reading a loss waits for it."""
    machine = SimpleNamespace(now=0.0, idle_at=0.0, steps=0)
    logged = []

    def loader():
        for number in itertools.count():
            machine.now += 0.1 if number > 1 else 0
            yield None, None, number

    def set_schedules(optimizer, progress, step):
        assert (progress, step) == (machine.now / 10, machine.steps)

    def train_step(model, optimizer, batches):
        assert [number for *_, number in batches] == [2 * machine.steps, 2 * machine.steps + 1]
        machine.now += launch
        machine.idle_at = machine.now + cost
        machine.steps += 1
        return machine.steps, machine.idle_at

    def log_step(step, loss, lr, epoch):
        number, ready = loss
        machine.now = max(machine.now, ready)
        assert (step, epoch) == (number, 2 * number - 1)
        logged.append(number)

    set_knobs(monkeypatch, set_schedules=set_schedules, train_step=train_step, log_step=log_step)
    set_knobs(monkeypatch, elapsed=lambda: machine.now, TIME_BUDGET=10.0)
    count = train.train(None, None, loader(), 2)
    assert logged == [*range(1, count + 1)]
    assert machine.now == pytest.approx(count * (launch + max(cost, 0.2)))
    assert 10 <= machine.now < 10 + launch + max(cost, 0.2)


# ---- The rehearsal ----
T = 16
SIZES = {"TOTAL_BATCH_SIZE": 16 * T, "DEVICE_BATCH_SIZE": 4, "MAX_SEQ_LEN": T}
PARTS = (tiny(T=T), train.attend_sdpa)


class Watched(train.GPT):
    """Notes the calls of all its instances: (rows, in training). Its forward pass also leaves
    things behind, as agents' models do."""

    calls = []

    def __init__(self, config, attend):
        super().__init__(config, attend)
        self.register_buffer("seen", torch.zeros(config.vocab_size), persistent=False)
        self.dropout = nn.Dropout(0.1)
        self.count = 0  # in a plain attribute

    def forward(self, idx, targets=None):
        assert self.training == (targets is not None)
        self.calls.append((len(idx), self.training))
        self.count += 1
        self.seen[idx.flatten()] += 1
        scale = 1 + 0.01 * self.seen.mean() + 0.01 * self.count
        return self.dropout(super().forward(idx, targets)) * scale


def a_run():
    """Returns the losses of some steps, and what the model then holds."""
    model, compiled_model, optimizer = train.build(*PARTS, False)
    losses = take_steps(compiled_model, optimizer, 3, micro_batches=2)
    return torch.tensor([*losses, model.count]), *model.parameters(), *model.buffers()


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ((Watched, "forward"), None),
        ((Watched, "forward"), partial(torch.OutOfMemoryError, "CUDA out of memory.")),
        ((train, "muon_update"), partial(RuntimeError, "MPS backend out of memory")),
    ],
)
def test_a_rehearsal_finds_rows_that_fit_and_leaves_no_trace(monkeypatch, capsys, where, error):
    """It takes a step of two micro-batches and scores an evaluation batch. No buffer, counter,
    random number of dropout or state of the optimizer stays, nor, after a failure, memory."""
    set_knobs(monkeypatch, **SIZES, GPT=Watched)
    before = a_run()
    initialise = train.initialise
    models = []

    def watched(model, seed):
        gc.collect()
        assert not any(one() for one in models)
        models.append(weakref.ref(model))
        initialise(model, seed)

    function = getattr(*where)
    errors = [error, error] if error else []

    def failing(*arguments):
        out = function(*arguments)
        if errors:
            raise errors.pop()()
        return out

    rows = 1 if error else 4
    with monkeypatch.context() as patch:
        set_knobs(patch, initialise=watched)
        patch.setattr(*where, failing)
        assert train.warm_up(*PARTS, False) == rows
    assert Watched.calls[-3:] == [(rows, True)] * 2 + [(16, False)]
    assert len(models) == (3 if error else 1)
    assert ("out of memory: 2 -> 1 rows at a time; " in capsys.readouterr().out) == bool(error)
    assert all(map(torch.equal, a_run(), before))


@pytest.mark.parametrize(
    ("batch", "error", "rows"),
    [
        (12, "can't allocate memory", [12, 6, 3, 1]),
        (5, "can't allocate memory", [5, 2]),  # 2 is no part of 5: a sentence
        (12, "a bug in the model", [12]),
    ],
)
def test_rows_are_halved_until_they_fit_or_do_not_divide_the_batch(
    monkeypatch, capsys, batch, error, rows
):
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=batch * T, DEVICE_BATCH_SIZE=16, MAX_SEQ_LEN=T)
    tried = []

    def rehearse(rows, *parts):
        tried.append(rows)
        train.accumulation_steps(rows)
        raise RuntimeError(error)

    set_knobs(monkeypatch, rehearse=rehearse)
    with pytest.raises((RuntimeError, SystemExit), match="2" if batch == 5 else error):
        train.warm_up(*PARTS, False)
    assert tried == rows
    said = capsys.readouterr().err
    assert said.startswith("error: TOTAL_BATCH_SIZE = 80 must be") == (batch == 5)


def test_the_rehearsal_runs_the_optimizer_even_if_fp16_skips_the_step(monkeypatch):
    """GradScaler skips a step whose gradients overflow, as its first ones often do."""
    set_knobs(monkeypatch, **SIZES)
    updates = []
    update = train.muon_update

    def counted(*arguments):
        updates.append(arguments)
        return update(*arguments)

    def build_it(*parts):
        model, compiled_model, optimizer = built(*parts)
        optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
        return model, compiled_model, optimizer

    built = train.build
    set_knobs(monkeypatch, build=build_it, muon_update=counted)
    train.rehearse(4, tiny(T=T, dtype=torch.float16), train.attend_sdpa, False)
    assert len(updates) == 4  # once for each shape


# ---- Compilation ----
def test_after_the_rehearsal_nothing_compiles(monkeypatch):
    """The run's own model, built anew, uses the code of the rehearsal. On a CPU evaluation is not
    compiled."""
    set_knobs(monkeypatch, **SIZES)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with torch._dynamo.config.patch(recompile_limit=8):  # which `build` changes
        assert train.warm_up(*PARTS, True) == 4
        warmed = len(graphs)
        model, compiled_model, optimizer = train.build(*PARTS, True)
        take_steps(compiled_model, optimizer, 2, micro_batches=4)
    assert train.for_evaluation(model, compiled_model) is model
    assert len(graphs) == warmed > 0


def test_on_a_cpu_that_cannot_compile_the_run_goes_on(monkeypatch, capsys):
    """Without a C++ compiler or Python's headers, calling what torch.compile returned fails. The
    line with the cause is told."""

    def broken(*arguments):
        raise RuntimeError(f"C++ error\n\nOutput:\n{cause}\n    9 | #include <Python.h>\n")

    cause = "x.cpp:9:10: fatal error: Python.h: No such file"
    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    assert not train.can_compile()
    said = capsys.readouterr().out
    assert said == f"continuing without compilation, which is slower: RuntimeError: {cause}\n"


# ---- A CPU ----
def test_a_run_has_no_more_threads_than_its_container_has_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)  # nothing undoes mallopt
    set_knobs(monkeypatch, CPU_QUOTA=tmp_path / "cpu.max")
    for quota, threads in (("max 100000\n", 3), ("250000 100000\n", 2), ("9 10\n", 1)):
        torch.set_num_threads(3)
        train.CPU_QUOTA.write_text(quota)
        train.tune_cpu()
        assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
