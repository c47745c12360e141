"""Tests what prepare.py reports of a run: start, progress, flags, final block and record."""

import itertools
import json
import math
import os
import re
import subprocess
import sys

import prepare
import train

import numpy as np
import pytest
import torch


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Gives the test its own folder of records."""
    monkeypatch.setattr(prepare, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def whole(cache, runs):
    """Returns a bigram model of the whole vocabulary."""
    size = prepare.Tokenizer.from_directory().get_vocab_size()
    return torch.nn.Embedding(size, size)


def read_records(runs):
    return [json.loads(path.read_text()) for path in runs.glob("*.json")]


# ---- Start ----
def test_a_run_notes_once_what_runs_on_what(cache, fresh_run, runs, monkeypatch, capsys):
    commit = prepare.current_commit()
    assert prepare.start() == prepare.DEVICE
    monkeypatch.setattr(prepare, "current_commit", lambda: "a later commit")
    next(prepare.make_dataloader(None, 4, 64))
    assert fresh_run.manifest == prepare.load_manifest()
    assert fresh_run.commit == commit
    said = capsys.readouterr().out
    assert said == f"run: small profile, 300 s, seed 42, commit {commit}, cpu\n"


def test_a_run_whose_record_would_find_no_place_does_not_start(
    cache, fresh_run, monkeypatch, tmp_path, capsys
):
    (tmp_path / "file").touch()
    monkeypatch.setattr(prepare, "RUNS", tmp_path / "file" / "runs")
    with pytest.raises(SystemExit, match="2"):
        prepare.start()
    error = capsys.readouterr().err
    assert "file/runs cannot be written (Not a directory); set AUTORESEARCH_RUNS" in error


@pytest.mark.parametrize(
    ("quota", "threads"), [("100000 100000\n", 1), ("150000 100000", 1), ("max 100000", 2)]
)
def test_a_run_has_no_more_threads_than_its_container_has_cores(
    tmp_path, monkeypatch, quota, threads
):
    torch.set_num_threads(2)
    monkeypatch.setattr(prepare, "CPU_QUOTA", tmp_path / "cpu.max")
    prepare.limit_threads()  # there is no such file
    assert torch.get_num_threads() == 2
    prepare.CPU_QUOTA.write_text(quota)
    prepare.limit_threads()
    assert torch.get_num_threads() == threads
    torch.set_num_threads(1)


def test_the_commit_is_that_of_git_or_of_the_environment(tmp_path, monkeypatch):
    """Untracked files make a commit dirty, since train.py may import them."""
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "prepare.py"))
    monkeypatch.delenv("AUTORESEARCH_COMMIT", raising=False)
    assert prepare.current_commit() == "none"
    monkeypatch.setenv("AUTORESEARCH_COMMIT", "abc1234")
    assert prepare.current_commit() == "abc1234"
    (tmp_path / ".gitignore").write_text("run.log\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -qm one"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    (tmp_path / "run.log").write_text("")
    commit = prepare.current_commit()
    assert re.fullmatch("[0-9a-f]{7}", commit) and commit != "abc1234"
    (tmp_path / os.fsdecode(b"caf\xe9.py")).write_text("")  # not UTF-8, as git prints it
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.quotePath")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "false")
    assert prepare.current_commit() == f"{commit}+dirty"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert prepare.current_commit() == "abc1234"


# ---- Flags ----
def made_up_run(run, *groups, logged=1):
    """Fills in a run that began at 100 s, as if the loader had served batches by `groups` (count,
    seconds, rows, tokens per row); every `logged` batches make a step."""
    run.served = [0] * 10
    run.losses = [[] for _ in range(10)]
    run.batches = 0
    now = 100.0
    for count, seconds, rows, length in groups:
        for _ in range(count):
            tenth = min(int((now - 100) / 30), 9)
            run.served[tenth] += rows * length
            run.batches += 1
            if run.batches % logged == 0:
                run.losses[tenth].append(1.0)
            now += seconds
    prepare._imported = 90.0
    run.began = 100.0
    run.eval_began = now
    run.eval_ended = now + 1


ROWS = (4, 512)


@pytest.mark.parametrize(
    ("groups", "logged", "flag"),
    [
        ([(150, 1.0, *ROWS), (190, 0.79, *ROWS)], 1, "unsteady"),
        ([(150, 1.0, *ROWS), (143, 1.05, *ROWS)], 1, "ok"),
        ([(150, 1.0, 16, 128), (140, 1.05, *ROWS)], 1, "ok"),  # a curriculum of lengths
        ([(150, 1.0, 16, 128), (100, 1.5, *ROWS)], 1, "unsteady"),  # whose long rows cost more
        ([(8, 37.0, *ROWS)], 1, "ok"),  # too few steps to tell
        ([(4, 30.0, *ROWS), (4, 45.0, *ROWS)], 1, "ok"),
        ([(2, 15.0, *ROWS), (270, 1.0, *ROWS)], 1, "ok"),  # slow in the first tenth alone
        ([(26, 3.5, *ROWS), (880, 0.24, *ROWS)], 1, "unsteady"),  # in the first third
        ([(100, 1.0, *ROWS), (1, 99.0, *ROWS), (100, 1.0, *ROWS)], 1, "ok"),  # asleep at half time
        ([(60, 1.0, *ROWS), (1, 60.0, *ROWS), (180, 1.0, *ROWS)], 1, "unsteady"),  # before it
        ([(180, 1.0, *ROWS), (1, 40.0, *ROWS), (80, 1.0, *ROWS)], 1, "unsteady"),  # after it
        ([(16, 0.0, *ROWS), (7, 40.0, *ROWS)], 1, "ok"),  # a queue of 16 batches filled at once
        ([(15, 0.0, *ROWS), (1, 10.0, *ROWS)] * 30, 16, "ok"),  # steps of 16 micro-batches
        ([(15, 0.0, *ROWS), (1, 20.0, *ROWS)] * 15, 16, "ok"),
        ([(15, 0.0, *ROWS), (1, 10.0, *ROWS)] * 15 + [(16, 0.5, *ROWS)] * 18, 16, "unsteady"),
        ([(150, 1.0, *ROWS), (190, 0.79, *ROWS)], 10**9, "unsteady"),  # log_step is never called
    ],
)
def test_the_speed_before_and_after_half_time_is_compared(fresh_run, groups, logged, flag):
    made_up_run(fresh_run, *groups, logged=logged)
    assert prepare.find_flags().partition(":")[0] == flag


def test_each_flag_has_its_limit(fresh_run):
    made_up_run(fresh_run, (60, 5.0, 10, 10))
    fresh_run.eval_began = 403.9
    fresh_run.eval_ended = 403.9 + 299
    prepare._imported = 100 - 299.0
    assert prepare.find_flags() == "ok"
    made_up_run(fresh_run, (30, 5.0, 10, 10), (15, 10.0, 10, 10))
    fresh_run.eval_began = 404.1
    fresh_run.eval_ended = 404.1 + 301
    prepare._imported = 100 - 301.0
    fresh_run.opened = set("abc")
    assert prepare.find_flags().startswith(
        "startup: 301.0 s, over 300; overtime: 304.1 s, over 304; evaluation: 301.0 s, over 300; "
        "opened: the run itself read a, b, c; unsteady: 20 tokens/s, then 10; another program "
    )


def test_reading_the_rulers_files_is_flagged(cache, fresh_run, runs, tmp_path):
    np.memmap(prepare.PREPARED / prepare.TOKENS_FILE, dtype="<u2", mode="r")  # before start
    prepare.start()
    np.save(tmp_path / "notes.npy", [1])  # a file of its own
    assert fresh_run.opened == {prepare.TOKENS_FILE}
    with open(prepare.PREPARED / prepare.ENDS_FILE, "rb"):
        pass
    with os.fdopen(os.open(prepare.PREPARED / prepare.ROWS_FILE, os.O_RDONLY)):
        pass
    made_up_run(fresh_run, (1, 1.0, 1, 1))
    assert prepare.find_flags() == "opened: the run itself read train.npy, train.u16, val.u16"


# ---- Evaluation as part of a run ----
def refused(capsys, model, words):
    with pytest.raises(SystemExit) as stop:
        prepare.evaluate_bpb(model, None, 32)
    assert stop.value.code == 3
    *_, begin, score, integrity = capsys.readouterr().out.splitlines()
    assert (begin, score) == ("---", "val_bpb: nan")
    assert integrity.startswith(f"integrity: FAIL {words}")


def test_evaluation_stops_the_clock_and_comes_once(cache, fresh_run, whole, runs, capsys):
    next(prepare.make_dataloader(None, 4, 64))
    score = prepare.evaluate_bpb(whole, None, 32)
    stopped = prepare.elapsed()
    assert prepare.elapsed() == stopped > 0 and not whole.training
    [record] = read_records(runs)
    assert record["val_bpb"] == score and 1 < score < 20
    assert record["train_loss"] is None and record["curve"] is None
    refused(capsys, whole, "once: ")
    assert read_records(runs) == [record]
    prepare.shutil.rmtree(runs)  # now the record cannot be written
    fresh_run.eval_began = None
    assert prepare.evaluate_bpb(whole, None, 32) == score
    out, err = capsys.readouterr()
    assert out.endswith("\nintegrity: ok\n")
    assert err.startswith("warning: ") and err.endswith("the score above has no record.\n")


@pytest.mark.parametrize(
    ("first", "compiling", "counted"), [(0.5, 0, 0.5), (12, 0, 12), (12, 9, 3)]
)
def test_work_put_off_until_evaluation_is_training(
    cache, clock, whole, runs, monkeypatch, first, compiling, counted
):
    """The first evaluation batch is on the clock, but not its compilation."""
    compiled = itertools.chain([0.0], itertools.repeat(compiling))
    monkeypatch.setattr(prepare, "compile_seconds", lambda: next(compiled))
    seconds = itertools.chain([first], itertools.repeat(0.5))

    def take_time(*_):
        clock.now += next(seconds)

    whole.register_forward_pre_hook(take_time)
    clock.now += 300
    prepare.evaluate_bpb(whole, None, 32)
    [record] = read_records(runs)
    assert record["training_seconds"] == pytest.approx(300 + counted)
    assert ("overtime" in record["integrity"]) == (counted > 4)


def test_what_cannot_be_trusted_gets_no_score(cache, fresh_run, whole, runs, capsys, monkeypatch):
    prepare.start()
    prepare.log_step(1, 4.0)  # does not crash before a batch
    refused(capsys, whole, "loader: make_dataloader never served a batch")
    next(prepare.make_dataloader(None, 4, 64))
    honest = whole.forward
    whole.forward = lambda idx: honest(idx).roll(-1, 1)
    fresh_run.eval_began = None
    refused(capsys, whole, "causality: ")
    assert not read_records(runs)


def test_what_becomes_of_the_files_during_a_run_changes_nothing(own_cache, fresh_run, whole, runs):
    """Only the files as they were at the start count."""
    whole.weight.data[:, ::2] += 3
    next(prepare.make_dataloader(None, 4, 64))
    honest, _ = prepare.score(whole, fresh_run.rows.copy(), fresh_run.token_bytes, 32, 0)
    manifest = prepare.load_manifest()
    told = json.dumps(manifest["files"])
    for name in (prepare.TOKENIZER_FILE, prepare.ROWS_FILE):
        (prepare.PREPARED / name).write_bytes(b"")
    (prepare.PREPARED / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))
    assert prepare.evaluate_bpb(whole, None, 32) == pytest.approx(honest)
    [record] = read_records(runs)
    assert record["data"] == prepare.hashlib.sha256(told.encode()).hexdigest()[:8]
    assert record["integrity"] == "opened: the run itself read val.u16"


# ---- Progress ----
@pytest.fixture
def clock(cache, monkeypatch, fresh_run, runs):
    """Returns a clock that the test sets. The run began at 90 s, its first batch came at 100 s."""

    class Clock:
        now = 90.0

    monkeypatch.setattr(prepare, "_now", lambda: Clock.now)
    prepare._imported = 90.0
    prepare.start()
    Clock.now = 100.0
    fresh_run.began = 100.0
    fresh_run.batches = 1
    fresh_run.served[0] = 6000
    return Clock


def test_progress_is_a_line_every_five_seconds_with_the_mean_since_the_last(clock, capsys):
    capsys.readouterr()
    for step in range(1, 13):
        clock.now += 1
        prepare.log_step(step, float(step), lr="x0.50", epoch=step)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1]) for line in lines] == [1, 7]
    assert lines[1] == "step     7   2% loss 4.5000 tokens_per_second 857 lr x0.50 epoch 7"


def test_the_curve_is_the_mean_loss_of_each_tenth_of_the_budget(clock, fresh_run):
    assert prepare.loss_curve() is None
    losses = [float(i % 7) for i in range(40)]
    for count, loss in enumerate(losses):
        clock.now = 100 + 7.5 * count  # 40 steps in 300 s
        prepare.log_step(1, torch.tensor(loss))
    means = [np.mean(losses[i : i + 4]) for i in range(0, 40, 4)]
    assert prepare.loss_curve() == pytest.approx(means)
    clock.now = 500  # late, but it counts
    prepare.log_step(1, 50.0)
    assert prepare.loss_curve()[9] == pytest.approx((4 * means[9] + 50) / 5)


def test_a_tenth_in_which_no_step_ended_is_interpolated(clock):
    for moment, loss in ((145, 6.0), (265, 2.0)):
        clock.now = moment
        prepare.log_step(1, loss)
    assert prepare.loss_curve() == pytest.approx([6, 6, 5, 4, 3, 2, 2, 2, 2, 2])


def test_a_run_that_diverged_ends_at_once(clock, capsys):
    for loss in (math.nan, 100.5):
        with pytest.raises(SystemExit, match="4"):
            prepare.log_step(7, loss)
        *_, last = capsys.readouterr().out.splitlines()
        assert last == f"FAIL: training diverged, loss {loss:g} nats per token at step 7"


# ---- Final block and record ----
def parse_block(text):
    """Returns the lines of the last block as {key: value}."""
    *_, block = text.rpartition("---\n")
    return dict(line.split(": ", 1) for line in block.splitlines())


NINE = """
    val_bpb training_seconds total_seconds peak_vram_mb mfu_percent total_tokens_M num_steps
    num_params_M depth
""".split()
OTHERS = """
    tokens_per_second train_loss curve startup_seconds eval_seconds profile time_budget seed device
    threads torch commit data prepare
""".split()


def test_the_block_says_what_the_record_says(cache, fresh_run, runs, monkeypatch, capsys):
    """The run trained for 50 s, from 10 s after its import, and was evaluated for 5 s. Stats cannot
    override what prepare.py knows."""
    monkeypatch.setitem(sys.modules, "__main__", train)  # the script that runs
    prepare.start()
    now = prepare._now()
    prepare._imported = now - 70
    fresh_run.began = now - 60
    fresh_run.served[3] = fresh_run.served[7] = 4 * 512
    fresh_run.batches = 2
    fresh_run.eval_began = now - 10
    fresh_run.eval_ended = now - 5
    fresh_run.losses[1] = [5.0]
    fresh_run.losses[2] = [3.0, 4.0]
    stats = {"depth": 2, "num_params_M": 0.5, "num_steps": 4, "mine": 'two: words, "quoted" #1'}
    stats |= {"rate": 0.0003, "betas": [0.8, "x"]}
    lies = dict.fromkeys(("val_bpb", "training_seconds", "seed", "total_tokens_M", "integrity"), 0)
    prepare.report(1.2345678, stats | lies)
    [path] = runs.iterdir()
    record = json.loads(path.read_text())
    block = parse_block(capsys.readouterr().out)
    assert list(block) == [*NINE, *OTHERS, "mine", "rate", "betas", "integrity"]
    assert block["rate"] == "0.0003"
    assert path.name.endswith(f"_{record['commit']}_42_{os.getpid()}.json")
    assert record.pop("train") == prepare.sha256(train.__file__)
    assert list(record) == list(block)
    assert record.pop("curve") == [5.0, 5.0] + [3.5] * 8
    assert block.pop("curve") == "5.000 5.000" + " 3.500" * 8
    assert block["val_bpb"] == "1.234568" and block["train_loss"] == "3.500000"
    for key, text in block.items():
        value = record[key]
        said = "n/a" if value is None else str(value)
        assert text == said or float(text) == pytest.approx(value, abs=0.0051)
    seconds = {"training_": 50, "total_": 70, "eval_": 5, "startup_": 10}
    for key, value in seconds.items():
        assert record[f"{key}seconds"] == pytest.approx(value, abs=0.2)
    expected = stats | {
        "val_bpb": 1.2345678,
        "train_loss": 3.5,
        "total_tokens_M": 0.004096,
        "profile": "small",
        "time_budget": 300,
        "seed": 42,
        "device": "cpu",
        "mfu_percent": None,
        "integrity": "ok",
        "commit": fresh_run.commit,
        "torch": torch.__version__,
        "prepare": prepare.sha256(prepare.__file__)[:8],
    }
    assert expected.items() <= record.items()
    assert 50 < record["peak_vram_mb"] < 20_000
