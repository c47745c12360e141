"""The warm-up runs what training and evaluation will run, and leaves no trace."""

import ctypes
import gc
import itertools
from functools import partial

import train
from tests.tiny import build, set_knobs, steps_taken, tiny, tokens

import pytest
import torch

T = 16


@pytest.fixture(autouse=True)
def restored():
    """Undoes what warm_up changes in this process."""
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    gc.enable()


@pytest.fixture
def small_run(monkeypatch, fresh_run):
    """Returns a model for steps of 4 x 4 rows of 16 tokens."""
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=256, DEVICE_BATCH_SIZE=4, MAX_SEQ_LEN=T, COMPILE=False)
    model = build(tiny(T=T))
    model.register_buffer("moving", torch.zeros(3))
    return model


def watch(monkeypatch, model):
    """Returns a list; each call of the model adds (rows, with targets, in training mode) to it."""
    calls = []
    forward = model.forward

    def watched(x, y=None):
        calls.append((len(x), y is not None, model.training))
        if model.training:
            model.moving.add_(1)
        return forward(x, y)

    monkeypatch.setattr(model, "forward", watched)
    return calls


TRAINING = (True, True)
EVALUATION = (False, False)


def check_fresh(model, optimizer):
    """Checks that model and optimizer are as new, bit for bit."""
    fresh = build(tiny(T=T), seed=train.SEED, scramble=False)
    tensors = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
    tensors["moving"] = torch.zeros(3)
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, tensors[name]), name
        assert tensor.grad is None
    assert model.training
    assert steps_taken(optimizer) == 0
    for group in optimizer.muon_groups:
        assert not group["exp_avg"].any() and not group["exp_avg_sq"].any()


def test_what_runs_later_runs_in_the_warm_up_and_leaves_no_trace(small_run, monkeypatch):
    """The warm-up takes two steps of two micro-batches, then an evaluation batch of 16 rows."""
    calls = watch(monkeypatch, small_run)
    model, optimizer, rows = train.warm_up(small_run, torch.float32)
    assert model is small_run and rows == 4
    assert calls == [(4, *TRAINING)] * 4 + [(16, *EVALUATION)]
    check_fresh(model, optimizer)
    assert not gc.isenabled()


# ---- Out of memory ----
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("where", ["forward", "update"])
def test_out_of_memory_twice_halves_the_rows_twice(small_run, monkeypatch, capsys, where, named):
    """CUDA raises its own exception; other devices only say so in the message."""
    failures = []
    calls = watch(monkeypatch, small_run)
    forward = small_run.forward
    update = train.muon_update

    def fail_above_one_row():
        if calls[-1][0] > 1:
            failures.append(1)
            raise torch.OutOfMemoryError if named else RuntimeError("MPS backend out of memory")

    def small_forward(x, y=None):
        if calls and len(x) < calls[-1][0]:  # nothing of the last try still takes memory
            assert all(p.grad is None for p in small_run.parameters())
        out = forward(x, y)
        if where == "forward" and y is not None:
            fail_above_one_row()
        return out

    def small_update(*arguments):
        if where == "update":
            fail_above_one_row()
        return update(*arguments)

    monkeypatch.setattr(small_run, "forward", small_forward)
    set_knobs(monkeypatch, muon_update=small_update)
    model, optimizer, rows = train.warm_up(small_run, torch.float32)
    assert rows == 1 and len(failures) == 2
    assert calls[-5:] == [(1, *TRAINING)] * 4 + [(16, *EVALUATION)]
    check_fresh(model, optimizer)
    assert capsys.readouterr().out.splitlines() == [
        "out of memory: 4 -> 2 rows at a time; a step stays the same",
        "out of memory: 2 -> 1 rows at a time; a step stays the same",
    ]


def test_fewer_rows_divide_the_batch_until_one_does_not_fit(small_run, monkeypatch):
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=96 * T, DEVICE_BATCH_SIZE=96)
    tried = []
    monkeypatch.setattr(train, "fits", lambda *arguments: tried.append(arguments[-1]))
    with pytest.raises(torch.OutOfMemoryError, match="one row"):
        train.warm_up(small_run, torch.float32)
    assert tried == [96, 48, 24, 12, 6, 3, 1]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_has_run_out_whether_an_exception_or_words_say_so(error):
    assert train.is_out_of_memory(error)


@pytest.mark.parametrize("compiling", [False, True])
def test_a_bug_in_the_model_shows_itself_at_once(small_run, monkeypatch, capsys, compiling):
    """It is mistaken neither for a lack of memory nor for a missing compiler."""
    calls = []

    def forward(x, y=None):
        calls.append(1)
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(small_run, "forward", forward)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    set_knobs(monkeypatch, COMPILE=compiling)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train.warm_up(small_run, torch.float32)
    assert len(calls) == 1 and not capsys.readouterr().out


# ---- Compilation ----
@pytest.mark.compile
def test_after_the_warm_up_nothing_compiles(small_run, monkeypatch):
    """On a CPU evaluation is not compiled."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    set_knobs(monkeypatch, COMPILE=True)
    model, optimizer, _ = train.warm_up(small_run, torch.float32)
    warmed = len(graphs)
    assert warmed
    batch = (tokens(tiny(T=T), B=4), tokens(tiny(T=T), B=4, seed=1), 1)
    for step in range(2):
        train.set_schedules(optimizer, 0.3, step)
        train.train_step(model, optimizer, batch, itertools.repeat(batch), 4)
    assert train.for_evaluation(small_run, model) is small_run
    assert len(graphs) == warmed


def test_on_a_cpu_that_cannot_compile_the_run_goes_on(small_run, monkeypatch, capsys):
    """Without a C++ compiler, calling what torch.compile returned fails. Then the model is not
    compiled."""
    compiled = []

    def compile(function, **options):
        def broken(*arguments):
            raise RuntimeError("backend='inductor' raised:\nNo working C++ compiler found\n")

        compiled.append(function)
        return broken

    monkeypatch.setattr(torch, "compile", compile)
    set_knobs(monkeypatch, COMPILE=True)
    model, optimizer, rows = train.warm_up(small_run, torch.float32)
    assert model is small_run and rows == 4
    assert len(compiled) == 1 and small_run not in compiled
    check_fresh(model, optimizer)
    assert capsys.readouterr().out == (
        "continuing without compilation, which is slower: RuntimeError: backend='inductor' raised: "
        "No working C++ compiler found\n"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            f"CppCompileError: C++ compile error\n\nCommand:\ng++ {'-D MACRO ' * 99}\n\nOutput:\n"
            "/tmp/x/main.cpp:45:10: fatal error: Python.h: No such file or directory\n   45 | #incl"
            "ude <Python.h>\ncompilation terminated.\n\nSet TORCHDYNAMO_VERBOSE=1 for more",
            "/tmp/x/main.cpp:45:10: fatal error: Python.h: No such file or directory",
        ),
        (
            "OSError: x.so: failed to map\nsegment.\n\nSet TORCHDYNAMO_VERBOSE=1 for more",
            "OSError: x.so: failed to map segment.",
        ),
        ("", ""),
    ],
)
def test_an_error_is_told_by_the_line_that_has_its_cause(text, line):
    assert train.describe(RuntimeError(text)) == f"RuntimeError: {line}"


# ---- A CPU ----
@pytest.mark.parametrize(
    ("quota", "threads"), [("100000 100000\n", 1), ("150000 100000", 1), ("max 100000", 2)]
)
def test_a_run_has_no_more_threads_than_its_container_has_cores(
    tmp_path, monkeypatch, quota, threads
):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)  # nothing undoes mallopt
    torch.set_num_threads(2)
    monkeypatch.setattr(train, "CPU_QUOTA", tmp_path / "cpu.max")
    train.tune_cpu()  # there is no such file
    assert torch.get_num_threads() == 2
    train.CPU_QUOTA.write_text(quota)
    train.tune_cpu()
    assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
