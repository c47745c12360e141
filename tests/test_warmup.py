"""The rehearsal runs what training and evaluation will run, and leaves no trace in the run."""

import ctypes
import gc
import itertools
import weakref
from functools import partial

import train
from tests.tiny import set_knobs, snapshot, tiny, tokens

import pytest
import torch
from torch import nn

T = 16
TRAINING = (True, True)
EVALUATION = (False, False)


@pytest.fixture(autouse=True)
def restored():
    """Undoes what `build` changes in this process."""
    with torch._dynamo.config.patch(recompile_limit=8):
        yield


class Watched(train.GPT):
    """Notes the calls of all its instances: (rows, with targets, in training mode). Its forward
    pass also leaves things behind, as agents' models do."""

    calls = []

    def __init__(self, config, attend):
        super().__init__(config, attend)
        self.register_buffer("seen", torch.zeros(config.vocab_size), persistent=False)
        self.dropout = nn.Dropout(0.1)
        self.mean = 0.0  # a running mean in a plain attribute
        self.count = 0

    def forward(self, idx, targets=None):
        self.calls.append((len(idx), targets is not None, self.training))
        self.count += 1
        self.seen[idx.flatten()] += 1
        self.mean = 0.9 * self.mean + 0.1 * self.seen.mean().item()
        out = super().forward(idx, targets)
        return self.dropout(out) * (1 + 0.01 * self.mean + 0.01 * self.count)


@pytest.fixture
def calls(monkeypatch):
    """Steps are of 4 x 4 rows of 16 tokens. Returns the calls of the models that are built."""
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=256, DEVICE_BATCH_SIZE=4, MAX_SEQ_LEN=T, GPT=Watched)
    monkeypatch.setattr(Watched, "calls", [])
    return Watched.calls


PARTS = (tiny(T=T), train.attend_sdpa, False)


def a_run(steps=3):
    """Returns the losses of some steps, and what the model then holds."""
    model, compiled_model, optimizer = train.build(*PARTS)
    x = tokens(model.config, B=4)
    batch = (x, x.roll(-1, 1), 1)
    losses = []
    for step in range(steps):
        train.set_schedules(optimizer, step / steps, step)
        loss, _ = train.train_step(compiled_model, optimizer, batch, itertools.repeat(batch), 2)
        losses.append(loss.item())
    held = [*snapshot(model).values(), *model.buffers()]
    return losses, model.mean, model.count, held


def fail_above_one_row(monkeypatch, where, error):
    """Makes training run out of memory with more than one row. Returns the list of failures."""
    failures = []

    def check():
        rows, with_targets, _ = Watched.calls[-1]
        if with_targets and rows > 1 and len(failures) < 2:
            failures.append(rows)
            raise error()

    if where == "update":
        update = train.muon_update
        set_knobs(monkeypatch, muon_update=lambda *arguments: check() or update(*arguments))
    else:
        forward = Watched.forward

        def failing(self, idx, targets=None):
            out = forward(self, idx, targets)
            check()
            return out

        monkeypatch.setattr(Watched, "forward", failing)
    return failures


OUT_OF_MEMORY = [torch.OutOfMemoryError, partial(RuntimeError, "MPS backend out of memory")]


# ---- The rehearsal ----
def test_what_runs_later_runs_in_the_rehearsal(calls):
    """It takes two steps of two micro-batches, then an evaluation batch of 16 rows."""
    assert train.warm_up(*PARTS) == 4
    assert calls == [(4, *TRAINING)] * 4 + [(16, *EVALUATION)]


@pytest.mark.parametrize("where", ["nowhere", "forward", "update"])
def test_nothing_that_a_rehearsal_did_reaches_the_run(calls, monkeypatch, where):
    """Not a buffer that forward fills, a running mean in an attribute, a counter, dropout's random
    numbers, the optimizer's state or its scale, even if memory has run out twice."""
    alone = a_run()
    with monkeypatch.context() as patch:
        if where != "nowhere":
            fail_above_one_row(patch, where, torch.OutOfMemoryError)
        assert train.warm_up(*PARTS) == (4 if where == "nowhere" else 1)
    after = a_run()
    assert after[:3] == alone[:3]
    for one, other in zip(after[3], alone[3], strict=True):
        assert torch.equal(one, other)


# ---- Out of memory ----
@pytest.mark.parametrize("error", OUT_OF_MEMORY)
@pytest.mark.parametrize("where", ["forward", "update"])
def test_out_of_memory_twice_halves_the_rows_twice(calls, monkeypatch, capsys, where, error):
    """CUDA raises its own exception; other devices only say so in the message."""
    models = []
    initialise = train.initialise

    def watched(model, seed):
        gc.collect()
        assert not any(one() for one in models)  # nothing of the last try still takes memory
        models.append(weakref.ref(model))
        initialise(model, seed)

    set_knobs(monkeypatch, initialise=watched)
    failures = fail_above_one_row(monkeypatch, where, error)
    assert train.warm_up(*PARTS) == 1 and failures == [4, 2]
    assert calls[-5:] == [(1, *TRAINING)] * 4 + [(16, *EVALUATION)]
    assert capsys.readouterr().out.splitlines() == [
        "out of memory: 4 -> 2 rows at a time; a step stays the same",
        "out of memory: 2 -> 1 rows at a time; a step stays the same",
    ]


def test_fewer_rows_divide_the_batch_until_one_does_not_fit(monkeypatch):
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=96 * T, DEVICE_BATCH_SIZE=96, MAX_SEQ_LEN=T)
    tried = []

    def rehearse(rows, *parts):
        tried.append(rows)
        raise torch.OutOfMemoryError("CUDA out of memory")

    set_knobs(monkeypatch, rehearse=rehearse)
    with pytest.raises(torch.OutOfMemoryError):
        train.warm_up(*PARTS)
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


@pytest.mark.parametrize("compiles", [False, True])
def test_a_bug_in_the_model_shows_itself_at_once(calls, monkeypatch, capsys, compiles):
    """It is mistaken neither for a lack of memory nor for a missing compiler."""

    def forward(self, idx, targets=None):
        calls.append(1)
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(Watched, "forward", forward)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train.warm_up(*PARTS[:2], compiles)
    assert len(calls) == 1 and not capsys.readouterr().out


# ---- Compilation ----
@pytest.mark.compile
def test_after_the_rehearsal_nothing_compiles(monkeypatch):
    """The run's own model, built anew, uses the code of the rehearsal. On a CPU evaluation is not
    compiled."""
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=256, DEVICE_BATCH_SIZE=4, MAX_SEQ_LEN=T)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    parts = (*PARTS[:2], True)
    assert train.warm_up(*parts) == 4
    warmed = len(graphs)
    assert warmed
    model, compiled_model, optimizer = train.build(*parts)
    batch = (tokens(model.config, B=4), tokens(model.config, B=4, seed=1), 1)
    for step in range(2):
        train.set_schedules(optimizer, 0.3, step)
        train.train_step(compiled_model, optimizer, batch, itertools.repeat(batch), 4)
    assert train.for_evaluation(model, compiled_model) is model
    assert len(graphs) == warmed


def test_on_a_cpu_that_cannot_compile_the_run_goes_on(monkeypatch, capsys):
    """Without a C++ compiler, calling what torch.compile returned fails."""

    def compile(function, **options):
        def broken(*arguments):
            raise RuntimeError("backend='inductor' raised:\nNo working C++ compiler found\n")

        return broken

    monkeypatch.setattr(torch, "compile", compile)
    assert not train.can_compile(torch.device("cpu"))
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
