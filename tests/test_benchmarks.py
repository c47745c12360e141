"""The commands in benchmarks/ on tiny shapes: their tables are there, and what they compare is the same thing."""

import re
import sys

import prepare
import train
from benchmarks import attention, evaluate, loader, step
from tests.common import ROOT

import numpy as np
import pytest
import torch

TINY = "DEPTH=2 ASPECT_RATIO=32 HEAD_DIM=32 TOTAL_BATCH_SIZE=1024 DEVICE_BATCH_SIZE=2 WINDOW_PATTERN='SL'"


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls a benchmark's main with arguments, without compilation; returns its tables as {first column: the others}."""
    torch.compiler.set_stance("force_eager")

    def call(module, *args):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
        try:
            module.main()
        except SystemExit as end:
            assert end.code == 0
        found = [
            line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")
        ]
        return {row[0]: row[1:] for row in found}

    yield call
    torch.compiler.set_stance("default")


def test_loader(run, cache, fresh_run, monkeypatch):
    monkeypatch.setattr(loader.os, "cpu_count", lambda: 1)
    table = run(loader, "--rows", 8, "--tokens", 64, "--batches", 2, "--rounds", 1)
    assert {"linear scan, tokenised on the fly", "pack_rows, token cache", "make_dataloader", "1 processes"} < set(
        table
    )
    assert float(table["pack_rows, token cache"][0]) > 0


def test_the_loaders_baseline_packs_the_same_rows():
    rng = np.random.default_rng(0)
    documents = [np.full(rng.integers(1, 90), i, dtype=np.uint16) for i in range(300)]
    fast = [row.tolist() for row in prepare.pack_rows(documents, 33, 20)]
    assert fast[:40] == [row for row, _ in zip(loader.linear_rows(documents, 33, 20), range(40))]


def test_evaluate(run, monkeypatch):
    monkeypatch.setattr(train, "DEPTH", 1)
    table = run(evaluate, "--rows", 32, "--batch", 8, "--rounds", 1)
    assert float(table["bare forward passes"][2]) == 1 < float(table["evaluation without probes"][1].replace(",", ""))
    assert table["probes"][-1].endswith("% of the evaluation")


def test_attention(run):
    table = run(
        attention, "--rows", 1, "--tokens", 128, "--heads", 2, "--head-dim", 16, "--windows", 32, 128, "--rounds", 1
    )
    assert {"blocks", "sdpa"} <= set(table) and float(table["blocks"][-1]) < train.PROBE_TOLERANCE


@pytest.mark.parametrize("variant", ["plain", "as shipped"])
def test_step(variant, monkeypatch):
    for name in ("COMPILE", "ATTENTION", *(item.split("=")[0] for item in TINY.split())):
        monkeypatch.setattr(train, name, getattr(train, name))  # put back afterwards
    monkeypatch.setattr(train.GPT, "forward", train.GPT.forward)
    monkeypatch.setattr(train, "ctypes", train.ctypes)
    found = step.measure((*step.VARIANTS[variant], "compile"), TINY.split(), steps=2)
    assert found["tokens"] == 1024 and found["seconds"] >= found["forward"] > 0 and found["width"] == 64
    assert found["attention"] == ("sdpa" if variant == "plain" else "blocks")


def test_every_command_of_the_benchmarks_is_documented():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    assert {path.name for path in (ROOT / "benchmarks").glob("*.py")} == set(re.findall(r"benchmarks/(\w+\.py)", text))
