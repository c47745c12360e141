"""tools/rerun.py trains a commit in a clean copy."""

import json
import os
import shutil
import signal
import subprocess
import sys

import prepare
from tests.common import LITTLE, ROOT, run_script
from tools import rerun

import pytest

# A train.py that takes no time and lists the places where an earlier run has left a file.
FAKE = """
import json, os, sys, time
from pathlib import Path
cache = Path(os.environ["AUTORESEARCH_CACHE"])
places = [Path(), cache, cache / "small", Path.home(), Path(os.environ["TMPDIR"])]
found = [str(place) for place in places if (place / "kept").exists()]
for place in places:
    (place / "kept").touch()
names = ("SEED", "AUTORESEARCH_COMMIT", "AUTORESEARCH_RUNS", "PYTHONPATH")
record = {name: os.environ.get(name) for name in names} | {"found": found}
print("it runs", os.getpid(), flush=True)
time.sleep(float(os.environ.get("SLEEP", 0)))
(cache / "runs").mkdir()
(cache / "runs" / "one.json").write_text(json.dumps(record))
sys.exit(5)
"""


def commit(folder):
    """Turns a folder into a repository; returns the hash of its only commit."""
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (folder / ".gitignore").write_text("__pycache__/\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    return subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()


@pytest.fixture
def night(own_cache, tmp_path, monkeypatch):
    """Commits the fake train.py in a folder; sets up what earlier runs and a shell leave behind."""
    folder = tmp_path / "a night"
    shutil.copytree(ROOT / "tools", folder / "tools")
    shutil.copy(ROOT / "prepare.py", folder)
    (folder / "train.py").write_text(FAKE)
    commit(folder)
    for place in (folder, own_cache, own_cache / "small"):
        (place / "kept").touch()
    monkeypatch.setattr(prepare, "__file__", str(folder / "prepare.py"))
    monkeypatch.setattr(prepare, "RUNS", tmp_path / "runs")
    monkeypatch.setenv("AUTORESEARCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SEED", "100")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return folder


def test_a_rerun_finds_nothing_that_an_earlier_run_left(night, capfd):
    """Its record goes to the others, its exit code to the caller, and nothing else stays."""
    before = sorted(night.parent.rglob("*"))
    with pytest.raises(SystemExit, match="5"):
        rerun.main("HEAD")
    [path] = prepare.RUNS.iterdir()
    record = json.loads(path.read_text())
    assert record["found"] == []
    assert record["SEED"] == "100" and len(record["AUTORESEARCH_COMMIT"]) == 7
    assert record["AUTORESEARCH_RUNS"] is None and record["PYTHONPATH"] is None
    assert sorted(night.parent.rglob("*")) == sorted([*before, prepare.RUNS, path])


def test_a_rerun_is_the_only_run_of_its_folder_and_takes_its_run_along(night, capsys):
    with pytest.raises(SystemExit, match="2"):
        rerun.main("nonsense")
    assert capsys.readouterr().err == "error: bad revision 'nonsense'\n"
    command = [sys.executable, "tools/rerun.py", "HEAD"]
    pipes = {"env": os.environ | {"SLEEP": "60"}, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=night, **pipes) as process:
        said, _, run = process.stdout.readline().rpartition(" ")
        assert said == "it runs"
        with pytest.raises(SystemExit, match="2"):
            rerun.main("HEAD")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.startswith("error: this folder has a run already; ")
    assert not os.path.exists(f"/proc/{run.strip()}")
    assert not list(night.parent.glob("autoresearch-rerun-*"))


def test_a_clone_of_another_user_is_refused_in_the_words_of_git(night, monkeypatch, capsys):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(SystemExit, match="2"):
        rerun.main("HEAD")
    assert capsys.readouterr().err.startswith("error: detected dubious ownership in repository")


def test_a_rerun_gets_a_score_of_the_commit(night, cache):
    (night / "train.py").write_text(LITTLE)
    name = commit(night)
    (night / "train.py").write_text("what is not committed does not count")
    done = run_script("tools/rerun.py", "HEAD", cwd=night, stdin="go on\n")
    assert done.returncode == 0, done.output
    [record] = [json.loads(path.read_text()) for path in prepare.RUNS.iterdir()]
    assert record["commit"] == name and record["seed"] == 100
    assert f"\nval_bpb: {record['val_bpb']:.6f}\n" in done.stdout
