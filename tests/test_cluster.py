"""cluster/: the scripts by themselves, and, marked, a sweep on a real Slurm of one node that this starts and stops."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from test_end_to_end import edited

CLUSTER = ROOT / "cluster"
COLUMNS = "task commit seed state exit val_bpb steps tokens/s device integrity".split()
RECORD = {"num_steps": 100, "tokens_per_second": 1234.5, "device": "cpu", "time_budget": 20.0, "data": "abc"}
RECORD |= {"attention": "blocks", "torch": "2.15.0"}


def call(*command, cwd=None, **environment):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")} | environment
    command = [str(part) for part in command]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


def git(folder, *arguments):
    who = ("-c", "user.name=tests", "-c", "user.email=tests@example.com", "-c", "commit.gpgsign=false")
    done = call("git", *who, "-C", folder, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def parse(output):
    """(rows of the tasks, rows of the commits) of a collected table, columns as in its heading."""
    tables = []
    for text in output.split("\n\n"):
        heading, *lines = text.splitlines()
        starts = [i for i, c in enumerate(heading) if c != " " and (i == 0 or heading[i - 1] == " ")]
        cuts = list(zip(starts, [*starts[1:], None]))
        tables.append([{heading[a:b].strip(): line[a:b].strip() for a, b in cuts} for line in lines])
    return tables


@pytest.fixture
def checkout(tmp_path):
    """A repository with cluster/ and a train.py that exits with its seed, or sleeps until a signal where that is 60."""
    repo = tmp_path / "a repo"
    shutil.copytree(CLUSTER, repo / "cluster")
    (repo / ".venv").symlink_to(sys.prefix)
    (repo / "train.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "names = 'SEED AUTORESEARCH_COMMIT OMP_NUM_THREADS CUDA_VISIBLE_DEVICES AUTORESEARCH_RUNS '\n"
        "names = (names + 'TORCHINDUCTOR_CACHE_DIR TMPDIR').split()\n"
        "print(*[os.environ[name] for name in names], pathlib.Path.cwd(), sep='\\n', flush=True)\n"
        "time.sleep(30 * (os.environ['SEED'] == '60')), sys.exit(int(os.environ['SEED']))\n"
    )
    git(repo, "init", "-q")
    git(repo, "add", "train.py")
    git(repo, "commit", "-qm", "one")
    return repo


@pytest.fixture
def queue(tmp_path):
    """An environment in which sbatch writes down how it was called and answers with a job id, and squeue knows none."""
    (tmp_path / "bin").mkdir()
    for name, text in {
        "sbatch": f'printf "%s\\n" "$@" >"{tmp_path}/called"; echo "7;here"',
        "squeue": 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


@pytest.mark.parametrize("name", ["slurm.sbatch", "sweep.sh", "local_slurm.sh"])
def test_scripts_are_bash(name):
    done = call("bash", "-n", CLUSTER / name)
    assert done.returncode == 0 and not done.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("sweep.sh", [], "the first argument is the sweep's folder"),
        ("sweep.sh", ["--", "42"], "the first argument is the sweep's folder"),
        ("sweep.sh", ["-j", "two", "F", "HEAD", "--", "42"], "not 'two'"),
        ("sweep.sh", ["F", "no such commit", "--", "42"], "'no such commit' is no commit"),
        ("sweep.sh", ["F", "HEAD"], "give commits, then --, then seeds"),
        ("sweep.sh", ["F", "HEAD", "--", "4x"], "'4x' is no seed"),
        ("sweep.sh", ["--collect"], "takes one folder"),
        ("sweep.sh", ["--collect", "F"], "F holds no tasks.tsv"),
        ("sweep.sh", ["--wait", "F"], "F holds no tasks.tsv"),
        ("local_slurm.sh", ["begin", "F"], "start|stop DIR"),
    ],
)
def test_usage_errors_are_one_sentence(script, arguments, message, checkout, tmp_path):
    done = call(checkout / "cluster" / script, *arguments, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout and not (tmp_path / "F").exists()
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_submitting_writes_down_every_commit_with_every_seed(checkout, queue, tmp_path):
    commit, folder = git(checkout, "rev-parse", "--short", "HEAD"), tmp_path / "100 %a"
    command = (checkout / "cluster/sweep.sh", "-j", "2", folder, "HEAD", commit, "--", "42", "43", "--", "--gres=gpu:1")
    done = call(*command, **queue)
    assert done.returncode == 0, done.stderr
    assert "job 7: 4 tasks" in done.stdout and (folder / "job").read_text() == "7\n"
    assert (folder / "tasks.tsv").read_text() == "".join(f"{i}\t{commit}\t{42 + i % 2}\n" for i in range(4))
    script = checkout / "cluster/slurm.sbatch"
    assert (tmp_path / "called").read_text().splitlines() == [
        *("--parsable", "--array=0-3%2", f"--output={tmp_path}/100 %%a/log/%a.log", "--gres=gpu:1"),
        *map(str, (script, checkout, folder)),
    ]
    again = call(*command, **queue)
    assert again.returncode == 2 and "holds a sweep already" in again.stderr


def task(checkout, folder, seed, **environment):
    """slurm.sbatch as Slurm starts it, for task 3 of four."""
    for name in ("status", "runs"):
        (folder / name).mkdir(parents=True)
    (folder / "tasks.tsv").write_text("".join(f"{i}\tHEAD\t{seed if i == 3 else 99}\n" for i in range(4)))
    environment |= {"SLURM_ARRAY_TASK_ID": "3", "TMPDIR": str(folder), "AUTORESEARCH_CACHE": "/not/writable"}
    unset = ("CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR")  # torch sets the latter in a process that has compiled
    environment = {key: value for key, value in os.environ.items() if key not in unset} | environment
    command = ["bash", checkout / "cluster/slurm.sbatch", checkout, folder]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_task_runs_a_clean_copy_and_passes_the_exit_code_on(checkout, tmp_path):
    (checkout / "train.py").write_text("what is not committed does not run")
    process = task(checkout, tmp_path / "F", 4, SLURM_CPUS_PER_TASK="5")
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 4 and not stderr and (tmp_path / "F/status/3.exit").read_text() == "4\n"
    *variables, runs, inductor, temporary, folder = stdout.splitlines()
    assert variables == ["4", "HEAD", "5", ""]
    assert (runs, inductor) == (f"{tmp_path}/F/runs/3", f"{tmp_path}/F/inductor")
    assert temporary == folder and Path(folder).parent == tmp_path / "F" and not Path(folder).exists()


def test_a_task_that_gets_a_signal_ends_its_run_first(checkout, tmp_path):
    process = task(checkout, tmp_path / "F", 60, CUDA_VISIBLE_DEVICES="6")
    lines = [process.stdout.readline().strip() for _ in range(8)]  # now it runs
    process.terminate()  # bash alone, as at a time limit
    assert process.wait(timeout=10) == 143 and lines[3] == "6" and not Path(lines[-1]).exists()
    assert (tmp_path / "F/status/3.exit").read_text() == "143\n"
    process.communicate()


def test_the_table_has_a_row_for_every_task(checkout, tmp_path, queue):
    for name in ("status", "log", "runs"):
        (tmp_path / "F" / name).mkdir(parents=True)
    ends = [0, 0, 0, 4, 143, None, None, None, 0, None, None]
    (tmp_path / "F/job").write_text("7\n")
    (tmp_path / "bin/squeue").write_text(
        "#!/bin/sh\necho 4 FAILED; echo 7 PENDING; echo 8 COMPLETING; echo 9 NODE_FAIL; echo 10 FAILED\n"
    )
    (tmp_path / "F/tasks.tsv").write_text("".join(f"{i}\t{'ab'[i > 2]}1\t{42 + i % 3}\n" for i in range(len(ends))))
    for i, end in enumerate(ends):
        if end is not None:
            (tmp_path / f"F/status/{i}.exit").write_text(f"{end}\n")
        if i not in (5, 7):
            (tmp_path / f"F/log/{i}.log").touch()
        if i < 3:
            (tmp_path / f"F/runs/{i}").mkdir()
            record = RECORD | {"val_bpb": 1 + i / 10, "integrity": "ok" if i else "unsteady: 2 tokens/s, then 1"}
            (tmp_path / f"F/runs/{i}/x.json").write_text(json.dumps(record))
    done = call(checkout / "cluster/sweep.sh", "--collect", tmp_path / "F", **queue)
    assert done.returncode == 0, done.stderr
    tasks, commits = parse(done.stdout)
    assert list(tasks[0]) == COLUMNS and [row["task"] for row in tasks] == [str(i) for i in range(len(ends))]
    states = ["completed"] * 3 + [
        "failed",
        "cancelled",
        "cancelled",
        "killed",
        "pending",
        "completed",
        "node_fail",
        "killed",
    ]
    assert [row["state"] for row in tasks] == states  # 5 never began, 6 left a log only, 8 left no record
    assert [row["exit"] for row in tasks] == ["-" if end is None else str(end) for end in ends]
    assert [row["val_bpb"] for row in tasks] == ["1.000000", "1.100000", "1.200000"] + ["-"] * 8
    assert list(tasks[0].values())[-4:] == ["100", "1234", "cpu", "unsteady: 2 tokens/s, then 1"]
    expected = ["a1", "cpu", "blocks", "2.15.0", "20 s", "abc", "3", "1", "1.100000", "0.100000"]
    assert [list(row.values()) for row in commits] == [expected]


def test_the_skypilot_task_has_its_parts():
    part = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert {"setup", "run", "resources", "envs", "file_mounts"} <= set(part)
    assert "prepare.py" in part["setup"] and "prepare.py" not in part["run"]
    assert part["run"].strip().splitlines()[-1].endswith("train.py")  # the last command's exit code is the task's
    assert part["envs"]["AUTORESEARCH_CACHE"] in part["file_mounts"]


# ---- A real Slurm ----------------------------------------------------------------------------------------------------
def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.5)


@pytest.fixture
def slurm():
    """The environment of a Slurm that runs for the length of a test."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        done = subprocess.run([CLUSTER / "local_slurm.sh", "start", folder], timeout=60)
        assert done.returncode == 0
        yield {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([CLUSTER / "local_slurm.sh", "stop", folder], timeout=120, check=True)
        shutil.rmtree(folder)


@pytest.mark.cluster
def test_a_sweep_on_a_real_slurm(slurm, cache, tmp_path, capfd):
    """Two commits, three seeds, two at a time with one core each: one diverges, one is cancelled, four have a score."""
    repo, folder = tmp_path / "repo", tmp_path / "a sweep"
    edited(repo)
    shutil.copytree(CLUSTER, repo / "cluster")
    (repo / ".venv").symlink_to(sys.prefix)
    git(repo, "init", "-q")
    git(repo, "add", "train.py", "prepare.py")
    git(repo, "commit", "-qm", "tiny")
    source = (repo / "train.py").read_text()
    changed = source.replace("EMBEDDING_LR     = 0.6", 'EMBEDDING_LR     = float("nan") if SEED == 43 else 0.5')
    assert changed != source
    (repo / "train.py").write_text(changed)
    git(repo, "commit", "-qam", "seed 43 diverges")
    first, second = git(repo, "rev-parse", "--short", "HEAD~1"), git(repo, "rev-parse", "--short", "HEAD")

    def say(*command):
        done = call(*command, AUTORESEARCH_TIME_BUDGET="20", **slurm)
        with capfd.disabled():
            print(f"$ {' '.join(map(str, command))}\n{done.stdout}{done.stderr}", flush=True)
        return done

    sweep = repo / "cluster/sweep.sh"
    assert say(sweep, "-j", "2", folder, "HEAD~1", "HEAD", "--", "42", "43", "44").returncode == 0
    job, log = (folder / "job").read_text().strip(), folder / "log/2.log"
    until(lambda: (folder / "log/1.log").exists(), 30)
    say("squeue", "-r")
    assert [row["state"] for row in parse(say(sweep, "--collect", folder).stdout)[0]] == ["running"] * 2 + [
        "pending"
    ] * 4
    until(lambda: log.exists() and "step" in log.read_text(), 120)  # in the middle of its training
    say("scancel", f"{job}_2")
    done = say(sweep, "--wait", folder)
    assert done.returncode == 0
    tasks, commits = parse(done.stdout)
    assert [(row["commit"], row["seed"]) for row in tasks] == [
        (c, s) for c in (first, second) for s in ("42", "43", "44")
    ]
    ended = {"completed": "0", "failed": "4", "cancelled": "143"}
    states = ["completed", "completed", "cancelled", "completed", "failed", "completed"]
    assert [(row["state"], row["exit"]) for row in tasks] == [(state, ended[state]) for state in states]
    for i, (row, state) in enumerate(zip(tasks, states)):
        known = say("scontrol", "-o", "show", "job", f"{job}_{i}").stdout
        assert f"JobState={state.upper()} " in known and f"ExitCode={ended[state]}:0 " in known
        records = [json.loads(path.read_text()) for path in folder.glob(f"runs/{i}/*.json")]
        assert len(records) == (state == "completed")
        for record in records:
            assert (record["commit"], str(record["seed"]), record["time_budget"]) == (row["commit"], row["seed"], 20)
            assert row["val_bpb"] == f"{record['val_bpb']:.6f}" and int(row["steps"]) > 10 and row["device"] == "cpu"
    assert [(row["commit"], row["finished"], row["std"] != "-") for row in commits] == [
        (first, "2", True),
        (second, "2", True),
    ]
    (folder / "job").unlink()  # what the files alone tell, once Slurm has forgotten
    assert parse(say(sweep, "--collect", folder).stdout) == [tasks, commits]
