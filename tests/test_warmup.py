"""The warm-up runs what training and evaluation will run, and leaves no trace."""

from functools import partial
from types import SimpleNamespace

import train
from tests.tiny import build, set_knobs, snapshot, steps_taken, tiny, tokens

import numpy as np
import pytest
import torch

T = 16


@pytest.fixture
def small_run(monkeypatch, fresh_run):
    """A model for steps of 4 x 4 rows of 16 tokens, and 6 rows of validation."""
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=256, DEVICE_BATCH_SIZE=4, MAX_SEQ_LEN=T, COMPILE=False)
    fresh_run.rows = np.zeros((6, T + 1))
    return build(tiny(T=T), scramble=False)


class Watched:
    """In place of a model's forward: notes each call, and has memory for `most` rows."""

    def __init__(self, model, most=1000):
        self.model = model
        self.forward = model.forward
        self.most = most
        self.calls = []  # (rows, with targets, in training mode, with gradients)

    def __call__(self, x, y=None):
        call = (len(x), y is not None, self.model.training, torch.is_grad_enabled())
        self.calls.append(call)
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.forward(x, y)


def watch(monkeypatch, model, most=1000):
    watched = Watched(model, most)
    monkeypatch.setattr(model, "forward", watched)
    return watched.calls


def test_warm_up_leaves_no_trace(small_run):
    before = snapshot(build(tiny(T=T), seed=train.SEED, scramble=False))
    small_run.eval()
    _, optimizer, rows = train.warm_up(small_run, torch.float32)
    assert rows == 4
    assert steps_taken(optimizer) == 0
    for group in optimizer.param_groups:
        for state in (*group["exp_avg"], *group["exp_avg_sq"]):
            assert not state.any()
    for name, parameter in small_run.named_parameters():
        assert torch.equal(before[name], parameter), name
        assert parameter.grad is None
    assert small_run.training


def test_a_run_after_the_warm_up_is_the_run_without_it(small_run):
    """Same model, same optimizer: the first steps are equal, bit for bit."""
    model, optimizer, _ = train.warm_up(small_run, torch.float32)
    ends = []
    for _ in range(2):
        for step in range(3):
            train.set_schedules(optimizer, 0.1, step)
            x = tokens(model.config, seed=step)
            train.train_step(model, optimizer, iter([(x, x, 1)]), 1)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        model = build(tiny(T=T), seed=train.SEED, scramble=False)
        optimizer = train.MuonAdamW(train.parameter_groups(model), torch.float32)
    assert torch.equal(*ends)


def test_what_runs_later_runs_in_the_warm_up(small_run, monkeypatch):
    """Two steps of two micro-batches, then a batch of evaluation: 6 rows go by threes."""
    calls = watch(monkeypatch, small_run)
    train.warm_up(small_run, torch.float32)
    assert calls == [(4, True, True, True)] * 4 + [(3, False, False, False)]


def test_a_step_of_one_micro_batch_is_warmed_up_as_such(small_run, monkeypatch):
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=64)
    calls = watch(monkeypatch, small_run)
    train.warm_up(small_run, torch.float32)
    assert [rows for rows, *_ in calls] == [4, 4, 3]


def test_out_of_memory_halves_the_device_batch(small_run, monkeypatch, capsys):
    calls = watch(monkeypatch, small_run, most=1)
    _, _, rows = train.warm_up(small_run, torch.float32)
    assert rows == 1
    assert [rows for rows, *_ in calls] == [4, 2, 1, 1, 1, 1, 1]
    assert capsys.readouterr().out.splitlines() == [
        "out of memory: DEVICE_BATCH_SIZE 4 -> 2, TOTAL_BATCH_SIZE stays 256",
        "out of memory: DEVICE_BATCH_SIZE 2 -> 1, TOTAL_BATCH_SIZE stays 256",
    ]


def test_out_of_memory_with_one_row_ends_the_run(small_run, monkeypatch, capsys):
    watch(monkeypatch, small_run, most=0)
    with pytest.raises(SystemExit) as stop:
        train.warm_up(small_run, torch.float32)
    assert stop.value.code == 5
    assert "lower DEPTH or ASPECT_RATIO" in capsys.readouterr().err


def test_fewer_rows_divide_the_batch(monkeypatch, capsys):
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=96 * 16, MAX_SEQ_LEN=16)
    rows = [96]
    while rows[-1] > 1:
        rows.append(train.fewer_rows(rows[-1], "out of memory"))
    assert rows == [96, 48, 24, 12, 6, 3, 1]
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=2 * 5 * 16)
    assert train.fewer_rows(10, "out of memory") == 5
    assert train.fewer_rows(5, "out of memory") == 2


# ---- The faces of a lack of memory ----
def wrapped(cause):
    error = RuntimeError("backend='inductor' raised")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (wrapped(torch.OutOfMemoryError("Tried to allocate 2 GiB")), True),
        (wrapped(wrapped(RuntimeError("CUDA error: out of memory"))), True),
        (RuntimeError("shapes do not fit"), False),
        (wrapped(RuntimeError("shapes do not fit")), False),
    ],
)
def test_every_face_of_out_of_memory_is_one(error, expected):
    assert train.is_out_of_memory(error) is expected


def test_a_cpu_without_memory_says_so():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**60, dtype=torch.uint8)
    assert train.is_out_of_memory(failure.value)


def test_muons_update_is_compiled_for_every_shape(small_run, monkeypatch):
    """torch would give up after eight, and go on without compilation."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    def rehearse(model, dtype, rows, compiler):
        weights = [torch.nn.Parameter(torch.randn(4, 4 + i)) for i in range(12)]
        row = {"kind": "muon", "lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
        row |= {"betas": (0.95, 0.95), "eps": 1e-10}
        groups = [row | {"params": [weight]} for weight in weights]
        train.MuonAdamW(groups, dtype, compiler).step()
        return model, None

    set_knobs(monkeypatch, COMPILE=True, rehearse=rehearse)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    train.warm_up(small_run, torch.float32)
    assert len(compiled) == 12


def test_a_failed_allocation_that_nobody_names_counts(small_run, monkeypatch):
    """FlashAttention 3 raises a RuntimeError without a word of memory."""
    failures = []

    def rehearse(model, dtype, rows, compiler):
        if rows > 2:
            failures.append(rows)
            raise RuntimeError("mha_fwd failed")
        return model, "optimizer"

    set_knobs(monkeypatch, rehearse=rehearse, failed_allocations=lambda: len(failures))
    assert train.warm_up(small_run, torch.float32) == (small_run, "optimizer", 2)
    failures.clear()
    set_knobs(monkeypatch, failed_allocations=lambda: 0)
    with pytest.raises(RuntimeError, match="mha_fwd failed"):
        train.warm_up(small_run, torch.float32)


# ---- On a GPU ----
@pytest.fixture
def gpu_model(monkeypatch):
    """A model that says it is on a GPU, of 8 layers of width 512, and a GPU without memory that
    notes what share of it may be used."""
    shares = []
    weight = SimpleNamespace(device=torch.device("cuda"))
    model = SimpleNamespace(
        lm_head=SimpleNamespace(weight=weight),
        blocks=[None] * 8,
        config=SimpleNamespace(n_embd=512),
        zero_grad=lambda **options: None,
        shares=shares,
    )
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 2**30, 80 * 2**30))
    set_knobs(monkeypatch, TOTAL_BATCH_SIZE=2**19, DEVICE_BATCH_SIZE=128, MAX_SEQ_LEN=2048)
    return model


@pytest.mark.parametrize(
    ("gigabytes", "rows"), [(4, 8), (8, 16), (12, 32), (16, 32), (24, 64), (80, 128)]
)
def test_the_first_try_is_what_free_memory_suggests(
    gpu_model, monkeypatch, capsys, gigabytes, rows
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gigabytes * 2**30, 2**40))
    tried = []

    def rehearse(model, dtype, rows, compiler):
        tried.append(rows)
        return model, None

    set_knobs(monkeypatch, rehearse=rehearse)
    train.warm_up(gpu_model, torch.bfloat16)
    assert tried == [rows]
    assert ("by free memory: " in capsys.readouterr().out) == (rows < 128)


def test_a_margin_stays_free_while_warming_up(gpu_model, monkeypatch):
    seen = []

    def rehearse(model, dtype, rows, compiler):
        seen.append(list(model.shares))
        if len(seen) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model, None

    set_knobs(monkeypatch, rehearse=rehearse)
    train.warm_up(gpu_model, torch.bfloat16)
    assert seen == [[train.MEMORY_SHARE]] * 3
    assert gpu_model.shares == [train.MEMORY_SHARE, 1.0]


def test_each_try_compiles_anew(gpu_model, monkeypatch):
    """dynamo gives up on a function after eight shapes, and then runs it uncompiled."""
    resets = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append("reset"))

    def rehearse(model, dtype, rows, compiler):
        if rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model, None

    set_knobs(monkeypatch, rehearse=rehearse)
    train.warm_up(gpu_model, torch.bfloat16)
    assert len(resets) == 7


@pytest.mark.parametrize("there", ["", "gcc", "CC"])
def test_a_missing_c_compiler_is_named(monkeypatch, capsys, tmp_path, there):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if there:
        compiler = tmp_path / there
        compiler.touch(0o755)
    if there == "CC":
        monkeypatch.setenv("CC", str(compiler))
    if there:
        train.check_compiler()
        return
    with pytest.raises(SystemExit) as stop:
        train.check_compiler()
    assert stop.value.code == 2
    assert "needs a C compiler" in capsys.readouterr().err


class Compiler:
    """In place of torch.compile: notes what it is given."""

    def __init__(self):
        self.given = []
        self.options = []

    def __call__(self, function, **options):
        self.given.append(function)
        self.options.append(options)
        return function


def test_compile_off_compiles_nothing(small_run, monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(torch, "compile", compiler)
    model, optimizer, _ = train.warm_up(small_run, torch.float32)
    assert compiler.given == []
    assert model is small_run
    assert optimizer.muon_update is train.muon_update


def test_on_a_cpu_the_model_is_compiled_and_the_updates_are_not(small_run, monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(torch, "compile", compiler)
    set_knobs(monkeypatch, COMPILE=True)
    train.warm_up(small_run, torch.float32)
    assert compiler.given == [small_run]
    assert compiler.options == [{"dynamic": False}]


def break_the_compiler(monkeypatch):
    """torch.compile, where there is no C compiler: it fails when its result is called."""

    def broken(function, **options):
        def call(*arguments):
            raise torch._dynamo.exc.TorchDynamoException(
                "backend='inductor' raised:\n"
                "InvalidCxxCompiler: No working C++ compiler found\n"
                "\n"
                "Set TORCHDYNAMO_VERBOSE=1\n"
            )

        return call

    monkeypatch.setattr(torch, "compile", broken)
    set_knobs(monkeypatch, COMPILE=True)
    return broken


def test_without_a_compiler_the_run_goes_on(small_run, monkeypatch, capsys):
    break_the_compiler(monkeypatch)
    model, _, rows = train.warm_up(small_run, torch.float32)
    assert model is small_run
    assert rows == 4
    assert capsys.readouterr().out == (
        "continuing without compilation, which is slower: InvalidCxxCompiler: No working C++ compiler found\n"
    )


def test_a_failure_without_words_is_named_by_its_type(small_run, monkeypatch, capsys):
    def broken(function, **options):
        def call(*arguments):
            raise torch._dynamo.exc.TorchDynamoException("")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    set_knobs(monkeypatch, COMPILE=True)
    train.warm_up(small_run, torch.float32)
    assert "slower: TorchDynamoException\n" in capsys.readouterr().out


def test_a_run_on_a_gpu_that_cannot_be_compiled_ends(gpu_model, monkeypatch, capsys):
    """Uncompiled steps would be many times slower than all that the night compares."""
    broken = break_the_compiler(monkeypatch)
    set_knobs(monkeypatch, rehearse=lambda *arguments: broken(None)())
    with pytest.raises(SystemExit) as stop:
        train.warm_up(gpu_model, torch.bfloat16)
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "error: torch.compile failed: InvalidCxxCompiler: No working C++ compiler found; "
        "set COMPILE = False to see where.\n"
    )


def test_a_bug_in_the_model_is_not_taken_for_a_lack_of_memory(small_run, monkeypatch):
    def forward(x, y=None):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(small_run, "forward", forward)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train.warm_up(small_run, torch.float32)
