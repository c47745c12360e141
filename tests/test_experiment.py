"""tools/experiment.py carries out a night, whatever interrupts it."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.common import ROOT, run_script
from tools import experiment

import pytest

# Takes SLEEP seconds, or as long as the file HOLD is there, and has the score of the idea.
TRAIN = """
import os, sys, time
IDEA, SCORE = "baseline", 0.9
print("run: small profile", flush=True)
time.sleep(float(os.environ.get("SLEEP", 0)))
end = time.monotonic() + 60
while os.path.exists(os.environ.get("HOLD", "")) and time.monotonic() < end:
    time.sleep(0.02)
print("step 7 50% loss 3.0", flush=True)
if isinstance(SCORE, str):
    sys.exit(int(SCORE))
with open(os.environ.get("TRAINED", os.devnull), "a") as file:
    print(IDEA, file=file)
block = {"val_bpb": f"{SCORE:.6f}", "tokens_per_second": os.environ.get("SPEED", 18000)}
block |= {"num_steps": 10, "peak_vram_mb": 1024.0, "curve": "3.0 2.0", "profile": "small"}
block |= {"time_budget": 300, "seed": 42, "data": os.environ.get("DATA", "aa"), "prepare": "bb"}
print("---", *(f"{key}: {value}" for key, value in block.items()), sep="\\n")
print("integrity:", os.environ.get("FLAG", "ok"))
"""
# tools/rerun.py without the clean copy.
RERUN = """
import subprocess, sys
exec(subprocess.check_output(["git", "show", sys.argv[1] + ":train.py"], text=True))
"""


class Night:
    """A clone with a train.py that takes no time, or a copy of another."""

    def __init__(self, folder, other=None):
        self.folder = folder
        self.results = folder / "results.tsv"
        if other:
            shutil.copytree(other.folder, folder)
            return
        (folder / "tools").mkdir(parents=True)
        shutil.copy(ROOT / "tools/experiment.py", folder / "tools")
        shutil.copy(ROOT / ".gitignore", folder)
        (folder / "tools/rerun.py").write_text(RERUN)
        (folder / "train.py").write_text(TRAIN)
        (folder / "prepare.py").write_text("")
        self.git("init", "-qb", "main")
        self.git("add", ".")
        self.git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "one")

    def git(self, *args):
        command = ["git", *args]
        done = subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def call(self, *args, code=0, prefix=(), **environment):
        """Calls the tool; returns what it printed."""
        done = run_script(
            "tools/experiment.py", *args, cwd=self.folder, prefix=prefix, **environment
        )
        assert done.returncode == code, done.output
        if code == 2:
            assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: "), done.stderr
        return done.output

    def edit(self, idea, score):
        path = self.folder / "train.py"
        line = f'IDEA, SCORE = "{idea}", {score!r}'
        path.write_text(re.sub("^IDEA, SCORE = .*", line, path.read_text(), flags=re.M))

    def rows(self):
        return [line.split("\t") for line in self.results.read_text().splitlines()[1:]]

    def add_row(self, status, score=0.8, commit=None):
        """Writes a row by hand, as a tool does that is killed after it."""
        commit = commit or self.git("rev-parse", "--short", "HEAD")
        with open(self.results, "a") as file:
            file.write(f"{commit}\t{score}\t1.0\t{status}\tan idea\n")

    def is_at(self, name):
        return self.git("rev-parse", "HEAD") == self.git("rev-parse", f"{name}^{{commit}}")

    def processes(self):
        """Returns pairs of id and command of all processes in the folder."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or it is not ours
                if os.readlink(process / "cwd") == str(self.folder):
                    command = (process / "cmdline").read_text().split("\0")[0]
                    found.append((int(process.name), command))
        return found

    def kill_run(self, spared="-"):
        """Kills all processes in the folder, except those that run the command `spared`."""
        for number, command in self.processes():
            if command != spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

    def wait(self):
        end = time.monotonic() + 60
        while "waits" in self.call() and time.monotonic() < end:
            time.sleep(0.1)


@pytest.fixture
def clone(tmp_path):
    return Night(tmp_path / "a night")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    night = Night(tmp_path_factory.mktemp("begun") / "a night")
    night.call("begin", "nov27")
    night.call("run")
    night.call("keep", "baseline")
    return night


@pytest.fixture
def night(begun, tmp_path):
    """A night with a baseline of 0.9."""
    return Night(tmp_path / "a night", begun)


def run_idea(night, idea, score, *args, **environment):
    night.edit(idea, score)
    return night.call("run", idea, *args, **environment)


def try_idea(night, idea, score, verdict):
    run_idea(night, idea, score)
    return night.call(verdict, idea)


# ---- A night ----
def test_a_night_of_three_ideas(clone):
    assert "there is no night here" in clone.call(code=2)
    (clone.folder / "notes").touch()
    assert "error: ?? notes: not committed" in clone.call("begin", "nov27", code=2)
    (clone.folder / "notes").unlink()
    clone.call("begin", "nov27")
    clone.results.unlink()  # it was killed before its last step
    assert "next: run, which trains" in clone.call("begin", "nov27")
    assert "a night is under way" in clone.call("begin", "nov28", code=2)
    assert "val_bpb: 0.900000" in clone.call("run")
    assert "there is no score to beat yet" in clone.call("again", code=2)
    assert 'next: keep, discard or crash "what' in clone.call()
    clone.call("keep", "baseline")
    out = try_idea(clone, "lower", 0.85, "keep")
    assert out.endswith('next: change train.py, then run "what you try"\n')
    try_idea(clone, "higher", 0.95, "discard")
    out = run_idea(clone, "bug", "1")
    assert "no valid score: exit 1\nnext: mend train.py and run, or crash" in out
    clone.edit("mended", "5")
    clone.call("run")
    assert clone.git("rev-list", "--count", "best..") == "1"  # it took the place of the first
    clone.call("crash", "a bug")
    kept, best = (clone.git("rev-parse", "--short", name) for name in ("start", "best"))
    rows = clone.rows()
    assert rows[0] == [kept, "0.900000", "1.0", "keep", "baseline, 18000 tok/s"]
    assert rows[1] == [best, "0.850000", "1.0", "keep", "lower, 18000 tok/s"]
    assert rows[2][1:] == ["0.950000", "1.0", "discard", "higher, 18000 tok/s"]
    assert rows[3][1:] == ["", "0", "crash", "a bug (exit 5)"]
    assert clone.is_at("best") and clone.git("log", "--format=%s", "start..") == "lower"
    assert clone.git("branch", "--show-current") == "autoresearch/nov27"


def test_a_run_compares_with_best(night):
    out = run_idea(night, "lower", 0.85, SPEED=15000)
    assert "val_bpb: 0.850000; best: 0.900000\ntokens_per_second: 15000; best: 18000\n" in out
    assert "0.050000 better than 0.900000, the score to beat\n" in out
    assert "speed -" not in out  # it is better although it was slower
    out = night.call("run", "--repeat", SPEED=21000)
    assert "\nspeed +17%: if the change does not explain it, train best `again` before you j" in out
    out = night.call("again", SPEED=12000)
    assert "tokens_per_second of best: 12000; it was 18000" in out
    assert "speed +75%: if the change does not explain it, train the idea again (`run --rep" in out
    assert "speed +" not in night.call("run", "--repeat", SPEED=21000)  # both are fresh now
    assert night.rows()[-1][3:] == ["again", "best again: it was 0.900000, 12000 tok/s"]
    assert "1 keep, 1 again" in night.call()


def test_the_baseline_comes_first(clone):
    clone.call("begin", "nov27")
    clone.edit("smaller", 0.95)
    assert "first be trained as it is" in clone.call("run", "smaller", code=2)
    clone.git("checkout", "-q", "train.py")
    clone.edit("too large", "5")
    clone.git("commit", "-qam", "two")
    clone.git("tag", "-f", "best")
    clone.call("run")
    run_idea(clone, "smaller", 0.95)  # what a small GPU needs
    clone.call("keep", "baseline, smaller")
    assert len(clone.rows()) == 1 and clone.is_at("best")


def test_hints_after_ten_and_fifteen(night):
    scores = {f"c0ffee{i}": 0.91 + (7 * i % 14) / 1000 for i in range(14)}
    for i, (commit, score) in enumerate(scores.items()):
        night.add_row("discard", score, commit)
        if i == 9:
            assert "next: again, after ten discards in a row" in night.call()
            night.add_row("again", 0.9, "c0ffee")
    night.add_row("crash", "", "c0ffeec")
    closest = " ".join(sorted(scores, key=scores.get)[:6])
    assert f"try these together: {closest}\n" in night.call()


# ---- What a command refuses ----
def test_what_has_no_run_or_a_row_is_not_judged(night):
    assert "has a row" in night.call("run", code=2)
    assert "has a row already" in night.call("discard", "again", code=2)
    night.edit("idea", 0.8)
    assert "say in a few words" in night.call("run", code=2)
    night.git("commit", "-qam", "idea")
    for verdict in ("keep", "discard", "crash"):
        assert "has not been trained" in night.call(verdict, "idea", code=2)
    night.call("run")
    night.edit("next idea", 0.7)
    assert "has changed since this run" in night.call("keep", "idea", code=2)
    night.git("checkout", "-q", "train.py")
    assert len(night.rows()) == 1
    night.call("keep", "idea")


def test_what_has_no_score_is_a_crash_and_a_machines_fault_is_repeated_once(night, tmp_path):
    trained = tmp_path / "trained"
    out = run_idea(night, "slow", 0.8, FLAG="overtime: 9 s")
    assert "next: run, which trains it once more" in out
    assert "or crash" in night.call("run", FLAG="overtime: 9 s", TRAINED=trained)
    assert "or crash" in night.call("run", TRAINED=trained)  # shown, not trained
    assert trained.read_text() == "slow\n"
    assert "no valid score: FAIL" in night.call("run", "--repeat", FLAG="FAIL causality")
    for verdict in ("keep", "discard"):
        assert "no valid score (FAIL causality)" in night.call(verdict, "leak", code=2)
    night.call("crash", "leak")
    assert night.rows()[-1][1:] == ["", "0", "crash", "leak (FAIL causality)"]


def test_train_py_alone_may_change(night):
    (night.folder / "prepare.py").write_text("EVAL_TOKENS = 1")
    night.edit("idea", 0.8)
    assert 'next: train.py has a change: run "what it tries", or undo it' in night.call()
    night.call("run", "idea")  # commits train.py alone
    assert night.git("show", "--format=", "--name-only", "HEAD") == "train.py"
    night.git("commit", "-qam", "the ruler")
    assert "changes prepare.py, too; take that out: git" in night.call("run", code=2)


def test_another_text_is_noticed_before_a_verdict(night):
    """A second clone prepares another text in the shared cache."""
    out = run_idea(night, "idea", 0.8, DATA="cc")
    assert "does not compare with best: data aa -> cc" in out and "better" not in out
    assert out.endswith("next: restore what it was, then run --repeat\n")
    for verdict in ("keep", "discard"):
        out = night.call(verdict, "idea", code=2)
        assert "does not compare with the score to beat: data aa -> cc" in out
    assert "best, trained again, does not compare: data" in night.call("again", DATA="cc", code=2)
    out = night.call("again", FLAG="overtime: 9 s")
    assert out.endswith(
        "no valid score: overtime: 9 s\nnext: again, once an error above is mended\n"
    )
    assert len(night.rows()) == 1
    night.call("run", "--repeat")
    night.call("keep", "idea")


def test_a_second_agent_is_told(night):
    run_idea(night, "idea", 0.8, "--wait", 0, HOLD=".")
    command = [sys.executable, "tools/experiment.py", "run"]
    with subprocess.Popen(command, cwd=night.folder, stdout=subprocess.DEVNULL) as first:
        end = time.monotonic() + 20
        while "another agent works\nin this folder" not in night.call("run", "--wait", 0):
            assert time.monotonic() < end
        first.kill()
    night.git("reset", "-q", "--hard", "best")
    assert "does another agent work here?" in night.call("run", code=2)
    night.kill_run()


# ---- Kills: every state that one can leave ----
def test_killed_during_the_run_of_an_idea(night, tmp_path):
    hold, trained = tmp_path / "hold", tmp_path / "trained"
    hold.touch()
    assert "step" not in run_idea(night, "idea", 0.8, "--wait", 0, HOLD=hold, TRAINED=trained)
    assert all(os.getsid(number) != os.getsid(0) for number, _ in night.processes())
    assert "next: run, which waits for the run that is under way" in night.call()
    assert "a run is under way" in night.call("keep", "idea", code=2)
    assert "a run is under way" in night.call("again", code=2)
    night.edit("next", 0.7)
    assert "is still being trained; leave train.py alone" in night.call("run", "next", code=2)
    night.git("checkout", "-q", "train.py")
    hold.unlink()
    assert "val_bpb: 0.800000" in night.call("run")  # joins
    assert "val_bpb: 0.800000" in night.call("run")  # shows
    assert trained.read_text() == "idea\n"
    assert "0.100000 better than 0.900000" in night.call() and "keep, discard or" in night.call()


def test_the_run_itself_is_killed(night):
    run_idea(night, "idea", 0.8, "--wait", 0.3, HOLD=".")
    night.kill_run(spared="sh")  # the shell that runs train.py tells the code
    night.wait()
    out = night.call()
    assert "no valid score: exit 137\nnext: run, which trains it once more" in out
    night.call("run", "--wait", 0.3, HOLD=".")
    night.kill_run()
    night.wait()
    assert "next: run --repeat if the machine was busy, else mend train.py" in night.call()
    assert "no valid score (cut off" in night.call("keep", "idea", code=2)
    night.call("crash", "idea")
    assert "cut off" in night.rows()[-1][4]


@pytest.mark.parametrize(
    ("row", "tag", "command", "code"),
    [
        ("keep", False, ["run"], 2),
        ("keep", False, ["again"], 0),
        ("keep", False, ["keep", "x"], 2),
        ("keep", True, [], 0),  # killed before the log of best
        ("discard", False, [], 0),
        ("crash", False, [], 0),
    ],
)
def test_killed_after_the_row(night, row, tag, command, code):
    """Any command moves `best`, or goes back to it."""
    run_idea(night, "idea", 0.8)
    night.add_row(row)
    if tag:
        night.git("tag", "-f", "best")
    night.call(*command, code=code)
    assert night.is_at("best") and night.is_at("start") == (row != "keep")
    best = experiment.Log(night.folder / "best.log").block["val_bpb"]
    assert best == ("0.800000" if row == "keep" else "0.900000")


def test_killed_in_again(night, tmp_path):
    hold, trained = tmp_path / "hold", tmp_path / "trained"
    hold.touch()
    run_idea(night, "idea", 0.8)
    out = night.call("again", "--wait", 0, HOLD=hold, TRAINED=trained)
    assert out.endswith("next: again, which waits for this run\n")
    assert "best is being trained again" in night.call("run", code=2)
    hold.unlink()
    night.wait()  # it ends, and the next command logs it
    assert trained.read_text() == "baseline\n"
    for _ in range(2):
        assert [row[3] for row in night.rows()] == ["keep", "again"]
        shutil.copy(night.folder / "best.log", night.folder / "again.log")  # killed after the row
        night.call()
    assert not (night.folder / "again.log").exists()
    night.call("keep", "idea")
    assert night.is_at("best")


def test_an_idea_that_broke_the_rules_does_not_come_back(night):
    try_idea(night, "leak", 0.1, "keep")
    night.git("revert", "--no-edit", "HEAD")
    night.call("run")
    night.call("keep", "without the leak")
    assert night.is_at("best") and night.rows()[-1][1] == "0.900000"


@pytest.mark.parametrize("name", ["index.lock", "refs/tags/best.lock", "HEAD.lock"])
def test_a_lock_that_git_left(night, name):
    run_idea(night, "idea", 0.8)
    lock = night.folder / ".git" / name
    lock.touch()
    verdict = "keep" if name.startswith("refs") else "discard"
    out = night.call(verdict, "idea", code=2)
    assert f"{name}': File exists. If no git command is running, delete that file." in out
    lock.unlink()
    night.call()
    assert night.is_at("best") and [row[3] for row in night.rows()] == ["keep", verdict]


def test_two_rows_of_one_commit_and_an_old_commit(night):
    night.edit("idea", 0.8)
    night.git("commit", "-qam", "idea")
    night.add_row("discard")
    night.add_row("keep")
    night.call()
    assert night.is_at("best") and not night.is_at("start")
    night.git("switch", "-q", "--detach", "start")
    assert "an old commit; git reset --keep best" in night.call()
    assert "which has a row" in night.call("run", code=2)
    assert not night.is_at("best")


def limited(size):
    """Returns the beginning of a command by which no file grows beyond `size` bytes."""
    code = (
        "import os, resource, sys; size = int(sys.argv[1]);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size));"
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    return (sys.executable, "-c", code, str(size))


def test_a_full_disk_ends_a_run(night):
    night.edit("idea", 0.8)
    night.git("commit", "-qam", "idea")
    assert "Free space" in night.call("run", code=2, prefix=limited(10))
    out = night.call("run", prefix=limited(200))
    assert "no valid score: cut off: it was killed, or the disk was full (" in out
    assert "val_bpb: 0.800000" in night.call("run")


def test_a_torn_row_is_told_and_a_full_disk_tears_none(night):
    run_idea(night, "idea", 0.8)
    with open(night.results, "a") as file:
        file.write("abc1234\t0.9")
    before = night.results.read_bytes()
    out = night.call("discard", "idea", code=2, prefix=limited(len(before) + 10))
    assert "left out of results.tsv, not 5 columns: 'abc1234\\t0.9'" in out
    assert "Free space, then repeat this." in out
    assert night.results.read_bytes() == before
    night.call("keep", "idea")
    assert night.is_at("best") and [len(row) for row in night.rows()] == [5, 2, 5]


# ---- Other people's shells ----
def test_somebody_elses_shell_and_clone(clone):
    """With colours, another language, another repository, hooks, a branch `best`, and an editor
    that ends lines as Windows does."""
    shell = {"FORCE_COLOR": "1", "PYTHONSAFEPATH": "1", "LC_ALL": "C", "LANGUAGE": "de"}
    shell |= {"GIT_DIR": "/nowhere", "GIT_WORK_TREE": "/", "GIT_INDEX_FILE": "/nowhere/index"}
    hook = clone.folder / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho 'SCORE = 7' >> train.py; git add train.py\n")
    hook.chmod(0o755)
    clone.git("branch", "best")
    clone.call("begin", "nov27", **shell)
    clone.call("run", **shell)
    clone.call("keep", "baseline", **shell)
    clone.results.write_bytes(clone.results.read_bytes().replace(b"\n", b"\r\n"))
    for idea, score, verdict in (("a", 0.8, "keep"), ("b", "5", "crash"), ("c", 0.9, "discard")):
        run_idea(clone, idea, score, **shell)
        clone.call(verdict, idea, **shell)
    rows = experiment.read_results(clone.results)
    assert [row["status"] for row in rows] == ["keep", "keep", "crash", "discard"]
    assert clone.git("rev-parse", "HEAD") == clone.git("rev-parse", "refs/tags/best")


# ---- Nights with kills at random moments ----
def play(night, ideas, kills, seed):
    """An agent without a memory: it knows what the tool and the files tell it. It is killed up to
    `kills` times, as long as ideas are left, each third time together with the run."""
    rng = random.Random(seed)
    while True:
        tried = {row[4].split(",")[0].split(" (")[0] for row in night.rows()}
        left = [idea for idea in ideas if idea[0] not in tried]
        step = night.call().rpartition("next: ")[2]
        head = re.search('IDEA, SCORE = "(.*?)"', (night.folder / "train.py").read_text())[1]
        if step.startswith(("change", "fifteen")):
            if not left:
                return
            night.edit(*left[0])
            command = ["run", left[0][0]]
        elif step.startswith("keep, discard"):
            score = float(experiment.Log(night.folder / "run.log").block["val_bpb"])
            to_beat = experiment.score_to_beat(experiment.read_results(night.results))
            command = ["keep" if score < to_beat else "discard", head]
        elif step.startswith(("again", "run")):
            command = [step.split()[0].strip(",")]
        else:
            assert step.startswith(("train.py has a change", "mend")), step
            command = ["crash" if step.startswith("mend") else "run", head]
        environment = os.environ | {"SLEEP": str(rng.choice([0, 0.2]))}
        where = {"cwd": night.folder, "env": environment, "stdout": subprocess.DEVNULL}
        command = [sys.executable, "tools/experiment.py", *command]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **where)
        if kills and rng.random() < 0.7:
            kills -= 1
            time.sleep(rng.uniform(0, 0.4))
            process.kill()
            if kills % 3 == 0:
                night.kill_run()
            for lock in night.folder.glob(".git/**/*.lock"):
                lock.unlink()  # as the tool's sentence asks for
        process.wait()


def check_night(night, ideas, kills, seed):
    play(night, ideas, kills, seed)
    rows = [row for row in night.rows() if row[3] != "again"]
    names = [re.split(r", \d+ tok/s| \(", row[4])[0] for row in rows]
    assert names == ["baseline", *(name for name, _ in ideas)]  # each once, in order
    best = 0.9
    for row, (_, score) in zip(rows[1:], ideas):
        if row[3] == "crash":  # its own, or it was killed twice
            assert score == "1" or "(cut off" in row[4] or "(exit 137)" in row[4]
            continue
        assert row[1] == f"{score:.6f}" and row[3] == ("keep" if score < best else "discard")
        best = min(best, score)
    kept = [row[0] for row in rows if row[3] == "keep"]
    assert night.git("rev-parse", "--short", "refs/tags/best") == kept[-1] and night.is_at("best")


def make_ideas(count, seed):
    """Returns pairs of a name and a score, or "1" for a tenth of them, which crash."""
    rng = random.Random(seed)
    scores = [round(0.9 + rng.uniform(-0.05, 0.05), 6) for _ in range(count)]
    return [(f"idea {i}", "1" if rng.random() < 0.1 else score) for i, score in enumerate(scores)]


def test_a_short_night_with_kills(night):
    check_night(night, make_ideas(5, 1), kills=8, seed=1)


@pytest.mark.faults
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_long_night_with_kills(night, seed):
    check_night(night, make_ideas(20, seed), kills=50, seed=seed)
