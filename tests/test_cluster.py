"""Tests cluster/: each script by itself, and a sweep on a one-node Slurm (marked `cluster`)."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.common import ROOT, edited, substitute, wait_until
from tests.test_tools import commit

import pytest

CLUSTER = ROOT / "cluster"

# Prints the environment that a task sets up, and exits with its seed.
FAKE_TRAIN = """
import json, os, sys
print(json.dumps(dict(os.environ)), flush=True)
sys.exit(int(os.environ["SEED"]))
"""


def call(*command, **environment):
    """Runs a command without the variables of an enclosing Slurm job."""
    outer = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=outer | environment,
        timeout=300,
    )


def parse(output):
    """Returns the rows of tasks and of commits, as dicts."""
    tables = []
    for table in output.split("\n\n"):
        names, *rows = (re.split(r"  +", line.strip()) for line in table.splitlines())
        tables.append([dict(zip(names, row)) for row in rows])
    return tables


@pytest.fixture
def repo(tmp_path):
    """Makes a folder with cluster/ and a .venv."""
    repo = tmp_path / "a repo"
    shutil.copytree(CLUSTER, repo / "cluster")
    (repo / ".venv").symlink_to(sys.prefix)
    return repo


# ---- One task ----
@pytest.fixture
def folder(tmp_path):
    """The folder of a sweep, whose first three tasks have the commit HEAD."""
    folder = tmp_path / "F"
    for name in ("status", "log", "runs"):
        (folder / name).mkdir(parents=True)
    tasks = [f"{i}\t{'HEAD' if i < 3 else 'b1'}\t{42 + i % 3}\n" for i in range(8)]
    (folder / "tasks.tsv").write_text("".join(tasks))
    return folder


def test_a_task_runs_a_clean_copy_and_passes_the_exit_code_on(repo, folder, tmp_path):
    (repo / "train.py").write_text(FAKE_TRAIN)
    commit(repo)
    (repo / "train.py").write_text("what is not committed does not run")
    own = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_PER_TASK": "5", "TMPDIR": str(folder)}
    (repo / ".venv").unlink()
    own |= {"UV_PROJECT_ENVIRONMENT": sys.prefix, "GIT_DIR": str(tmp_path / "another repository")}
    unset = "env -u CUDA_VISIBLE_DEVICES -u TORCHINDUCTOR_CACHE_DIR".split()
    done = call(*unset, "bash", repo / "cluster/slurm.sbatch", repo, folder, **own)
    assert done.returncode == 44 and not done.stderr
    assert (folder / "status/2.exit").read_text() == "44\n"
    told = json.loads(done.stdout)
    expected = {
        "SEED": "44",
        "AUTORESEARCH_COMMIT": "HEAD",
        "OMP_NUM_THREADS": "5",
        "CUDA_VISIBLE_DEVICES": "",
        "AUTORESEARCH_RUNS": f"{folder}/runs/2",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
    }
    assert expected.items() <= told.items()
    assert Path(told["TMPDIR"]).parent == folder
    assert not Path(told["TMPDIR"]).exists()


# ---- The table ----
def test_the_table_has_a_row_for_every_task(repo, folder, tmp_path):
    """Slurm's squeue still knows some of the tasks."""
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho '4 FAILED\n7 PENDING'\n")
    squeue.chmod(0o755)
    (folder / "job").write_text("7\n")
    for number, code in ((0, 0), (1, 0), (2, 0), (3, 4), (4, 143)):
        (folder / f"status/{number}.exit").write_text(f"{code}\n")
    late = "overtime: 305.0 s, over 304"
    record = {"num_steps": 100, "tokens_per_second": 1234.5, "device": "cpu", "data": "abc"}
    record |= {"attention": "blocks", "torch": "2.15.0", "time_budget": 20.0}
    for number, score in ((0, 1.0), (1, 1.1), (2, 1.2), (4, 1.3)):  # the last too late to count
        record |= {"val_bpb": score, "integrity": "ok" if number else late}
        (folder / f"runs/{number}").mkdir()
        (folder / f"runs/{number}/x.json").write_text(json.dumps(record))
    (folder / "log/6.log").touch()

    path = f"{tmp_path}:{os.environ['PATH']}"
    done = call(repo / "cluster/sweep.sh", "--collect", folder, PATH=path)
    assert done.returncode == 0, done.stderr
    tasks, commits = parse(done.stdout)
    shown = [" ".join(row[key] for key in ("task", "state", "exit", "val_bpb")) for row in tasks]
    assert shown == [
        "0 completed 0 1.000000",
        "1 completed 0 1.100000",
        "2 completed 0 1.200000",
        "3 failed 4 -",
        "4 cancelled 143 1.300000",
        "5 cancelled - -",  # it never began
        "6 killed - -",  # it left only a log
        "7 pending - -",
    ]
    assert list(tasks[0].values())[6:] == ["100", "1234", "cpu", late]
    values = "HEAD cpu blocks 2.15.0 20.0 abc 3 1 1.100000 0.100000"
    assert [list(row.values()) for row in commits] == [values.split()]


def test_a_record_of_a_foreign_train_py_has_a_row(repo, folder):
    """It names neither its steps nor its attention. uv's environment lies elsewhere."""
    (repo / ".venv").unlink()
    (folder / "status/0.exit").write_text("0\n")
    (folder / "runs/0").mkdir()
    record = {"val_bpb": 1.0, "tokens_per_second": 1234.5, "device": "cpu", "data": "abc"}
    record |= {"torch": "2.15.0", "time_budget": 20.0, "integrity": "ok"}
    (folder / "runs/0/x.json").write_text(json.dumps(record))
    script = repo / "cluster/sweep.sh"
    done = call(script, "--collect", folder, UV_PROJECT_ENVIRONMENT=sys.prefix)
    tasks, [row] = parse(done.stdout)
    assert list(tasks[0].values())[5:] == ["1.000000", "-", "1234", "cpu", "ok"]
    assert (row["attention"], row["mean"], row["std"]) == ("-", "1.000000", "-")


# ---- A real Slurm ----
@pytest.fixture
def say(tmp_path):
    """Returns a function that runs a command on this test's own Slurm, with a budget of 20 s."""
    script = ROOT / "tests/local_slurm.sh"
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    own = {"AUTORESEARCH_TIME_BUDGET": "20", "SLURM_CONF": str(folder / "slurm.conf")}
    try:
        subprocess.run([script, "start", folder], timeout=60, check=True)
        yield partial(call, **own)
    finally:
        subprocess.run([script, "stop", folder], timeout=120, check=True)
        shutil.rmtree(folder)


@pytest.mark.cluster
def test_a_sweep_on_a_real_slurm(repo, say, cache, tmp_path):
    """Runs two commits with three seeds, two tasks at a time with one core each. In the second
    commit seed 43 diverges. One task is cancelled, and four get a score."""
    shutil.copytree(edited(tmp_path / "code").parent, repo, dirs_exist_ok=True)
    first = commit(repo)
    source = (repo / "train.py").read_text()
    diverging = {"EMBEDDING_LR": 'float("nan") if SEED == 43 else 0.5'}
    (repo / "train.py").write_text(substitute(source, diverging))
    second = commit(repo)
    sweep = repo / "cluster/sweep.sh"
    folder = tmp_path / "a sweep"

    done = say(sweep, "-j", "2", folder, "HEAD~1", "HEAD", "--", "42", "43", "44")
    assert done.returncode == 0
    job = (folder / "job").read_text().strip()
    wait_until((folder / "log/1.log").exists, 30)
    tasks, _ = parse(say(sweep, "--collect", folder).stdout)
    assert [row["state"] for row in tasks] == ["running"] * 2 + ["pending"] * 4

    log = folder / "log/2.log"
    wait_until(lambda: log.exists() and "step" in log.read_text(), 120)  # while it trains
    say("scancel", f"{job}_2")
    done = say(sweep, "--wait", folder)
    assert done.returncode == 0
    tasks, commits = parse(done.stdout)
    shown = [" ".join(row[key] for key in ("commit", "seed", "state", "exit")) for row in tasks]
    assert shown == [
        f"{first} 42 completed 0",
        f"{first} 43 completed 0",
        f"{first} 44 cancelled 143",
        f"{second} 42 completed 0",
        f"{second} 43 failed 4",
        f"{second} 44 completed 0",
    ]
    for row in tasks:
        paths = list(folder.glob(f"runs/{row['task']}/*.json"))
        assert len(paths) == (row["state"] == "completed")
        for path in paths:
            record = json.loads(path.read_text())
            told = (record["commit"], str(record["seed"]), f"{record['val_bpb']:.6f}")
            assert told == (row["commit"], row["seed"], row["val_bpb"])
    found = [(row["commit"], row["finished"], row["std"] != "-") for row in commits]
    assert found == [(first, "2", True), (second, "2", True)]

    (folder / "job").unlink()  # once Slurm has forgotten the job, only the files are left
    assert parse(say(sweep, "--collect", folder).stdout) == [tasks, commits]
