"""Tests on what a run runs (import, packages, device) and what prepare.py reports of it: start,
progress, flags, final block and record. Hardware that is absent has stand-ins."""

import importlib.metadata
import json
import math
import os
import re
import runpy
import socket
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import prepare
from tests.common import ROOT
from tests.test_data import refusal

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

RULER = str(ROOT / "prepare.py")


# ---- Import ----
def test_importing_has_no_effect(tmp_path, monkeypatch, capfd):
    """The import of the two scripts makes no file, line, process or connection."""

    def forbidden(*arguments, **_):
        raise AssertionError(arguments)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AUTORESEARCH_CACHE")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(subprocess.Popen, "__init__", forbidden)
    assert runpy.run_path(RULER)["CACHE"] == tmp_path / ".cache/autoresearch"
    runpy.run_path(str(ROOT / "train.py"))
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_windows_gets_a_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    assert "Windows lacks what this needs; use WSL" in refusal(capsys, runpy.run_path, RULER)


# ---- Packages: pyproject.toml alone, without a lock file, pins all, whatever the index ----
@pytest.mark.skipif(
    "UV_NO_SYNC" in os.environ or bool(find_spec("flash_attn")),
    reason="somebody installed something by hand, as docs/manual.md says",
)
def test_every_package_is_constrained_and_installed_so():
    """uv accepts a dependency without a constraint, whose version then depends on the day; `uv
    sync` removes what no dependency needs. The constraints are last, since the command that
    rewrites them deletes all that follows."""
    *_, (last, uv) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"].items()
    *_, (key, lines) = uv.items()
    assert (last, key) == ("uv", "constraint-dependencies")
    constraints = [Requirement(line) for line in lines]
    pinned = {
        canonicalize_name(one.name): str(one.specifier)
        for one in constraints
        if not one.marker or one.marker.evaluate()
    }
    packages = importlib.metadata.distributions()
    installed = {canonicalize_name(one.name): f"=={one.version}" for one in packages}
    assert installed == {name: pinned.get(name) for name in installed}


# ---- Device and profile ----
CARDS = {  # memory as torch reports it, and compute capability
    "RTX 5090": (33.7e9, 12, 0),
    "A100-40GB": (42.3e9, 8, 0),
    "V100": (34.1e9, 7, 0),
}
CPU = prepare.DEVICE_NAME


def found(monkeypatch, card):
    """Returns prepare.py's names as on a machine with this card, or with none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card in CARDS)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: card == "Apple")
    if card in CARDS:
        memory, major, minor = CARDS[card]
        gpu = SimpleNamespace(name=card, total_memory=memory, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return SimpleNamespace(**runpy.run_path(RULER))


@pytest.mark.parametrize(
    ("card", "profile", "expected"),
    [
        (None, "", ["cpu", CPU, "small"]),
        ("Apple", "", ["mps", CPU, "small"]),
        ("RTX 5090", "", ["cuda", "RTX 5090", "medium"]),
        ("A100-40GB", "", ["cuda", "A100-40GB", "full"]),
        ("A100-40GB", "small", ["cuda", "A100-40GB", "small"]),
    ],
)
def test_a_run_gets_the_best_device_and_its_profile(monkeypatch, card, profile, expected):
    monkeypatch.setenv("AUTORESEARCH_PROFILE", profile)
    ruler = found(monkeypatch, card)
    assert [ruler.DEVICE.type, ruler.DEVICE_NAME, ruler.PROFILE] == expected


@pytest.mark.parametrize(
    ("lines", "name"), [("0\nmodel name\t: Xeon @ 2.7GHz\nfpu\n", "Xeon @ 2.7GHz"), ("0\n", "cpu")]
)
def test_a_cpu_is_named_by_its_model(monkeypatch, lines, name):
    """Scores of two CPUs compare no more than those of two GPUs."""
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **kw: read(path, **kw) if kw else lines)
    assert name == found(monkeypatch, None).DEVICE_NAME


LINUX, WSL = prepare.DRIVER_FILES


@pytest.mark.parametrize(
    ("card", "driver", "visible", "usable"),
    [
        (None, LINUX, None, False),
        (None, LINUX, "GPU-4f0c7f1a", False),
        (None, WSL, "0", False),
        (None, None, "0", True),
        (None, LINUX, "-1", True),
        (None, LINUX, "NoDevFiles", True),  # Slurm's, for a job without a GPU
        ("V100", LINUX, "0", False),
    ],
)
def test_a_gpu_may_be_hidden_but_not_unusable(monkeypatch, capsys, card, driver, visible, usable):
    """Nobody expects a night on the CPU of a GPU machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    exists = os.path.exists
    monkeypatch.setattr(
        os.path,
        "exists",
        lambda path: path == driver if path in prepare.DRIVER_FILES else exists(path),
    )
    if usable:
        assert found(monkeypatch, card).PROFILE == "small"
    else:
        sentence = refusal(capsys, found, monkeypatch, card)
        assert "torch cannot use the GPU here" in sentence and "CUDA_VISIBLE_DEVICES" in sentence


def test_peak_memory_is_torch_s_count_on_a_gpu_otherwise_the_process_s(monkeypatch):
    monkeypatch.setattr(prepare, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 700)
    assert prepare.peak_memory() == 700
    monkeypatch.setattr(prepare, "DEVICE", torch.device("cpu"))
    assert 2**26 < prepare.peak_memory() < 2**35
    monkeypatch.setattr(prepare.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=9))
    for platform, unit in (("linux", 1024), ("darwin", 1)):  # macOS counts bytes
        monkeypatch.setattr(sys, "platform", platform)
        assert prepare.peak_memory() == 9 * unit


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


@pytest.fixture
def clock(cache, monkeypatch, fresh_run, runs):
    """Returns a clock that the test sets. The run began at 90 s, its first batch came at 100 s."""
    clock = SimpleNamespace(now=90.0)
    monkeypatch.setattr(prepare, "_now", lambda: clock.now)
    prepare._imported = 90.0
    prepare.start()
    clock.now = fresh_run.began = 100.0
    fresh_run.served = 6000
    return clock


# ---- Start ----
def test_a_run_notes_once_what_runs_on_what(cache, fresh_run, runs, monkeypatch, capsys):
    assert prepare.start() == prepare.DEVICE
    commit = prepare.current_commit()
    monkeypatch.setattr(subprocess, "run", None)  # a later commit does not count
    next(prepare.make_dataloader(None, 4, 64))
    assert prepare.begin_run().manifest == prepare.load_manifest()
    assert prepare.current_commit() == commit
    said = capsys.readouterr().out
    assert said == f"run: small profile, 300 s, seed 42, commit {commit}, {prepare.DEVICE_NAME}\n"


def test_the_commit_is_that_of_git_or_of_the_environment(tmp_path, monkeypatch):
    """Of git in this folder, whatever repository the environment names."""
    monkeypatch.setattr(prepare, "current_commit", prepare.current_commit.__wrapped__)
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "prepare.py"))
    monkeypatch.delenv("AUTORESEARCH_COMMIT", raising=False)
    assert prepare.current_commit() == "none"
    monkeypatch.setenv("AUTORESEARCH_COMMIT", "abc1234")
    assert prepare.current_commit() == "abc1234"
    (tmp_path / "train.py").write_text("")
    commands = ["init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -qm one"]
    commands += ["tag start"]  # is not named instead
    for command in commands:
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    commit = prepare.current_commit()
    assert re.fullmatch("[0-9a-f]{7}", commit) and commit != "abc1234"
    (tmp_path / "run.log").write_text("")  # untracked
    assert prepare.current_commit() == commit
    (tmp_path / "train.py").write_text("edited")
    assert prepare.current_commit() == f"{commit}+dirty"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert prepare.current_commit() == "abc1234"


# ---- Flags ----
def made_up_run(run, startup, training, evaluation):
    """Fills in the moments of a run that took these seconds."""
    prepare._imported = 100.0 - startup
    run.began = 100.0
    run.ended = 100.0 + training
    run.scored = run.ended + evaluation


def test_each_flag_has_its_limit(fresh_run, monkeypatch):
    made_up_run(fresh_run, 299, 303.9, 299)
    assert prepare.find_flags() == "ok"
    made_up_run(fresh_run, 301, 304.1, 301)
    monkeypatch.setattr(prepare, "_opened", set("abc"))
    assert prepare.find_flags() == (
        "startup: 301.0 s, over 300; overtime: 304.1 s, over 304; evaluation: 301.0 s, over 300; "
        "opened: the run itself read a, b, c"
    )


def test_reading_the_rulers_files_is_flagged(cache, fresh_run, runs, tmp_path, monkeypatch):
    np.memmap(prepare.PREPARED / prepare.TOKENS_FILE, dtype="<u2", mode="r")  # before start
    prepare.start()
    np.save(tmp_path / prepare.ENDS_FILE, [1])  # a file of its own
    prepare.Tokenizer.from_directory()
    monkeypatch.chdir(prepare.PREPARED.parent)
    assert prepare._opened == {prepare.TOKENS_FILE}
    with open(f"small/../small/{prepare.ENDS_FILE}", "rb"):
        pass
    os.close(os.open(prepare.PREPARED / prepare.ROWS_FILE, os.O_RDONLY))
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


def test_evaluation_stops_the_clock_and_comes_once(own_cache, fresh_run, whole, runs, capsys):
    """It uses the files as they were at the start, whatever has become of them."""
    next(prepare.make_dataloader(None, 4, 64))
    table = prepare.Tokenizer.from_directory().token_bytes
    honest, _ = prepare.score(whole, prepare.begin_run().rows.copy(), table, 0)
    data = prepare.load_manifest()["data"]
    (prepare.PREPARED / prepare.ROWS_FILE).write_bytes(b"")
    (prepare.PREPARED / prepare.MANIFEST_FILE).write_text('{"data": "another"}')
    score = prepare.evaluate_bpb(whole, None, 32)
    assert score == pytest.approx(honest) and 1 < score < 20
    stopped = prepare.elapsed()
    assert prepare.elapsed() == stopped > 0 and not whole.training
    [record] = read_records(runs)
    assert (record["val_bpb"], record["data"]) == (score, data) and record["curve"] is None
    refused(capsys, whole, "once: ")
    assert read_records(runs) == [record]
    prepare.shutil.rmtree(runs)
    runs.touch()  # now the record cannot be written
    fresh_run.ended = None
    assert prepare.evaluate_bpb(whole, None, 32) == score
    out, err = capsys.readouterr()
    assert out.endswith("\nintegrity: opened: the run itself read val.u16\n")
    assert err.startswith("warning: ") and err.endswith("the score above has no record.\n")


def test_work_put_off_until_model_eval_is_training(cache, clock, whole, runs):
    """The clock stops once model.eval() has returned; what forward does later is evaluation."""

    def pass_time(*_):
        clock.now += 12

    whole.eval = pass_time
    whole.register_forward_pre_hook(pass_time)
    clock.now += 300
    prepare.evaluate_bpb(whole, None, 32)
    [record] = read_records(runs)
    assert record["training_seconds"] == pytest.approx(312)
    assert record["eval_seconds"] >= 12
    assert record["integrity"] == "overtime: 312.0 s, over 304"


def test_what_a_gpu_has_still_to_do_is_training(cache, clock, whole, runs, monkeypatch):
    monkeypatch.setattr(prepare, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: setattr(clock, "now", 112.0))
    monkeypatch.setattr(prepare, "score", lambda *arguments: (0.9, {}))
    monkeypatch.setattr(prepare, "peak_memory", lambda: 0)
    prepare.evaluate_bpb(whole, None, 32)
    assert read_records(runs)[0]["training_seconds"] == pytest.approx(12)


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


# ---- Progress ----
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


def test_the_block_says_what_the_record_says(clock, fresh_run, runs, capsys, monkeypatch):
    """Stats cannot override what prepare.py knows."""
    fresh_run.ended = 150.0
    fresh_run.scored = 155.0
    clock.now = 160.0
    fresh_run.losses[1] = [5.0]
    fresh_run.losses[3] = [3.0, 4.0]  # the others are interpolated
    stats = {"depth": 2, "mine": 'two: words, "quoted" #1', "rate": 0.0003, "betas": [0.8, "x"]}
    lies = dict.fromkeys(("val_bpb", "training_seconds", "seed", "total_tokens_M"), 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    told = prepare.report(1.2345678, stats | lies)
    prepare.print_block(told)
    prepare.write_record(told)
    [path] = runs.iterdir()
    record = json.loads(path.read_text())
    assert record["threads"] == 7
    block = parse_block(capsys.readouterr().out)
    assert list(block) == [*KEYS, *stats, "integrity"] == list(record)
    assert block["val_bpb"] == "1.234568" and block["rate"] == "0.0003"
    moment, *name = path.stem.split("_")
    assert re.fullmatch(r"\d{8}T\d{6}Z", moment)
    assert name == ["42", str(os.getpid())]
    assert record.pop("curve") == [5.0, 5.0, 4.25] + [3.5] * 7
    assert block.pop("curve") == "5.000 5.000 4.250" + " 3.500" * 7
    for key, text in block.items():
        assert text == str(record[key]) or float(text) == pytest.approx(record[key], rel=1e-4)
    expected = stats | {
        "val_bpb": 1.2345678,
        "training_seconds": 50,
        "total_seconds": 70,
        "startup_seconds": 10,
        "eval_seconds": 5,
        "total_tokens_M": 0.006,
        "tokens_per_second": 120,
        "profile": "small",
        "time_budget": 300,
        "seed": 42,
        "device": prepare.DEVICE_NAME,
        "integrity": "ok",
        "commit": prepare.current_commit(),
        "data": prepare.load_manifest()["data"],
        "torch": torch.__version__,
        "prepare": prepare.file_hash(prepare.__file__)[:8],
    }
    assert expected.items() <= record.items()
    assert 50 < record["peak_vram_mb"] < 20_000
