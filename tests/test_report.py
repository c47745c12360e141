"""Tests what prepare.py reports of a run: start, progress, flags, final block and record."""

import calendar
import json
import math
import os
import re
import subprocess
import time

import prepare

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
    assert said == f"run: small profile, 300 s, seed 42, commit {commit}, {prepare.DEVICE_NAME}\n"


def test_the_commit_is_that_of_git_or_of_the_environment(tmp_path, monkeypatch):
    """Of git in this folder, whatever repository the environment names."""
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "prepare.py"))
    monkeypatch.delenv("AUTORESEARCH_COMMIT", raising=False)
    assert prepare.current_commit() == "none"
    monkeypatch.setenv("AUTORESEARCH_COMMIT", "abc1234")
    assert prepare.current_commit() == "abc1234"
    (tmp_path / "train.py").write_text("")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -qm one"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    subprocess.run(["git", "tag", "start"], cwd=tmp_path, check=True)  # not named instead
    commit = prepare.current_commit()
    assert re.fullmatch("[0-9a-f]{7}", commit) and commit != "abc1234"
    (tmp_path / "run.log").write_text("")  # untracked
    assert prepare.current_commit() == commit
    (tmp_path / "train.py").write_text("edited")
    assert prepare.current_commit() == f"{commit}+dirty"
    other = tmp_path / "other"
    subprocess.run(["git", "init", "-q", other], check=True)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert prepare.current_commit() == f"{commit}+dirty"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert prepare.current_commit() == "abc1234"


# ---- Flags ----
def made_up_run(run, startup, training, evaluation):
    """Fills in the moments of a run that took this many seconds of each."""
    prepare._imported = 100.0 - startup
    run.began = 100.0
    run.ended = 100.0 + training
    run.scored = run.ended + evaluation


def test_each_flag_has_its_limit(fresh_run):
    made_up_run(fresh_run, 299, 303.9, 299)
    assert prepare.find_flags() == "ok"
    made_up_run(fresh_run, 301, 304.1, 301)
    fresh_run.opened = set("abc")
    assert prepare.find_flags() == (
        "startup: 301.0 s, over 300; overtime: 304.1 s, over 304; evaluation: 301.0 s, over 300; "
        "opened: the run itself read a, b, c"
    )


def test_reading_the_rulers_files_is_flagged(cache, fresh_run, runs, tmp_path, monkeypatch):
    np.memmap(prepare.PREPARED / prepare.TOKENS_FILE, dtype="<u2", mode="r")  # before start
    prepare.start()
    np.save(tmp_path / prepare.ENDS_FILE, [1])  # a file of its own
    neighbour = prepare.PREPARED.with_name("small-old")  # begins with the folder's name
    neighbour.mkdir()
    (neighbour / prepare.TOKENS_FILE).write_bytes(b"")
    prepare.Tokenizer.from_directory()
    monkeypatch.chdir(prepare.PREPARED.parent)
    assert fresh_run.opened == {prepare.TOKENS_FILE}
    with open(f"small/../small/{prepare.ENDS_FILE}", "rb"):
        pass
    with os.fdopen(os.open(prepare.PREPARED / prepare.ROWS_FILE, os.O_RDONLY)):
        pass
    neighbour.joinpath(prepare.TOKENS_FILE).unlink()
    neighbour.rmdir()
    made_up_run(fresh_run, 1, 1, 1)
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
    assert record["curve"] is None
    refused(capsys, whole, "once: ")
    assert read_records(runs) == [record]
    prepare.shutil.rmtree(runs)
    runs.touch()  # now the record cannot be written
    fresh_run.ended = None
    assert prepare.evaluate_bpb(whole, None, 32) == score
    out, err = capsys.readouterr()
    assert out.endswith("\nintegrity: ok\n")
    assert err.startswith("warning: ") and err.endswith("the score above has no record.\n")


@pytest.mark.parametrize("seconds", [0.5, 12])
def test_work_put_off_until_model_eval_is_training(cache, clock, whole, runs, seconds):
    """The clock stops once model.eval() has returned; what forward does later is evaluation."""

    def eval():
        clock.now += seconds
        return whole.train(False)

    def forward(*_):
        clock.now += 7

    whole.eval = eval
    whole.register_forward_pre_hook(forward)
    clock.now += 300
    prepare.evaluate_bpb(whole, None, 32)
    [record] = read_records(runs)
    assert record["training_seconds"] == pytest.approx(300 + seconds)
    assert record["eval_seconds"] >= 7
    assert ("overtime" in record["integrity"]) == (seconds > 4)


def test_what_cannot_be_trusted_gets_no_score(cache, fresh_run, whole, runs, capsys, monkeypatch):
    prepare.start()
    prepare.log_step(1, 4.0)  # does not crash before a batch
    refused(capsys, whole, "loader: make_dataloader never served a batch")
    next(prepare.make_dataloader(None, 4, 64))
    honest = whole.forward
    whole.forward = lambda idx: honest(idx).roll(-1, 1)
    fresh_run.ended = None
    refused(capsys, whole, "causality: ")
    assert not read_records(runs)


def test_what_becomes_of_the_files_during_a_run_changes_nothing(own_cache, fresh_run, whole, runs):
    """Only the files as they were at the start count."""
    whole.weight.data[:, ::2] += 3
    next(prepare.make_dataloader(None, 4, 64))
    honest, _ = prepare.score(whole, fresh_run.rows.copy(), fresh_run.token_bytes, 0)
    manifest = prepare.load_manifest()
    (prepare.PREPARED / prepare.ROWS_FILE).write_bytes(b"")
    other = manifest | {"data": "another", "vocabulary": []}
    (prepare.PREPARED / prepare.MANIFEST_FILE).write_text(json.dumps(other))
    assert prepare.evaluate_bpb(whole, None, 32) == pytest.approx(honest)
    [record] = read_records(runs)
    assert record["data"] == manifest["data"]
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
    fresh_run.served = 6000
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


KEYS = """
    val_bpb training_seconds total_seconds startup_seconds eval_seconds peak_vram_mb total_tokens_M
    tokens_per_second curve profile time_budget seed device threads torch commit data prepare
""".split()


def test_the_block_says_what_the_record_says(cache, fresh_run, runs, monkeypatch, capsys):
    """The run trained for 50 s, from 10 s after its import, and was evaluated for 5 s. Stats cannot
    override what prepare.py knows."""
    prepare.start()
    now = prepare._now()
    prepare._imported = now - 70
    fresh_run.began = now - 60
    fresh_run.ended = now - 10
    fresh_run.scored = now - 5
    fresh_run.served = 8 * 512
    fresh_run.losses[1] = [5.0]
    fresh_run.losses[2] = [3.0, 4.0]
    stats = {"depth": 2, "num_params_M": 0.5, "num_steps": 4, "mine": 'two: words, "quoted" #1'}
    stats |= {"rate": 0.0003, "betas": [0.8, "x"], "nothing": None}
    lies = dict.fromkeys(("val_bpb", "training_seconds", "seed", "total_tokens_M"), 0)
    prepare.report(1.2345678, stats | lies)
    [path] = runs.iterdir()
    record = json.loads(path.read_text())
    block = parse_block(capsys.readouterr().out)
    assert list(block) == [*KEYS, *stats, "integrity"] == list(record)
    assert block["rate"] == "0.0003"
    moment, *name = path.stem.split("_")
    assert name == [record["commit"], "42", str(os.getpid())]
    written = calendar.timegm(time.strptime(moment, "%Y%m%dT%H%M%SZ"))  # in UTC
    assert abs(written - path.stat().st_mtime) < 5
    assert record.pop("curve") == [5.0, 5.0] + [3.5] * 8
    assert block.pop("curve") == "5.000 5.000" + " 3.500" * 8
    assert block["val_bpb"] == "1.234568" and record["tokens_per_second"] == 82
    for key, text in block.items():
        assert text == str(record[key]) or float(text) == pytest.approx(record[key], rel=1e-4)
    seconds = {"training_": 50, "total_": 70, "eval_": 5, "startup_": 10}
    for key, value in seconds.items():
        assert record[f"{key}seconds"] == pytest.approx(value, abs=0.2)
    expected = stats | {
        "val_bpb": 1.2345678,
        "total_tokens_M": 0.004096,
        "profile": "small",
        "time_budget": 300,
        "seed": 42,
        "device": prepare.DEVICE_NAME,
        "integrity": "ok",
        "commit": fresh_run.commit,
        "data": prepare.load_manifest()["data"],
        "torch": torch.__version__,
        "prepare": prepare.file_hash(prepare.__file__)[:8],
    }
    assert expected.items() <= record.items()
    assert 50 < record["peak_vram_mb"] < 20_000
