"""cluster/: each script by itself, and a sweep on a real Slurm of one node (marked `cluster`)."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.common import ROOT, edited, substitute

import pytest

CLUSTER = ROOT / "cluster"

# The part of a run's record that the table shows or compares by.
RECORD = {
    "num_steps": 100,
    "tokens_per_second": 1234.5,
    "device": "cpu",
    "attention": "blocks",
    "torch": "2.15.0",
    "time_budget": 20.0,
    "data": "abc",
}

# Prints what a task sets up, one thing per line, and exits with its seed.
FAKE_TRAIN = """
import os, sys

for name in (
    "SEED", "AUTORESEARCH_COMMIT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "AUTORESEARCH_RUNS", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR",
):
    print(os.environ.get(name))
print(os.getcwd(), flush=True)
sys.exit(int(os.environ["SEED"]))
"""


def call(*command, cwd=None, **environment):
    """A finished command. A Slurm that these tests may themselves run in stays out of it."""
    outer = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=outer | environment,
        timeout=300,
    )


def git(folder, *arguments):
    command = ["git", "-C", folder]
    command += ["-c", "user.name=tests", "-c", "user.email=tests@example.com"]
    command += ["-c", "commit.gpgsign=false"]
    done = call(*command, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def parse(output):
    """The rows of the tasks and those of the commits, each a dict."""
    tables = []
    for table in output.split("\n\n"):
        names, *rows = (re.split(r"  +", line.strip()) for line in table.splitlines())
        tables.append([dict(zip(names, row)) for row in rows])
    return tables


@pytest.fixture
def checkout(tmp_path):
    """A repository with cluster/, an environment, and FAKE_TRAIN as its train.py."""
    repo = tmp_path / "a repo"
    shutil.copytree(CLUSTER, repo / "cluster")
    (repo / ".venv").symlink_to(sys.prefix)
    (repo / "train.py").write_text(FAKE_TRAIN)
    git(repo, "init", "-q")
    git(repo, "add", "train.py")
    git(repo, "commit", "-qm", "one")
    return repo


@pytest.fixture
def queue(tmp_path):
    """The environment of a Slurm whose squeue knows some of the tasks."""
    known = ["4 FAILED", "7 PENDING", "8 COMPLETING"]
    write_program(tmp_path / "bin/squeue", "\n".join(f"echo {line}" for line in known))
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


# ---- One task ----
def start_task(checkout, folder, seed, **environment):
    """slurm.sbatch as Slurm starts it, for task 3 of four. The others have another seed."""
    (folder / "status").mkdir(parents=True)
    (folder / "runs").mkdir()
    lines = [f"{number}\tHEAD\t{seed if number == 3 else 99}\n" for number in range(4)]
    (folder / "tasks.tsv").write_text("".join(lines))
    merged = dict(os.environ)
    merged.pop("CUDA_VISIBLE_DEVICES", None)
    merged.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it in a process that has compiled
    merged["SLURM_ARRAY_TASK_ID"] = "3"
    merged["TMPDIR"] = str(folder)
    return subprocess.Popen(
        ["bash", checkout / "cluster/slurm.sbatch", checkout, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=merged | environment,
    )


def test_a_task_runs_a_clean_copy_and_passes_the_exit_code_on(checkout, tmp_path):
    (checkout / "train.py").write_text("what is not committed does not run")
    process = start_task(checkout, tmp_path / "F", 4, SLURM_CPUS_PER_TASK="5")
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 4
    assert not stderr
    assert (tmp_path / "F/status/3.exit").read_text() == "4\n"

    seed, commit, threads, devices, runs, inductor, temporary, folder = stdout.splitlines()
    assert seed == "4"
    assert commit == "HEAD"
    assert threads == "5"
    assert devices == ""
    assert runs == f"{tmp_path}/F/runs/3"
    assert inductor == f"{tmp_path}/F/inductor"
    assert temporary == folder
    assert Path(folder).parent == tmp_path / "F"
    assert not Path(folder).exists()


# ---- The table ----
def write_task(folder, number, exit_code=None, log=True, **record):
    """What a task leaves in its sweep's folder. Tasks 0 to 2 are of commit a1, others of b1."""
    commit = "a1" if number < 3 else "b1"
    seed = 42 + number % 3
    with (folder / "tasks.tsv").open("a") as file:
        file.write(f"{number}\t{commit}\t{seed}\n")
    if exit_code is not None:
        (folder / f"status/{number}.exit").write_text(f"{exit_code}\n")
    if log:
        (folder / f"log/{number}.log").touch()
    if record:
        (folder / f"runs/{number}").mkdir()
        (folder / f"runs/{number}/x.json").write_text(json.dumps(RECORD | record))


def test_the_table_has_a_row_for_every_task(checkout, tmp_path, queue):
    folder = tmp_path / "F"
    for name in ("status", "log", "runs"):
        (folder / name).mkdir(parents=True)
    (folder / "job").write_text("7\n")
    unsteady = "unsteady: 2 tokens/s, then 1"
    write_task(folder, 0, exit_code=0, val_bpb=1.0, integrity=unsteady)
    write_task(folder, 1, exit_code=0, val_bpb=1.1, integrity="ok")
    write_task(folder, 2, exit_code=0, val_bpb=1.2, integrity="ok")
    write_task(folder, 3, exit_code=4)
    write_task(folder, 4, exit_code=143, val_bpb=1.3, integrity="ok")  # too late to count
    write_task(folder, 5, log=False)  # never began
    write_task(folder, 6)  # left only a log
    write_task(folder, 7, log=False)
    write_task(folder, 8, exit_code=0)  # left no record

    done = call(checkout / "cluster/sweep.sh", "--collect", folder, **queue)
    assert done.returncode == 0, done.stderr
    tasks, commits = parse(done.stdout)
    columns = ("task", "state", "exit", "val_bpb")
    assert [tuple(row[column] for column in columns) for row in tasks] == [
        ("0", "completed", "0", "1.000000"),
        ("1", "completed", "0", "1.100000"),
        ("2", "completed", "0", "1.200000"),
        ("3", "failed", "4", "-"),
        ("4", "cancelled", "143", "1.300000"),
        ("5", "cancelled", "-", "-"),
        ("6", "killed", "-", "-"),
        ("7", "pending", "-", "-"),
        ("8", "completed", "0", "-"),
    ]
    assert list(tasks[0].values())[6:] == ["100", "1234", "cpu", unsteady]

    values = "a1 cpu blocks 2.15.0 20_s abc 3 1 1.100000 0.100000".split()
    assert [list(row.values()) for row in commits] == [[v.replace("_", " ") for v in values]]


# ---- A real Slurm ----
def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.5)


@pytest.fixture
def slurm():
    """The environment of a Slurm that runs for the length of a test."""
    script = CLUSTER / "local_slurm.sh"
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        done = subprocess.run([script, "start", folder], timeout=60)
        assert done.returncode == 0
        yield {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([script, "stop", folder], timeout=120, check=True)
        shutil.rmtree(folder)


@pytest.fixture
def say(slurm, capfd):
    """Runs a command on that Slurm, with runs of 20 seconds, and prints what it answers."""

    def run_command(*command):
        done = call(*command, AUTORESEARCH_TIME_BUDGET="20", **slurm)
        with capfd.disabled():
            print(f"$ {' '.join(map(str, command))}\n{done.stdout}{done.stderr}", flush=True)
        return done

    return run_command


@pytest.fixture
def two_commits(tmp_path):
    """A repository with a tiny model. In its last commit seed 43 diverges."""
    repo = tmp_path / "repo"
    edited(repo)
    shutil.copytree(CLUSTER, repo / "cluster")
    (repo / ".venv").symlink_to(sys.prefix)
    git(repo, "init", "-q")
    git(repo, "add", "train.py", "prepare.py")
    git(repo, "commit", "-qm", "tiny")
    source = (repo / "train.py").read_text()
    diverging = substitute(source, {"EMBEDDING_LR": 'float("nan") if SEED == 43 else 0.5'})
    assert diverging != source
    (repo / "train.py").write_text(diverging)
    git(repo, "commit", "-qam", "seed 43 diverges")
    return repo


@pytest.mark.cluster
def test_a_sweep_on_a_real_slurm(two_commits, say, cache, tmp_path):
    """Two commits with three seeds, two tasks at a time with one core each. One task diverges, one
    is cancelled, and four have a score."""
    repo = two_commits
    sweep = repo / "cluster/sweep.sh"
    folder = tmp_path / "a sweep"
    first = git(repo, "rev-parse", "--short", "HEAD~1")
    second = git(repo, "rev-parse", "--short", "HEAD")

    done = say(sweep, "-j", "2", folder, "HEAD~1", "HEAD", "--", "42", "43", "44")
    assert done.returncode == 0
    job = (folder / "job").read_text().strip()
    wait_until((folder / "log/1.log").exists, 30)
    say("squeue", "-r")
    tasks, _ = parse(say(sweep, "--collect", folder).stdout)
    assert [row["state"] for row in tasks] == ["running"] * 2 + ["pending"] * 4

    log = folder / "log/2.log"
    wait_until(lambda: log.exists() and "step" in log.read_text(), 120)  # amid its training
    say("scancel", f"{job}_2")
    done = say(sweep, "--wait", folder)
    assert done.returncode == 0
    tasks, commits = parse(done.stdout)
    columns = ("commit", "seed", "state", "exit")
    assert [tuple(row[column] for column in columns) for row in tasks] == [
        (first, "42", "completed", "0"),
        (first, "43", "completed", "0"),
        (first, "44", "cancelled", "143"),
        (second, "42", "completed", "0"),
        (second, "43", "failed", "4"),
        (second, "44", "completed", "0"),
    ]
    for row in tasks:
        paths = list(folder.glob(f"runs/{row['task']}/*.json"))
        assert len(paths) == (row["state"] == "completed")
        for path in paths:
            record = json.loads(path.read_text())
            told = (record["commit"], str(record["seed"]), f"{record['val_bpb']:.6f}")
            assert told == (row["commit"], row["seed"], row["val_bpb"])
            assert record["time_budget"] == 20 and int(row["steps"]) > 10

    assert [row["commit"] for row in commits] == [first, second]
    for row in commits:
        assert row["finished"] == "2"
        assert row["std"] != "-"

    (folder / "job").unlink()  # what the files alone tell, once Slurm has forgotten
    assert parse(say(sweep, "--collect", folder).stdout) == [tasks, commits]
