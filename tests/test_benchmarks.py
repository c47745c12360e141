"""Runs the commands in benchmarks/ on tiny shapes: they print tables, and the methods that they
compare agree."""

import itertools
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import prepare
import train
from benchmarks import compare, leaks, overhead, sweep
from benchmarks.common import RunError
from tests.common import ROOT, TINY, edited, run_script

import numpy as np
import pytest
import torch

SETTING = [f"{name}={value}" for name, value in TINY.items()]


@pytest.fixture
def call(monkeypatch, capsys):
    """Returns a function that calls a function of a benchmark, or its main with arguments. It
    returns the rows of the tables, {first column: the others}, and all output."""

    def call_it(function, *args):
        if function.__name__ == "main":
            monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, args)])
            args = ()
        function(*args)
        output = capsys.readouterr().out
        lines = [line for line in output.splitlines() if line.startswith("| ")]
        rows = [line.strip("| ").split(" | ") for line in lines]
        return {row[0]: row[1:] for row in rows}, output

    return call_it


@pytest.fixture
def tiny(monkeypatch):
    """Gives train.py small knobs until the test ends, and the probes fewer rows, to save time."""
    monkeypatch.setattr(prepare, "PROBE_ROWS", 16)
    for name, value in TINY.items():
        monkeypatch.setattr(train, name, value.strip('"') if isinstance(value, str) else value)


# ---- nogpu.py ----
@pytest.mark.nogpu
def test_a_step_on_a_card_that_is_not_there(tmp_path):
    """It is traced, lowered and run on fake tensors without graph breaks, and torch's flash
    attention accepts its arguments. Its kernels are not compiled, to save time."""
    few_shapes = {"DEPTH": 1, "ASPECT_RATIO": 64, "HEAD_DIM": 64, "MLP_RATIO": 1}
    edited(tmp_path / "code", **few_shapes)
    shutil.copytree(ROOT / "benchmarks", tmp_path / "code/benchmarks")
    script = tmp_path / "code/benchmarks/nogpu.py"
    done = run_script(script, "sm_86", "--memory", 8, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert done.stdout.endswith("\nsm_86 (NVIDIA GeForce RTX 3060), 8 rows: ok\n")
    row = done.stdout.splitlines()[2].strip("| ").split(" | ")
    assert row[:3] == ["sm_86", "varlen", "8"] and row[4] == "0"
    assert int(row[5]) > 50 and [float(gib) for gib in row[6:]] == [0.04, 0.11]


# ---- Parts of prepare.py, steps ----
def test_the_parts_of_the_ruler(call, tiny, cache, fresh_run):
    table, _ = call(overhead.print_parts, 16, 1)
    for base, other in (
        ("linear scan", "pack_rows"),
        ("bare forward passes", "score"),
        ("one thread", "write_tokens"),
    ):
        assert table[base][1] == "1.00" and float(table[other][0]) > 0


def test_a_ratio_is_the_speed_over_that_of_the_first_way(call, monkeypatch):
    monkeypatch.setattr(overhead, "perf_counter", itertools.count().__next__)
    ways = {"base": lambda: 2000, "thrice": lambda: 6000}
    table, _ = call(overhead.print_ways, "way", ways, 2)
    assert (table["base"], table["thrice"]) == (["2", "1.00"], ["6", "3.00"])


def test_tokens_are_counted_alike(cache, tmp_path):
    one_thread, threads = overhead.tokenisation_ways(tmp_path).values()
    assert one_thread() == threads()


def test_steps_in_turn(call, monkeypatch):
    for name, module in (("prepare", prepare), ("train", train)):
        monkeypatch.setitem(sys.modules, name, module)  # so that they are restored
    one = f"{ROOT}:{','.join(SETTING)}"
    double = one.replace("TOTAL_BATCH_SIZE=2048", "TOTAL_BATCH_SIZE=4096")
    table, _ = call(compare.main, one, double, "--steps", 3)
    assert set(table) == {"train.py", one, double}
    assert table[one][2:] == ["1.000", "1.000 to 1.000"]
    for argument, tokens in ((one, 2048), (double, 4096)):
        step_ms, speed, ratio, low, high = map(float, re.findall(r"[\d.]+", str(table[argument])))
        assert low <= ratio <= high
        assert speed == pytest.approx(1000 * tokens / step_ms, rel=0.2)
        assert ratio == pytest.approx(speed / float(table[one][1]), rel=0.3)


def test_a_commit_stands_for_its_scripts(call, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in compare.SCRIPTS:
        Path(name).write_text(f"committed {name}")
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], check=True)
    Path("train.py").write_text("edited")
    place = compare.find_folder("HEAD", tmp_path / "place")
    for name in compare.SCRIPTS:
        assert (place / name).read_text() == f"committed {name}"
    with pytest.raises(SystemExit) as ended:
        call(compare.main, "--steps", 2, "HEAD", "bset:DEPTH=1", ".")
    assert ended.value.code == 2
    assert "error: bset is no folder or commit that holds a prepare.py" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call(compare.main, "--steps", 1, "HEAD")
    assert "error: a single step has no quartiles" in capsys.readouterr().err


# ---- Leaks ----
@pytest.mark.parametrize(
    ("leak", "seen"),
    [
        (leaks.none, []),
        (leaks.prefix(2), [[0, 0], [0, 1], [1, 0], [1, 1]]),
        (leaks.last(3), [[1, 2], [2, 3]]),
        (leaks.chunk(2), [[1, 2]]),
        (leaks.after(np.array([8])), [[0, 1], [2, 3]]),
    ],
)
def test_leaks_show_the_tokens_that_they_should(leak, seen):
    idx = torch.tensor([[8, 9, 8, 8]])
    assert leak(idx).view(4, 4).nonzero().tolist() == seen


def test_leaks_and_honest_models(call, tiny, cache, fresh_run, monkeypatch):
    for knob in ("SHORT_WINDOW", "LOGIT_SOFTCAP"):
        monkeypatch.setattr(train, knob, getattr(train, knob))
    data = prepare.load()
    some = data._replace(rows=data.rows[:16])  # to save time
    monkeypatch.setattr(prepare, "begin_run", lambda: some)
    options = ("--steps", 1, "--draws", 2)
    monkeypatch.setattr(prepare, "PROBE_PEAK", 1e-4)  # two steps teach little of a leak
    table, _ = call(leaks.main, "prefix of 96", *options, "--more", 2)
    assert table["none"][1:] == ["+0.0000", "0 of 2"]
    assert table["prefix of 96"][2] == "2 of 2"
    monkeypatch.setattr(leaks, "HONEST", [(2, torch.float32)])
    _, output = call(leaks.main, "--honest", *options)
    assert "| 2 | float32 | 0 of 2 | isolation: " in output
    table, _ = call(leaks.main, "--memory", "none", "last six", "--steps", 1, "--draws", 1)
    assert table["none"][1:] == ["0 of 1", "-"]
    assert table["last six"][1:] == ["1 of 1", "foresight 1"]


# ---- Whole runs ----
# Logs that it ran; one train.py fails with seed 43, another is flagged with seed 45.
FAKE = """
import json, os, pathlib, sys
script, seed, runs = sys.argv[0], os.environ.get("SEED", "none"), os.environ["AUTORESEARCH_RUNS"]
with open({log!r}, "a") as log:
    print(*pathlib.Path(script).parts[-2:], seed, file=log)
if seed == "43" and "after" in script:
    sys.exit("error: no luck")
record = dict.fromkeys("num_steps val_bpb startup_seconds eval_seconds peak_vram_mb".split(), 1)
record |= dict(training_seconds=0.01, integrity="ok", device="cpu")
if seed == "45" and "before" in script:
    record["integrity"] = "overtime"
record["tokens_per_second"] = 1250 if "after" in script else 1000
pathlib.Path(runs, "a.json").write_text(json.dumps(record))
"""


def test_runs_in_turn(call, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTORESEARCH_RUNS", str(tmp_path))
    for name in ("before/prepare.py", "before/train.py", "after/prepare.py", "after/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(FAKE.format(log=str(tmp_path / "log")))
    turns = (compare.SIDES, compare.SIDES[::-1])
    run = (tmp_path / "before", tmp_path / "after", "--seconds", 1, "--pairs", 4)
    table, output = call(compare.main, *run)
    assert (tmp_path / "log").read_text().splitlines() == [
        *(f"{side} {name}.py none" for side in compare.SIDES for name in ("prepare", "train")),
        *(f"{side} train.py {42 + pair}" for pair in range(4) for side in turns[pair % 2]),
    ]
    assert "exit 1: error: no luck" in output
    assert "2 pairs of 1 s" in output  # the second pair and the last are left out
    assert table["tokens_per_second"] == ["1000", "1250", "1.250", "1.250", "1.250"]


def test_a_sweep_edits_a_copy_of_train_py(call, monkeypatch):
    def run_training(folder, seconds, environment):
        source = Path(folder, "train.py").read_text()
        assert "    while (progress := step / 4) < 1:\n" in source
        depth = int(re.search(r"^DEPTH *= (\d)", source, re.M)[1])
        if depth == 3 and environment == {"SEED": 8}:
            raise RunError("exit 1: no luck")
        record = dict.fromkeys(sweep.COLUMNS, 1) | {"integrity": "ok", "seed": environment["SEED"]}
        return record | {"val_bpb": 0.6 * depth}

    monkeypatch.setattr(sweep, "run_training", run_training)
    settings = ("DEPTH=2 @0.5", "DEPTH=3 @0.5", "--steps", 8, "--seeds", 7, 8)
    rows = call(sweep.main, *settings)[1].splitlines()
    assert rows[3].startswith("| 1.2000 | 1.0000 |") and rows[3].endswith("| 8 | `DEPTH=2 @0.5` |")
    assert rows[4].startswith("| 1.8000 | 1.5000 |") and rows[4].endswith("| 7 | `DEPTH=3 @0.5` |")
    assert rows[5].startswith("| exit 1: no luck |")
    with pytest.raises(SystemExit, match="DEPHT=3: a setting is KNOB=value"):
        call(sweep.main, "", "DEPHT=3")


# ---- TPE ----
def test_tpe_searches_small_alone(monkeypatch):
    monkeypatch.setattr(prepare, "PROFILE", "full")
    with pytest.raises(SystemExit, match="the ranges are those of `small`"):
        sweep.search(Path("none.jsonl"), 1, 1)


def test_tpe_learns_and_goes_on(call, tmp_path, monkeypatch):
    """Needs optuna: `uv run --group tpe pytest -k tpe`, as .ci/run does."""
    pytest.importorskip("optuna")
    runs = []

    def run_idea(setting, seconds):
        runs.append(sweep.as_knobs(setting))
        off = math.log(runs[-1].get("MATRIX_LR", 0.02) / 0.05) ** 2
        line = {"setting": setting, "val_bpb": 0.9 + 0.1 * off, "integrity": "ok"}
        if len(runs) in (4, 13):
            line |= {"val_bpb": math.nan, "integrity": "exit 5: out of memory"}
        return line | {"num_steps": 100}

    monkeypatch.setattr(sweep, "run_idea", run_idea)
    whole, _ = call(sweep.main, "--tpe", 24, "--log", tmp_path / "whole.jsonl")
    assert runs[1:11] == [sweep.random_idea(number) for number in range(1, 11)]
    rates = [knobs.get("MATRIX_LR", 0.02) for knobs in runs]
    assert all(0.005 <= rate <= 0.08 for rate in rates)
    assert abs(math.log(np.median(rates[-6:]) / 0.05)) < abs(math.log(0.02 / 0.05)) / 2
    runs.clear()
    call(sweep.main, "--tpe", 14, "--log", tmp_path / "parts.jsonl")
    again, _ = call(sweep.main, "--tpe", 24, "--log", tmp_path / "parts.jsonl")
    assert again == whole and len(runs) == 25
