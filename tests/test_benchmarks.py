"""Runs the commands in benchmarks/ on tiny shapes: they print tables, and the methods that they
compare agree."""

import gc
import math
import re
import sys

import prepare
import train
from benchmarks import common, compare, leaks, overhead, protocol, step, sweep
from tests.common import ROOT, TINY

import numpy as np
import pytest
import torch

SETTING = [f"{name}={value}" for name, value in TINY.items()]


@pytest.fixture
def call(monkeypatch, capsys):
    """Returns a function that calls a benchmark's main without compilation and returns the rows of
    its tables, {first column: the others}, and all that it printed."""
    torch.compiler.set_stance("force_eager")

    def call_main(module, *args):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
        try:
            module.main()
        except SystemExit as end:
            assert end.code == 0, end.code
        output = capsys.readouterr().out
        lines = [line for line in output.splitlines() if line.startswith("| ")]
        rows = [line.strip("| ").split(" | ") for line in lines]
        return {row[0]: row[1:] for row in rows}, output

    yield call_main
    torch.compiler.set_stance("default")


@pytest.fixture
def tiny(monkeypatch):
    """Gives train.py small knobs until the test ends, and makes step.py use this train.py."""
    monkeypatch.setattr(step, "import_train", lambda: train)
    for name in TINY:
        monkeypatch.setattr(train, name, getattr(train, name))
    common.set_knobs(train, SETTING)
    monkeypatch.setattr(train, "tune_cpu", lambda: None)  # nothing undoes that
    monkeypatch.setattr(gc, "disable", lambda: None)


# ---- Parts of prepare.py, attention, steps ----
def test_the_parts_of_the_ruler(call, tiny, cache, fresh_run):
    table, output = call(overhead, "--runs", 0, "--rows", 16, "--rounds", 1)
    for base, other in (
        ("linear scan", "make_dataloader"),
        ("bare forward passes", "score, which is both"),
        ("one thread", "write_tokens"),
    ):
        assert table[base][1] == "1.00" and float(table[other][0]) > 0
    assert output.endswith("identical to the scan's: yes\n")


def test_attention(call, tiny, monkeypatch):
    def halved(q, k, v, window):
        return train.attend_sdpa(q, k, v, window // 2)

    monkeypatch.setattr(train, "MAX_SEQ_LEN", 128)
    monkeypatch.setattr(train, "SHORT_WINDOW", 64)
    monkeypatch.setitem(train.BACKENDS, "halved", lambda: halved)
    table, output = call(step, "--attention", "--steps", 1)
    assert float(table["blocks"][-1]) < train.ATTENTION_TOLERANCE < float(table["halved"][-1])
    assert table["sdpa"][2] == "1.00"
    assert "fa3: " in output  # why it does not load without a GPU


def test_where_the_time_of_a_step_goes(call, tiny, cache, fresh_run, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE", "")
    rows, out = call(step, "--steps", 2)
    del rows["part of a step"]
    for name in ("matmuls", "attention", "update: matmuls"):
        assert float(rows[name][0]) > 0, name
    assert sum(float(share) for _, share in rows.values()) == pytest.approx(1, abs=0.01)
    assert re.search(r"[0-9]+ tokens/s: [0-9]+ GFLOP/s by the model's count, 0\.[0-9]+ of", out)


def test_steps_in_turn(call, monkeypatch):
    for name, module in (("prepare", prepare), ("train", train)):
        monkeypatch.setitem(sys.modules, name, module)  # so that they are restored
    monkeypatch.setattr(gc, "disable", lambda: None)
    one = f"{ROOT}:{','.join(SETTING)}"
    double = one.replace("TOTAL_BATCH_SIZE=2048", "TOTAL_BATCH_SIZE=4096")
    table, _ = call(compare, one, double, "--steps", 3)
    assert set(table) == {"train.py", one, double}
    assert table[one][-1] == "1.000"
    for argument, tokens in ((one, 2048), (double, 4096)):
        step_ms, forward, backward, update, speed, _ = map(float, table[argument])
        assert step_ms >= max(forward, backward, update)
        assert speed == pytest.approx(1000 * tokens / step_ms, rel=0.2)


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
    monkeypatch.setattr(prepare, "PROBE_ROWS", 32)  # to save time
    options = ("--steps", 1, "--draws", 2, "--rows", 4)
    table, _ = call(leaks, "prefix of 8", *options, "--more", 2)
    assert table["none"][0] == table["prefix of 8"][0] == "2"
    assert table["none"][2:] == ["+0.0000", "0 of 2"]
    monkeypatch.setattr(leaks, "HONEST", [(3, torch.bfloat16)])
    _, output = call(leaks, "--honest", *options)
    assert "| 3 | bfloat16 | 0 of 2 | isolation: " in output


# ---- Whole runs ----
FAKE = """
import json, os, pathlib, sys
seed = os.environ.get("SEED", "none")
with open({log!r}, "a") as log:
    print({name!r}, pathlib.Path(__file__).name, seed, file=log)
if seed == "43" and {name!r} == "after":
    sys.exit("error: no luck")
record = dict(tokens_per_second=1000.0 if {name!r} == "before" else 1250.0, num_steps=10,
              val_bpb=1.0, startup_seconds=3.0, eval_seconds=2.0, training_seconds=0.01,
              peak_vram_mb=500.0, integrity="ok", data={name!r}, profile="small", device="cpu",
              torch="2")
pathlib.Path(os.environ["AUTORESEARCH_RUNS"], "a.json").write_text(json.dumps(record))
"""


@pytest.fixture
def fakes(tmp_path):
    """Makes two folders whose scripts log that they ran; one train.py fails with seed 43."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        source = FAKE.format(name=name, log=str(tmp_path / "log"))
        (tmp_path / name / "train.py").write_text(source)
        (tmp_path / name / "prepare.py").write_text(source.split("if seed")[0])
    return tmp_path


def test_runs_in_turn(call, fakes):
    caches = ("--cache", fakes / "one", fakes / "two")
    run = (fakes / "before", fakes / "after", "--seconds", 1, "--pairs", 3)
    table, output = call(compare, *run, *caches)
    log = (fakes / "log").read_text().splitlines()
    ready = ["before prepare.py none", "before train.py none"]
    assert log[:4] == ready + [line.replace("before", "after") for line in ready]
    seeds = (42, 43, 44)
    assert log[4:] == [f"{side} train.py {seed}" for seed in seeds for side in compare.SIDES]
    assert "exit 1: error: no luck" in output
    assert "2 pairs of 1 s" in output  # the second pair is left out
    assert table["tokens_per_second"] == ["1000", "1250", "1.250", "1.250", "1.250"]
    assert "data differs, before and after" in output


def test_a_sweep_by_steps_takes_that_many(call, cache):
    rows, _ = call(sweep, " ".join(SETTING), "--steps", 3, "--seeds", 7)
    *_, values = rows.values()
    assert values[1] == "3" and values[-2] == "7"


# ---- Random search ----
def test_random_search_keeps_what_is_lower_and_goes_on(call, tmp_path, monkeypatch):
    settings = []
    scores = [0.92, 0.90, 0.90, math.nan, 0.89, 0.95, 0.8]

    def run_knobs(knobs, seconds):
        settings.append(sweep.as_setting(knobs))
        return {"val_bpb": scores[(len(settings) - 1) % 7], "integrity": "ok", "num_steps": 100}

    monkeypatch.setattr(sweep, "run_knobs", run_knobs)
    log = ("--log", tmp_path / "a.jsonl")
    rows, _ = call(sweep, "--random", 3, *log)
    assert rows["1"][:3] == ["0.900000", "0.9783", "yes"]
    assert [rows[idea][2] for idea in "23"] == ["", ""]  # equal is not lower, nor is NaN
    again, out = call(sweep, "--random", 6, *log)
    assert len(settings) == 7 and {idea: again[idea] for idea in rows} == rows
    assert [again[idea][2] for idea in "456"] == ["yes", "", "yes"]
    assert out.rstrip().endswith(f"best: {again['6'][-1]}")
    for kept, idea in (("1", "2"), ("1", "3"), ("1", "4"), ("4", "5")):
        changed = set(again[idea][-1].split()) ^ set(again[kept][-1].split())
        knobs = {item.partition("=")[0] for item in changed}
        assert 1 <= len(knobs) <= 2


def test_positions_are_the_values_that_tpe_sees():
    rng = np.random.default_rng(0)
    for knob in list(sweep.RANGES) * 5:
        value = sweep.draw(knob, rng)
        assert sweep.at_position(knob, sweep.as_position(knob, value)) == value
    assert sweep.as_position("DEPTH", 8) == 6 and sweep.as_position("SHORT_WINDOW", 32) == 5


def test_tpe_learns_and_goes_on(call, tmp_path, monkeypatch):
    """Needs optuna: `uv run --group tpe pytest -k tpe`, as .ci/run does."""
    pytest.importorskip("optuna")
    runs = []

    def run_knobs(knobs, seconds):
        runs.append(knobs)
        assert sweep.as_knobs(sweep.as_setting(knobs)) == knobs
        off = math.log(knobs.get("MATRIX_LR", 0.02) / 0.05) ** 2
        integrity = "exit 5: out of memory" if len(runs) in (4, 13) else "ok"
        score = math.nan if integrity != "ok" else 0.9 + 0.1 * off
        return {"val_bpb": score, "integrity": integrity, "num_steps": 100}

    monkeypatch.setattr(sweep, "run_knobs", run_knobs)
    whole, _ = call(sweep, "--tpe", 24, "--log", tmp_path / "whole.jsonl")
    assert runs[1:11] == [sweep.random_idea({}, number) for number in range(1, 11)]
    rates = [knobs.get("MATRIX_LR", 0.02) for knobs in runs]
    assert all(0.005 <= rate <= 0.08 for rate in rates)
    assert abs(math.log(np.median(rates[-6:]) / 0.05)) < abs(math.log(0.02 / 0.05)) / 2
    runs.clear()
    call(sweep, "--tpe", 14, "--log", tmp_path / "parts.jsonl")
    again, _ = call(sweep, "--tpe", 24, "--log", tmp_path / "parts.jsonl")
    assert again == whole and len(runs) == 25


# ---- The simulated nights ----
@pytest.mark.parametrize(
    ("rule", "gains"),
    [
        (protocol.Rule(), [29.32, 57.85, 160.12, 29.93, 141.65, 121.01]),
        (protocol.ORIGINAL, [29.31, 57.59, 115.47, 26.07, 104.02, 54.27]),
    ],
)
def test_the_simulated_nights_stay_the_same(rule, gains):
    """Texts quote this simulation. With fewer than 30 nights, parts of the rule would not run."""
    for night, gain in zip(protocol.NIGHTS.values(), gains, strict=True):
        found = [protocol.true_gain(rule, night, number) for number in range(30)]
        assert np.mean(found) == pytest.approx(gain, abs=0.005)
