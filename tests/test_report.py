"""What the ruler says of a run: its start, progress, flags, final block and record."""

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
    """The folder of records, this test's own."""
    monkeypatch.setattr(prepare, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def whole(cache, runs):
    """A model of the whole vocabulary: each token's logits follow from the one before."""
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
    assert os.environ["AUTORESEARCH_PROCESS"] == str(os.getpid())
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
    prepare.obey_quota()  # there is no such file
    assert torch.get_num_threads() == 2
    prepare.CPU_QUOTA.write_text(quota)
    prepare.obey_quota()
    assert torch.get_num_threads() == threads
    torch.set_num_threads(1)


def test_the_commit_is_that_of_git_or_of_the_environment(tmp_path, monkeypatch):
    """What git does not track makes it dirty: train.py may import it."""
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
    (tmp_path / os.fsdecode(b"caf\xe9.py")).write_text("")  # no UTF-8, as git prints it
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.quotePath")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "false")
    assert prepare.current_commit() == f"{commit}+dirty"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert prepare.current_commit() == "abc1234"


# ---- Flags ----
def batches(run, *groups):
    """Serves batches from 100 s on, each of `groups` (count, seconds, rows, tokens per row)."""
    run.served.clear()
    now = 100.0
    for count, seconds, rows, length in groups:
        for _ in range(count):
            run.served.append((now, rows, length))
            now += seconds
    prepare._imported = 90.0
    run.eval_began = now
    run.eval_ended = now + 1


@pytest.mark.parametrize(
    ("groups", "flag"),
    [
        ([(20, 1.0, 4, 25), (20, 0.8, 4, 25)], "unsteady"),
        ([(20, 1.0, 4, 25), (20, 1.05, 4, 25)], "ok"),
        ([(60, 1.0, 16, 128), (40, 1.5, 4, 512)], "ok"),  # a curriculum of lengths
        ([(60, 1.0, 16, 128), (50, 1.5, 4, 512), (50, 2.0, 4, 512)], "unsteady"),
        ([(9, 1.0, 4, 512), (10, 2.0, 4, 512)], "ok"),  # too few to tell
        ([(2, 2.0, 4, 512), (45, 1.0, 4, 512)], "ok"),  # slow in the first tenth of the time
        ([(26, 3.5, 4, 512), (880, 0.24, 4, 512)], "unsteady"),  # slow in the first third of it
        ([(100, 1.0, 4, 512), (1, 99.0, 4, 512), (100, 1.0, 4, 512)], "unsteady"),  # asleep
        ([(40, 0.5, 4, 512), (1, 200.0, 4, 512), (1, 1.0, 4, 512)], "unsteady"),
        ([(1, 40.0, 4, 512), (40, 1.0, 4, 512)], "ok"),
        ([(16, 0.0, 4, 512), (7, 40.0, 4, 512)], "ok"),  # a queue of 16 batches filled at once
        ([(15, 0.0, 4, 512), (1, 10.0, 4, 512)] * 11, "ok"),  # steps of 16 batches
    ],
)
def test_speeds_are_compared_within_one_shape_of_batch(fresh_run, groups, flag):
    batches(fresh_run, *groups)
    assert prepare.flags().partition(":")[0] == flag


def test_each_flag_has_its_limit(fresh_run):
    batches(fresh_run, (60, 5.0, 10, 10))
    fresh_run.eval_began = 403.9
    fresh_run.eval_ended = 403.9 + 299
    prepare._imported = 100 - 299.0
    assert prepare.flags() == "ok"
    batches(fresh_run, (20, 5.0, 10, 10), (20, 10.0, 10, 10))
    fresh_run.eval_began = 404.1
    fresh_run.eval_ended = 404.1 + 301
    prepare._imported = 100 - 301.0
    fresh_run.opened = set("abcd")
    assert prepare.flags().startswith(
        "startup: 301.0 s, over 300; overtime: 304.1 s, over 304; evaluation: 301.0 s, over 300; "
        "opened: the run itself read a, b, c; unsteady: 15 tokens/s, then 10; other programs, "
    )


def test_reading_the_rulers_files_is_flagged(cache, corpus, fresh_run, runs, tmp_path):
    np.memmap(prepare.ROOT / prepare.TOKENS_FILE, dtype="<u2", mode="r")  # where train.py begins
    prepare.start()
    (tmp_path / "notes.npy").write_text("a file of its own")
    assert fresh_run.opened == {prepare.TOKENS_FILE}
    np.memmap(corpus / "shard_00000.parquet", dtype="u1", mode="r")
    with open(os.path.relpath(prepare.ROOT / prepare.ENDS_FILE), "rb"):
        pass
    with os.fdopen(os.open(prepare.ROOT / prepare.ROWS_FILE, os.O_RDONLY)):
        pass
    batches(fresh_run, (1, 1.0, 1, 1))
    flags = "opened: the run itself read shard_00000.parquet, train.npy, train.u16"
    assert prepare.flags() == flags and prepare.ROWS_FILE in fresh_run.opened


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
    assert prepare.elapsed() == stopped > 0 and not whole.training
    [record] = read_records(runs)
    assert record["val_bpb"] == score and 1 < score < 20
    assert record["train_loss"] is None and record["curve"] is None
    refused(capsys, whole, "once: ")
    assert not read_records(runs)
    runs.rmdir()  # a record that finds no room
    fresh_run.eval_began = None
    assert prepare.evaluate_bpb(whole, None, 32) == score
    out, err = capsys.readouterr()
    assert out.endswith("\nintegrity: ok\n")
    assert err.startswith("warning: ") and err.endswith("the score above has no record.\n")


@pytest.mark.parametrize(
    ("first", "compiling", "counted"), [(1.9, 0, 0), (12.0, 0, 10), (12.0, 5, 5)]
)
def test_work_put_off_until_evaluation_is_training(
    cache, clock, whole, runs, monkeypatch, first, compiling, counted
):
    """What a batch takes beyond four times the usual; but compiling may wait."""
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
    prepare.log_step(1, 4.0)  # before a batch it is no crash
    refused(capsys, whole, "loader: make_dataloader never served a batch")
    next(prepare.make_dataloader(None, 4, 64))
    honest = whole.forward
    whole.forward = lambda idx: honest(idx).roll(-1, 1)
    fresh_run.eval_began = None
    refused(capsys, whole, "causality: ")
    monkeypatch.setattr(prepare, "PROBE_MEAN", 99)
    fresh_run.eval_began = None
    refused(capsys, whole, "settings: prepare.PROBE_MEAN was assigned 99")
    assert not read_records(runs)


def test_what_becomes_of_the_files_during_a_run_changes_nothing(own_cache, fresh_run, whole, runs):
    """What counts is what the run began with."""
    whole.weight.data[:, ::2] += 3
    next(prepare.make_dataloader(None, 4, 64))
    honest, _, _ = prepare.score(whole, fresh_run.rows.copy(), fresh_run.token_bytes, 32, 0)
    manifest = prepare.load_manifest()
    told = json.dumps(manifest["files"])
    for name in (prepare.TOKENIZER_FILE, prepare.ROWS_FILE):
        (prepare.ROOT / name).write_bytes(b"")
    (prepare.ROOT / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))
    assert prepare.evaluate_bpb(whole, None, 32) == pytest.approx(honest)
    [record] = read_records(runs)
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


def test_the_curve_is_the_smoothed_loss_at_every_tenth_of_the_budget(clock, fresh_run):
    """Smoothed: the mean of the first ten, then a tenth of each."""
    losses = [float(i % 7) for i in range(40)]
    expected = None
    for count, loss in enumerate(losses, start=1):
        clock.now = 100 + 7.5 * count  # 40 steps in 300 s
        prepare.log_step(1, torch.tensor(loss))  # whatever step it is told of
        expected = np.mean(losses[:count]) if count <= 10 else 0.9 * expected + 0.1 * loss
        assert fresh_run.smooth_loss == pytest.approx(expected)
        assert len(fresh_run.curve) == count // 4
        if count % 4 == 0:
            assert fresh_run.curve[-1] == fresh_run.smooth_loss
    assert type(fresh_run.smooth_loss) is float


def test_a_run_that_diverged_ends_at_once(clock, capsys):
    for loss in (math.nan, 100.5):
        with pytest.raises(SystemExit, match="4"):
            prepare.log_step(7, loss)
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
    train_loss curve served_tokens_M eval_seconds startup_seconds profile time_budget seed device threads
    torch commit data prepare
""".split()


def test_the_block_says_what_the_record_says(cache, fresh_run, runs, monkeypatch, capsys):
    """Of a run that trained for 50 s, from 10 s after its import, and was evaluated for 5 s. No
    stat replaces what the ruler knows."""
    monkeypatch.setitem(sys.modules, "__main__", train)  # the script that runs
    prepare.start()
    now = prepare._now()
    prepare._imported = now - 70
    fresh_run.served.append((now - 60, 8, 512))
    fresh_run.eval_began = now - 10
    fresh_run.eval_ended = now - 5
    fresh_run.losses = 4
    fresh_run.smooth_loss = 3.5
    fresh_run.curve = [6.0, 5.0]
    stats = {"depth": 2, "num_params_M": 0.5, "num_steps": 4, "mine": 'two: words, "quoted" #1'}
    lies = dict.fromkeys(("val_bpb", "training_seconds", "seed", "train_loss", "integrity"), 0.1)
    prepare.report(1.2345678, stats | lies)
    record = json.loads(fresh_run.record.read_text())
    block = parse_block(capsys.readouterr().out)
    assert list(block) == [*NINE, *OTHERS, "mine", "integrity"]
    assert fresh_run.record.parent == runs
    assert fresh_run.record.name.endswith(f"_{record['commit']}_42_{os.getpid()}.json")
    assert record.pop("train") == prepare.sha256(train.__file__)
    assert list(record) == list(block)
    assert record.pop("curve") == [6.0, 5.0] + [3.5] * 8
    assert block.pop("curve") == "6.000 5.000" + " 3.500" * 8
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
        "served_tokens_M": 0.004096,
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
