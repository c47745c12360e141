"""What the ruler says of a run: its start, progress, flags, final block and record."""

import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import prepare
import train
from tests.models import Whole

import numpy as np
import pytest
import torch


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of records, this test's own."""
    monkeypatch.setattr(prepare, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def script(monkeypatch):
    """train.py is the script that runs."""
    monkeypatch.setitem(sys.modules, "__main__", train)


@pytest.fixture
def whole(cache, runs):
    return Whole(prepare.Tokenizer.from_directory().get_vocab_size())


def read_records(runs):
    return [json.loads(path.read_text()) for path in runs.glob("*.json")]


# ---- Start ----
def test_a_run_notes_once_what_runs_on_what(cache, fresh_run, script, runs, monkeypatch, capsys):
    commit = prepare.current_commit()
    assert prepare.start() == prepare.DEVICE
    monkeypatch.setattr(prepare, "current_commit", lambda: "a later commit")
    next(prepare.make_dataloader(None, 4, 64))
    assert prepare.start() == prepare.DEVICE
    assert fresh_run.manifest == prepare.load_manifest()
    assert fresh_run.commit == commit
    assert os.environ["AUTORESEARCH_PROCESS"] == str(os.getpid())
    assert capsys.readouterr().out == (
        f"run: small profile, 300 s, seed 42, commit {commit}, cpu\n"
    )


def test_the_commit_is_that_of_git_or_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "prepare.py"))
    monkeypatch.delenv("AUTORESEARCH_COMMIT", raising=False)
    assert prepare.current_commit() == "none"
    monkeypatch.setenv("AUTORESEARCH_COMMIT", "abc1234")
    assert prepare.current_commit() == "abc1234"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert prepare.current_commit() == "abc1234"


def test_what_git_does_not_track_is_dirty(tmp_path, monkeypatch):
    """A module that train.py imports may be one of these files."""
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "prepare.py"))
    (tmp_path / ".gitignore").write_text("run.log\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -qm one"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    commit = prepare.current_commit()
    assert re.fullmatch("[0-9a-f]{7}", commit)
    (tmp_path / "run.log").write_text("")
    assert prepare.current_commit() == commit
    (tmp_path / "mymodel.py").write_text("")
    assert prepare.current_commit() == f"{commit}+dirty"


# ---- Flags ----
def batches(run, *groups):
    """Serves batches from 100 s on, each of `groups` (count, seconds, rows, tokens per row), and
    evaluates for one second."""
    now = 100.0
    for count, seconds, rows, length in groups:
        for _ in range(count):
            run.served.append((now, rows, length))
            now += seconds
    prepare._imported = 90.0
    run.eval_began = now
    run.eval_ended = now + 1


@pytest.mark.parametrize("second", [0.8, 0.95, 1.05, 1.3])
def test_unsteady_throughput_is_flagged(fresh_run, second):
    batches(fresh_run, (20, 1.0, 4, 25), (20, second, 4, 25))
    steady = abs(second - 1) < 0.1
    assert prepare.flags() == "ok" if steady else "has the same two speeds" in prepare.flags()


@pytest.mark.parametrize(
    ("groups", "flag"),
    [
        ([(60, 1.0, 16, 128), (40, 1.5, 4, 512)], "ok"),  # a curriculum of lengths
        ([(10, 1.0, 4, 512), (10, 2.0, 4, 512)], "ok"),  # too few to tell
        ([(60, 1.0, 16, 128), (50, 1.5, 4, 512), (50, 2.0, 4, 512)], "unsteady"),
    ],
)
def test_speeds_are_compared_within_one_shape_of_batch(fresh_run, groups, flag):
    batches(fresh_run, *groups)
    assert prepare.flags().partition(":")[0] == flag


@pytest.mark.parametrize(("over", "flag"), [(3.9, "ok"), (4.1, "overtime: 304.1 s, over 304")])
@pytest.mark.parametrize("told", [[], [1] * 3, [3000]])
def test_overtime_is_flagged_whatever_log_step_was_told(clock, fresh_run, over, flag, told):
    """All between the first batch and evaluation is training, wherever it was spent."""
    for step in told:
        prepare.log_step(step, 3.0)
    fresh_run.served.clear()
    batches(fresh_run, (1, prepare.TIME_BUDGET + over, 1, 1))
    assert prepare.flags() == flag


@pytest.mark.parametrize(
    ("before", "after", "flag"),
    [
        (299.0, 299.0, "ok"),
        (301.0, 299.0, "startup: 301.0 s, over 300"),
        (299.0, 301.0, "evaluation: 301.0 s, over 300"),
    ],
)
def test_a_long_time_before_or_after_training_is_flagged(fresh_run, before, after, flag):
    batches(fresh_run, (1, 1.0, 1, 1))
    prepare._imported = 100.0 - before
    fresh_run.eval_ended = fresh_run.eval_began + after
    assert prepare.flags() == flag


def test_all_flags_are_named(fresh_run):
    batches(fresh_run, (20, 10.0, 1, 1), (20, 20.0, 1, 1))
    prepare._imported = -300.0
    fresh_run.eval_ended += 400
    fresh_run.opened = {prepare.ROWS_FILE}
    names = [flag.split(":")[0] for flag in prepare.flags().split("; ") if ":" in flag]
    assert names == ["startup", "overtime", "evaluation", "opened", "unsteady"]


READS = {
    "memmap": lambda path: np.memmap(path, dtype="u1", mode="r"),
    "os": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "relative": lambda path: open(os.path.relpath(path), "rb").close(),
}


@pytest.mark.parametrize("read", READS)
def test_reading_the_rulers_files_is_flagged(cache, corpus, fresh_run, runs, read):
    prepare.start()
    assert fresh_run.opened == set()
    files = [prepare.ROOT / name for name in (prepare.ROWS_FILE, prepare.TOKENS_FILE)]
    files.append(corpus / "shard_00000.parquet")
    for path in files:
        READS[read](path)
        READS[read](path)
    assert fresh_run.opened == {path.name for path in files}
    batches(fresh_run, (1, 1.0, 1, 1))
    names = ", ".join(sorted(path.name for path in files))
    assert prepare.flags() == f"opened: the run itself read {names}"


def test_an_honest_run_opens_nothing(cache, fresh_run, whole, tmp_path):
    """Not with two loaders in two threads either."""
    prepare.start()

    def read(_):
        loader = prepare.make_dataloader(None, 64, 512)
        return [next(loader)[2] for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        for epochs in pool.map(read, range(2)):
            assert epochs[-1] > 1  # more than one pass
    prepare.Tokenizer.from_directory()
    (tmp_path / "notes").write_text("a file of its own")
    prepare.evaluate_bpb(whole, None, 32)
    assert fresh_run.opened == set()


# ---- Evaluation as part of a run ----
def refused(capsys, model, words):
    with pytest.raises(SystemExit) as stop:
        prepare.evaluate_bpb(model, None, 32)
    assert stop.value.code == 3
    *_, begin, score, integrity = capsys.readouterr().out.splitlines()
    assert (begin, score) == ("---", "val_bpb: nan")
    assert integrity.startswith(f"integrity: FAIL {words}")


def test_evaluation_stops_the_clock_and_comes_once(cache, fresh_run, whole, runs, capsys):
    """The record of the first is gone with the second."""
    next(prepare.make_dataloader(None, 4, 64))
    score = prepare.evaluate_bpb(whole, None, 32)
    stopped = prepare.elapsed()
    assert prepare.elapsed() == stopped > 0
    assert [record["val_bpb"] for record in read_records(runs)] == [score] and 1 < score < 20
    refused(capsys, whole, "once: ")
    assert not read_records(runs)


class Slow:
    """A model whose first batch takes `first` seconds of the clock and each other one 0.5."""

    def __init__(self, model, clock, first):
        self.model = model
        self.clock = clock
        self.seconds = first
        for name in ("eval", "parameters"):
            setattr(self, name, getattr(model, name))

    def __call__(self, idx):
        self.clock.now += self.seconds
        self.seconds = 0.5
        return self.model(idx)


@pytest.mark.parametrize(
    ("first", "compiling", "counted"),
    [(0.5, 0, 0), (1.9, 0, 0), (12.0, 0, 10), (12.0, 11.5, 0), (12.0, 5, 5)],
)
def test_work_put_off_until_evaluation_is_training(
    cache, clock, whole, runs, monkeypatch, first, compiling, counted
):
    """What a batch takes beyond four times the usual; but compiling may wait."""
    compiled = iter([0.0] + [compiling] * 10**6)
    monkeypatch.setattr(prepare, "compile_seconds", lambda: next(compiled))
    clock.now += 300
    prepare.evaluate_bpb(Slow(whole, clock, first), None, 32)
    [record] = read_records(runs)
    assert record["training_seconds"] == pytest.approx(300 + counted)
    assert ("overtime" in record["integrity"]) == (counted > 4)


def test_a_score_whose_record_finds_no_room_is_not_lost(cache, fresh_run, whole, runs, capsys):
    next(prepare.make_dataloader(None, 4, 64))
    runs.rmdir()
    assert prepare.evaluate_bpb(whole, None, 32) > 1
    out, err = capsys.readouterr()
    assert out.endswith("\nintegrity: ok\n")
    assert err.startswith("warning: ") and err.endswith("the score above has no record.\n")


@pytest.mark.parametrize("name", ["TIME_BUDGET", "PROBE_MEAN"])
def test_a_limit_that_was_assigned_to_is_noticed(
    cache, fresh_run, whole, capsys, monkeypatch, name
):
    next(prepare.make_dataloader(None, 4, 64))
    monkeypatch.setattr(prepare, name, 99)
    refused(capsys, whole, f"settings: prepare.{name} was assigned 99")


def test_a_loader_of_ones_own_is_refused(cache, fresh_run, whole, capsys):
    """log_step before it is no crash."""
    prepare.start()
    prepare.log_step(1, 4.0)
    refused(capsys, whole, "loader: make_dataloader never served a batch")


def test_a_model_that_fails_a_probe_gets_no_score(cache, fresh_run, whole, runs, capsys):
    whole.forward = lambda idx: whole.head(idx).roll(-1, 1)
    next(prepare.make_dataloader(None, 4, 64))
    refused(capsys, whole, "causality: ")
    assert not read_records(runs)


def test_what_becomes_of_the_files_during_a_run_changes_nothing(own_cache, fresh_run, whole, runs):
    """What counts is what the run began with."""
    whole.head.weight.data[:, ::2] += 3
    loader = prepare.make_dataloader(None, 4, 64)
    next(loader)
    honest, _, _ = prepare.score(whole, fresh_run.rows.copy(), fresh_run.token_bytes, 32, 0)
    data = prepare.load_manifest()["files"]
    for path in prepare.ROOT.iterdir():
        if path.name in (prepare.TOKENIZER_FILE, prepare.ROWS_FILE):
            path.write_bytes(path.read_bytes()[:-1026] + bytes(500))
    manifest = prepare.load_manifest()
    manifest["files"][prepare.ROWS_FILE] = [1, "another"]
    (prepare.ROOT / "manifest.json").write_text(json.dumps(manifest))
    assert prepare.evaluate_bpb(whole, None, 32) == pytest.approx(honest)
    [record] = read_records(runs)
    told = json.dumps(data)
    assert record["data"] == prepare.hashlib.sha256(told.encode()).hexdigest()[:8]
    assert record["integrity"] == "opened: the run itself read val.u16"


# ---- Progress ----
@pytest.fixture
def clock(cache, monkeypatch, fresh_run, runs):
    """A clock that the test sets; the run began at 90 s, the first batch was served at 100 s."""

    class Clock:
        now = 90.0

    monkeypatch.setattr(prepare, "_now", lambda: Clock.now)
    prepare._imported = 90.0
    prepare.start()
    Clock.now = 100.0
    fresh_run.served.append((100.0, 10, 100))
    return Clock


def test_progress_is_a_line_about_every_five_seconds(clock, capsys):
    capsys.readouterr()
    for step in range(1, 13):
        clock.now += 1
        prepare.log_step(step, 4.0, lr="x0.50", epoch=step)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1]) for line in lines] == [1, 7]
    assert lines[1] == "step     7   2% loss 4.0000 lr x0.50 epoch 7"


def test_the_loss_is_the_mean_at_first_and_then_smoothed(clock, fresh_run):
    losses = [float(i % 7) for i in range(30)]
    expected = None
    for count, loss in enumerate(losses, start=1):
        clock.now += 1
        prepare.log_step(1, torch.tensor(loss))  # whatever steps it is told of
        expected = np.mean(losses[:count]) if count <= 10 else 0.9 * expected + 0.1 * loss
        assert fresh_run.smooth_loss == pytest.approx(expected)
    assert type(fresh_run.smooth_loss) is float


def test_the_curve_is_the_loss_at_every_tenth_of_the_budget(clock, fresh_run):
    for step in range(1, 41):
        clock.now = 100 + 7.5 * step  # 40 steps in 300 s
        prepare.log_step(step, 10 - step / 10)
        assert len(fresh_run.curve) == step // 4
        if step % 4 == 0:
            assert fresh_run.curve[-1] == fresh_run.smooth_loss


@pytest.mark.parametrize("loss", [math.nan, math.inf, 100.5])
def test_a_run_that_diverged_ends_at_once(clock, capsys, loss):
    with pytest.raises(SystemExit) as stop:
        prepare.log_step(7, loss)
    assert stop.value.code == 4
    *_, last = capsys.readouterr().out.splitlines()
    assert last == f"FAIL: training diverged, loss {loss:g} nats per token at step 7"


# ---- Final block and record ----
def parse_block(text):
    """The lines of the last block as {key: value}."""
    *_, block = text.rpartition("---\n")
    return dict(line.split(": ", 1) for line in block.splitlines())


NINE = """
    val_bpb training_seconds total_seconds peak_vram_mb mfu_percent total_tokens_M num_steps
    num_params_M depth
""".split()
OTHERS = """
    train_loss curve served_tokens_M eval_seconds startup_seconds profile time_budget seed device
    torch commit data prepare
""".split()


def report(run, score=1.25, **stats):
    """Of a run that trained for 50 s, from 10 s after its import, and was evaluated for 5 s."""
    prepare.start()
    now = prepare._now()
    prepare._imported = now - 70
    run.served.append((now - 60, 8, 512))
    run.eval_began = now - 10
    run.eval_ended = now - 5
    run.losses = 4
    run.smooth_loss = 3.5
    run.curve = [6.0, 5.0]
    prepare.report(score, stats)
    return json.loads(run.record.read_text())


def test_the_block_says_what_the_record_says(cache, fresh_run, script, runs, capsys):
    stats = {"num_params_M": 0.5, "attention": "blocks", "num_steps": 4, "depth": 2}
    record = report(fresh_run, 1.2345678, **stats)
    block = parse_block(capsys.readouterr().out)
    assert list(block) == [*NINE, *OTHERS, "attention", "integrity"]
    assert record.pop("train") == prepare.sha256(train.__file__)
    assert list(record) == list(block)
    assert record.pop("curve") == [6.0, 5.0] + [3.5] * 8
    assert block.pop("curve") == "6.000 5.000" + " 3.500" * 8
    assert block["val_bpb"] == "1.234568" and record["val_bpb"] == 1.2345678
    assert block["train_loss"] == "3.500000" and record["train_loss"] == 3.5
    for key, text in block.items():
        value = record[key]
        said = "n/a" if value is None else str(value)
        assert text == said or float(text) == pytest.approx(value, abs=0.0051)
    expected = {
        "training_seconds": 50,
        "total_seconds": 70,
        "eval_seconds": 5,
        "startup_seconds": 10,
        "served_tokens_M": 0.004096,
        "num_steps": 4,
        "num_params_M": 0.5,
        "depth": 2,
    }
    assert {key: record[key] for key in expected} == pytest.approx(expected, abs=0.2)
    words = ("profile", "time_budget", "seed", "device", "mfu_percent", "attention", "integrity")
    told = ["small", "300.00", "42", "cpu", "n/a", "blocks", "ok"]
    assert [block[word] for word in words] == told
    assert block["commit"] == fresh_run.commit and block["torch"] == torch.__version__
    assert block["prepare"] == prepare.sha256(prepare.__file__)[:8]
    assert float(block["peak_vram_mb"]) > 50
    name = fresh_run.record.name
    assert fresh_run.record.parent == runs and name.endswith(
        f"_{block['commit']}_42_{os.getpid()}.json"
    )


def test_stats_cannot_replace_what_the_ruler_knows(cache, fresh_run, runs, capsys):
    lies = dict.fromkeys(("val_bpb", "training_seconds", "seed", "train_loss", "integrity"), 0.1)
    lies |= {"total_tokens_M": 7, "mine": 'two: words, "quoted" #1'}
    record = report(fresh_run, **lies)
    block = parse_block(capsys.readouterr().out)
    assert record["val_bpb"] == 1.25 and record["seed"] == 42 and record["integrity"] == "ok"
    assert record["training_seconds"] > 49 and record["train_loss"] == 3.5
    assert block["val_bpb"] == "1.250000" and block["integrity"] == "ok"
    assert block["total_tokens_M"] == "7" and block["mine"] == 'two: words, "quoted" #1'
