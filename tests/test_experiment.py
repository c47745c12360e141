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

from tests.common import ROOT, processes_in, run_script, wait_until
from tools import experiment

import pytest

# Takes SLEEP seconds, or as long as the file HOLD is there, and has the score of the idea. In a
# run that is not set up it ends with EXIT.
TRAIN = """
import os, sys, time
# ---- Knobs: a number ----
KNOB = 1
# ---- The rest ----
IDEA, SCORE = "baseline", 0.9
print("run: small profile", os.environ.get("NOTICE", ""), sep="\\n", flush=True)
if "EXIT" in os.environ:
    sys.exit(int(os.environ["EXIT"]))
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
block |= {"peak_vram_mb": 1024.0, "curve": "3.0 2.0", "profile": "small"}
block |= {"time_budget": 300, "seed": 42, "data": os.environ.get("DATA", "aa"), "prepare": "bb"}
block |= {"device": "a CPU", "threads": 2, "torch": "2.15", "attention": "blocks"}
block |= {"num_steps": int(os.environ.get("STEPS", 1000)), "flops_per_token": "1e7"}
block["total_tokens_M"] = block["num_steps"] * float(os.environ.get("BATCH", 0.004096))
print("---", *(f"{key}: {value}" for key, value in block.items()), sep="\\n")
print("integrity:", os.environ.get("FLAG", "ok"))
"""


def parent_of(number):
    return int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{number}/status").read_text())[1])


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
        (folder / "train.py").write_text(TRAIN)
        (folder / "prepare.py").write_text("")
        self.git("init", "-qb", "main")
        self.git("add", ".")
        self.git("commit", "-qm", "one")

    def git(self, *args):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *args]
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

    def turn_knob(self, value):
        path = self.folder / "train.py"
        path.write_text(re.sub("^KNOB = .*", f"KNOB = {value}", path.read_text(), flags=re.M))

    def rows(self):
        return [line.split("\t") for line in self.results.read_text().splitlines()[1:]]

    def add_row(self, status, score=0.8, commit=None):
        """Writes a row by hand, as a tool does that is killed after it."""
        commit = commit or self.git("rev-parse", "--short", "HEAD")
        with open(self.results, "a") as file:
            file.write(f"{commit}\t{score}\t1.0\t{status}\tan idea\n")

    def is_at(self, name):
        return self.git("rev-parse", "HEAD") == self.git("rev-parse", f"{name}^{{commit}}")

    def kill_run(self, spared="-"):
        """Kills all processes in the folder, except those that run the command `spared`."""
        for number, command in processes_in(self.folder):
            if command != spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

    def wait(self):
        wait_until(lambda: "waits" not in self.call(), 60)

    def wait_for_begin(self):
        """Waits until the run has read train.py."""
        wait_until(lambda: "run: small" in (self.folder / "run.log").read_text(), 60)


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
def test_the_block_of_a_run_is_that_of_prepare(tmp_path):
    lines = ["commit abc1234, after 1 rows, at 7", "---", "val_bpb: 0.1", "evaluating on 512 rows"]
    lines += ["---", "val_bpb: 0.9", "integrity: ok", "val_bpb: 0.2", "", "exit 0", ""]
    (tmp_path / "run.log").write_text("\n".join(lines))
    log = experiment.Log(tmp_path / "run.log")
    assert (log.score, log.problem, log.code) == (0.9, None, 0)


def test_a_night_of_three_ideas(clone):
    assert "there is no night here" in clone.call(code=2)
    (clone.folder / "nohup.out").touch()
    (clone.folder / "prepare.py").write_text("changed")
    assert "error: M prepare.py: not committed" in clone.call("begin", "nov27", code=2)
    clone.git("checkout", "-q", "prepare.py")
    clone.call("begin", "nov27")
    assert "a night is under way" in clone.call("begin", "nov28", code=2)
    assert "val_bpb: 0.900000" in clone.call("run")
    assert 'next: keep "baseline", which makes this the score to beat\n' in clone.call()
    assert "nothing is there to go back to" in clone.call("discard", "baseline", code=2)
    clone.call("keep", "baseline")
    out = try_idea(clone, "lower", 0.85, "keep")
    assert '\nnext: change train.py, then run "what you try"\nideas 1: 1 code, 0 knobs; ' in out
    try_idea(clone, "higher", 0.95, "discard")
    out = run_idea(clone, "bug", "1")
    assert "no valid score: exit 1\nnext: if it was the machine, run --repeat; else mend" in out
    clone.edit("mended", "5")
    clone.call("run")
    assert clone.git("rev-list", "--count", "best..") == "1"  # it took the place of the first
    clone.call("crash", "a typo")
    kept, best = (clone.git("rev-parse", "--short", name) for name in ("start", "best"))
    rows = clone.rows()
    assert rows[0] == [kept, "0.900000", "1.0", "keep", "baseline, 18000 tok/s"]
    assert rows[1] == [best, "0.850000", "1.0", "keep", "lower, 18000 tok/s"]
    assert rows[2][1:] == ["0.950000", "1.0", "discard", "higher, 18000 tok/s"]
    assert rows[3][1:] == ["", "0", "crash", "bug: a typo (exit 5)"]
    assert clone.is_at("best") and clone.git("log", "--format=%s", "start..") == "lower"
    assert clone.git("branch", "--show-current") == "autoresearch/nov27"


def test_a_run_that_hangs_is_ended_and_one_that_was_not_set_up_is_repeated(night):
    """The limit is 900 seconds beyond the budget. What train.py warns of is shown."""
    out = run_idea(night, "hangs", 0.8, SLEEP=60, AUTORESEARCH_TIME_BUDGET=-899.5)
    assert "no valid score: exit 124\n" in out
    night.call("crash", "it hangs")
    out = run_idea(night, "idea", 0.8, EXIT=2)
    assert "no valid score: exit 2\nnext: do what the error says, then run\n" in out
    out = night.call("run", NOTICE="continuing without compilation")
    assert "\ncontinuing without compilation\nval_bpb: 0.800000" in out


@pytest.mark.parametrize(
    ("score", "steps", "batch", "line"),
    [
        # best saw 4 million; 0.19 * ln(1.1) is 0.0181
        (
            0.895,
            1100,
            0.004096,
            "number of tokens: 0.913109, 0.013109 worse, if it costs no time",
        ),
        (0.905, 900, 0.004096, "number of tokens: 0.884982, 0.015018 better, if it"),
        (
            0.9,
            2000,
            0.004096,
            "number of tokens: unknown, since it saw 2.00 times as many\n"
            "if that was the machine, `run --repeat`; if it stays as it is, crash this run,\n"
            "`run --repeat` best, keep that, and apply this idea again\n",
        ),
        (0.9, 2000, 0.002048, "number of tokens: 0.900000, 0.000000 worse"),
    ],
)
def test_a_run_compares_with_best_at_equal_steps(night, score, steps, batch, line):
    out = run_idea(night, "idea", score, STEPS=steps, BATCH=batch)
    assert f"val_bpb: {score:.6f}; best: 0.900000\ntokens_per_second: 18000; best: 18000\n" in out
    assert f"num_steps: {steps}; best: 1000\n" in out and "FLOPs" not in out
    word = "better" if score < 0.9 else "worse"
    beside = f"{score:.6f}, {abs(0.9 - score):.6f} {word} than 0.900000, the score to beat\n"
    assert f"\n{beside}" in out
    assert f"\nat best's {line}" in out


def test_a_run_at_another_speed_is_repeated(night):
    assert "since it saw 2.00 times as many\n" in run_idea(night, "idea", 0.8, STEPS=2000)
    line = "at 1.9 times best's number of tokens: 0.809746, 0.090254 better\n"
    assert line in night.call("run", "--ratio", 1.9)  # 0.19 * ln(2 / 1.9) is 0.0097
    assert "at 1.2 times best's number of tokens: unknown" in night.call("run", "--ratio", 1.2)
    assert "--ratio is above 0" in night.call("run", "--ratio", 0, code=2)
    out = night.call("run", "--repeat", STEPS=1100)
    assert "training " in out and "tokens: 0.818109, 0.081891 better, if it costs no time\n" in out
    out = night.call("run", "--repeat", STEPS=1000)
    assert "it is not repeated\n" in out and "tokens: 0.818109" in out
    night.call("keep", "idea")
    night.call("run", "--repeat", "--wait", 0, STEPS=3000)
    night.wait()
    assert "it is not repeated\n" in night.call("run", "--repeat")  # best, at its new speed


def test_a_token_is_worth_less_in_a_long_run(night):
    run_idea(night, "longer", 0.85, STEPS=1300)  # 5.3 million
    night.call("keep", "longer")
    out = run_idea(night, "shorter", 0.86, STEPS=1170)  # 0.12 * ln(0.9) is -0.0126
    assert "tokens: 0.847357, 0.002643 better, if it costs no time" in out


def test_fewer_flops_are_told_and_a_foreign_train_py_has_none(night):
    path = night.folder / "train.py"
    path.write_text(path.read_text().replace('"1e7"', '"9.7e6"'))
    out = run_idea(night, "cheaper", 0.8)
    assert out.splitlines()[-3].endswith(" no time (FLOPs per token: -3%)")
    night.call("discard", "cheaper")
    path.write_text(re.sub('block .= {"num_steps.*', "", path.read_text()))
    path.write_text(re.sub('block."total_tokens.*', "", path.read_text()))
    out = run_idea(night, "foreign", 0.8)
    assert "0.100000 better than 0.900000, the score to beat\nnext: keep" in out
    night.call("keep", "foreign")


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
    assert "ideas 0: " in clone.call()


def log_idea(night, idea, score, knob=0):
    """Logs a discard as the tool does, without a run."""
    if knob:
        night.turn_knob(knob)
    else:
        night.edit(idea, score)
    night.git("commit", "-qam", idea)
    night.add_row("discard", score)
    night.git("reset", "-q", "--hard", "best")


def test_what_comes_before_the_baseline_is_no_idea():
    """Nor is a run of best, however it was logged."""
    night = "a crash, b keep, b crash, c discard, b keep, c keep, d again, a crash"
    rows = [dict(zip(("commit", "status"), row.split())) for row in night.split(", ")]
    assert experiment.ideas_of(rows) == [{"commit": "c", "status": "discard"}]


def test_knobs_and_code_are_counted(night):
    lines = {
        3: "ideas 3: 3 code, 0 knobs; next one: code",
        4: "ideas 4: 3 code, 1 knobs; next one: code",
        11: "ideas 11: 10 code, 1 knobs; next one: code",
        12: "ideas 12: 11 code, 1 knobs; next one: code, or a knob of a part that was kept",
        13: "ideas 13: 11 code, 2 knobs; next one: code, or a knob of a part that was kept",
        14: "ideas 14: 11 code, 3 knobs; next one: code",
    }
    for i in range(1, 15):
        log_idea(night, f"idea {i}", 0.95, knob=i if i in (4, 13, 14) else 0)
        assert i not in lines or night.call().splitlines()[-1] == lines[i]
    night.turn_knob(7)
    assert '"a knob"; knobs alone\n' in night.call("run", "a knob")
    night.call("discard", "a knob")
    assert '"more code"; code\n' in run_idea(night, "more code", 0.95)


def test_a_combination_is_due_until_it_is_done(night):
    scores = {f"c0ffee{i:x}": 0.91 + (7 * i % 15) / 1000 for i in range(15)}
    for i, (commit, score) in enumerate(scores.items()):
        assert i % 7 or "due: " not in night.call()
        night.add_row("discard", score, commit)
    for i in range(2):
        night.add_row("crash", "", f"c0ffeef{i}")
        closest = " ".join(sorted(list(scores)[i + 1 :], key=scores.get)[:6])  # of the last fifteen
        assert f'due: apply {closest} to best, then run "combination of ...' in night.call()
    run_idea(night, "combination of two", 0.99)
    assert "due: " not in night.call("discard", "no gain")
    assert night.rows()[-1][4] == "combination of two: no gain, 18000 tok/s"


def test_best_is_trained_again_where_the_machine_has_changed(night):
    out = run_idea(night, "idea", 0.85, DATA="cc")
    assert "does not compare with best: data aa -> cc" in out and "better" not in out
    assert (
        "\nnext: restore that and `run --repeat`; if you cannot, crash it, `run --repeat` b" in out
    )
    for verdict in ("keep", "discard"):
        out = night.call(verdict, "idea", code=2)
        assert "does not compare with best: data aa -> cc; restore that" in out
    night.call("crash", "another text")
    assert night.rows()[-1][4] == "idea: another text (val_bpb 0.850000)"
    assert "has a row; change train.py first, or `run --repeat` best" in night.call("run", code=2)
    night.call("run", "--repeat", "--wait", 0, DATA="cc")
    night.wait()
    out = night.call("run", "--repeat", DATA="dd")  # shows the run that has ended
    assert "does not compare with best: data aa -> cc" in out and 'next: keep "baseline"' in out
    assert out.startswith("this run has ended and waits for a verdict; it is not repeated\n")
    night.call("keep", "baseline on another text")
    assert [row[3] for row in night.rows()] == ["keep", "crash", "keep"]
    assert "0.050000 better" in run_idea(night, "idea again", 0.85, DATA="cc")
    night.call("keep", "idea again")
    assert "ideas 2: 2 code" in night.call()


def test_the_view_of_a_run_under_way(night, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    for i in range(5):
        night.add_row("discard", 0.95, f"c0ffee{i}")
    try_idea(night, "as good", 0.9, "keep")
    try_idea(night, "worse", 0.99, "discard")
    out = run_idea(night, "slow", 0.8, "--wait", 0, HOLD=hold)
    assert "elapsed, not training yet\nnext: run, which waits for this run\n" in out
    night.wait_for_begin()
    with open(night.folder / "run.log", "a") as log:
        log.write("step    3  40% loss 3.5000 tokens_per_second 9\nstep    4  60% loss 3.2500 x\n")
    with open(night.folder / "best.log", "r+") as log:
        text = log.read()
        log.seek(0)
        log.write(text.replace("step 7 50% loss 3.0", "step 6 50% loss 3.1\nstep 9 70% loss 3.0"))
    before = {path: path.read_bytes() for path in night.folder.rglob("*") if path.is_file()}
    out = night.call()
    assert before == {path: path.read_bytes() for path in night.folder.rglob("*") if path.is_file()}
    line = r"\n0:\d\d elapsed, 60 % of the training, loss 3.2500; best had 3.1000 here\n"
    assert re.search(line, out)
    rows = [line for line in out.splitlines() if line.startswith("  ")]
    assert len(rows) == 5 and rows[-1].split()[1:4] == ["discard", "-0.0900", "worse,"]
    assert rows[-2].split()[1:3] == ["keep", "+0.0000"]
    assert "\nideas since the last keep: 1" in out
    hold.unlink()
    night.wait()


# ---- What a command refuses ----
def test_what_has_no_run_or_a_row_is_not_judged(night):
    assert "has a row" in night.call("run", code=2)
    assert "has a row already" in night.call("discard", "again", code=2)
    night.edit("idea", 0.8)
    assert "say in a few words" in night.call("run", code=2)
    night.git("commit", "-qam", "idea")
    for verdict in ("keep", "discard", "crash"):
        out = night.call(verdict, "idea", code=2)
        assert "which has not been trained; next: run, which trains " in out
    night.call("run")
    night.edit("next idea", 0.7)
    assert "has changed since this run" in night.call("keep", "idea", code=2)
    night.git("checkout", "-q", "train.py")
    assert len(night.rows()) == 1
    night.call("keep", "idea")


def test_a_score_without_a_verdict_is_not_amended_away(night):
    run_idea(night, "first", 0.8)
    night.edit("second", 0.7)
    out = night.call("run", "second", code=2)
    assert "has a score and no verdict; save your edit: git diff" in out
    [save, restore] = re.findall("(git diff .*)\\. Then.*(git apply .*)\\.?", out)[0]
    assert f"next: save your edit: {save}" in night.call()
    subprocess.run(["sh", "-c", save], cwd=night.folder, check=True)
    night.call("keep", "first")
    subprocess.run(["sh", "-c", restore.rstrip(".")], cwd=night.folder, check=True)
    assert "0.100000 better than 0.800000" in night.call("run", "second")
    night.call("keep", "second")
    assert [row[1] for row in night.rows()] == ["0.900000", "0.800000", "0.700000"]


def test_what_has_no_score_is_trained_again_or_crashes(night, tmp_path):
    trained = tmp_path / "trained"
    out = run_idea(night, "slow", 0.8, FLAG="overtime: 9 s")
    assert (
        'next: if it was the machine, run --repeat; else mend train.py and run, or crash "w' in out
    )
    night.call("run", TRAINED=trained)
    assert not trained.exists()  # shown, not trained
    out = night.call("run", "--repeat", FLAG="FAIL causality")
    assert "no valid score: FAIL" in out and "val_bpb" not in out
    assert "\ntokens_per_second: 18000; best: 18000\n" in out  # tells a stall from a slow idea
    for verdict in ("keep", "discard"):
        assert "no valid score (FAIL causality)" in night.call(verdict, "leak", code=2)
    night.call("crash", "leak")
    assert night.rows()[-1][1:] == ["", "0", "crash", "slow: leak (FAIL causality)"]
    path = night.folder / "train.py"
    path.write_text(path.read_text().replace("{SCORE:.6f}", "nan"))
    assert "no valid score: val_bpb is no number" in night.call("run", "garbled")


def test_an_old_commit_and_another_branch(night):
    try_idea(night, "kept", 0.8, "keep")
    night.git("reset", "-q", "--hard", "start")
    assert "next: git reset --soft best, since HEAD, " in night.call()
    night.edit("idea", 0.7)
    assert "does not follow best; `git reset --soft best`" in night.call("run", "idea", code=2)
    night.git("reset", "-q", "--hard", "best")
    for i in range(2):
        night.edit(f"idea {i}", 0.7)
        night.git("commit", "-qam", f"idea {i}")
    assert "does not follow best" in night.call("run", code=2)
    night.git("reset", "-q", "--soft", "best")
    assert "val_bpb: 0.700000" in night.call("run", "both")
    night.git("switch", "-q", "main")
    for command in ([], ["run"], ["keep", "both"]):
        assert "this is branch main, not the night's" in night.call(*command, code=2)
    night.git("switch", "-q", "autoresearch/nov27")
    night.call("keep", "both")


@pytest.mark.parametrize("verdict", ["keep", "discard"])
def test_a_draft_is_brought_over_by_the_commands_of_program_md(night, verdict):
    """It was begun from `best` while another idea was trained."""
    path = night.folder / "train.py"
    program = (ROOT / "program.md").read_text()
    draft, bring = re.findall("`(git (?:show best|merge-file).*)`", program)
    run_idea(night, "first", 0.8)
    subprocess.run(["sh", "-c", draft], cwd=night.folder, check=True)
    with open(night.folder / "next.py", "a") as file:
        file.write("SECOND = True\n")
    night.call(verdict, "first")
    before = path.read_text()
    subprocess.run(["sh", "-c", bring], cwd=night.folder, check=True)
    assert path.read_text() == before + "SECOND = True\n" and ('"first"' in before) == (
        verdict == "keep"
    )
    assert "val_bpb" in night.call("run", "second")


def test_a_worktree_and_a_branch_of_that_name_begin_no_night(clone, tmp_path):
    clone.git("worktree", "add", "-q", tmp_path / "tree")
    other = Night.__new__(Night)
    other.folder = tmp_path / "tree"
    assert "this is a worktree" in other.call("begin", "nov27", code=2)
    clone.git("branch", "autoresearch/nov27")  # killed after this
    clone.git("branch", "autoresearch/nov28")
    clone.call("begin", "nov27")
    clone.results.unlink()
    clone.git("commit", "--allow-empty", "-qm", "x")
    assert "autoresearch/nov28 is there, at another commit" in clone.call("begin", "nov28", code=2)


# ---- Two at once ----
def test_a_second_agent_is_told(night):
    run_idea(night, "idea", 0.8, "--wait", 0, HOLD=".")
    night.wait_for_begin()
    night.git("reset", "-q", "--hard", "best")
    assert "does another agent work?" in night.call("run", code=2)
    night.kill_run()


def test_two_verdicts_at_once_and_status_beside_them(night):
    for i in range(3):
        run_idea(night, f"idea {i}", 0.95)
        command = [sys.executable, "tools/experiment.py"]
        where = {"cwd": night.folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        both = [
            subprocess.Popen([*command, *arguments], **where)
            for arguments in (["discard", f"idea {i}"], [], ["discard", f"idea {i}"], [])
        ]
        errors = [process.communicate()[1].decode() for process in both]
        assert sorted(process.returncode for process in both[::2]) == [0, 2]
        assert [process.returncode for process in both[1::2]] == [0, 0], errors
        assert [row[4] for row in night.rows()[1:]] == [
            f"idea {j}, 18000 tok/s" for j in range(i + 1)
        ]
    assert night.is_at("best")


# ---- Kills: every state that one can leave ----
def test_killed_before_the_log_of_the_night(clone):
    clone.call("begin", "nov27")
    clone.results.unlink()
    assert "next: run, which trains" in clone.call("begin", "nov27")


def test_killed_before_the_run(night):
    night.edit("idea", 0.8)
    night.git("commit", "-qam", "idea")
    (night.folder / "run.new.log").write_text("commit")
    assert "next: run, which trains" in night.call()
    assert "val_bpb: 0.800000" in night.call("run")


def test_a_baseline_that_was_judged_a_crash(clone):
    clone.call("begin", "nov27")
    clone.call("run")
    clone.call("crash", "a wrong word")
    assert "next: run --repeat, which trains best again" in clone.call()
    clone.call("run", "--repeat")
    assert "next: change train.py" in clone.call("keep", "baseline")


def test_killed_during_the_run_of_an_idea(night, tmp_path):
    hold, trained = tmp_path / "hold", tmp_path / "trained"
    hold.touch()
    assert "step" not in run_idea(night, "idea", 0.8, "--wait", 0, HOLD=hold, TRAINED=trained)
    assert all(os.getsid(number) != os.getsid(0) for number, _ in processes_in(night.folder))
    assert "next: run, which waits for the run that is under way" in night.call()
    assert "a run is under way" in night.call("keep", "idea", code=2)
    night.edit("next", 0.7)
    assert "is still being trained; save your edit: git diff" in night.call("run", "next", code=2)
    night.git("checkout", "-q", "train.py")
    hold.unlink()
    assert "val_bpb: 0.800000" in night.call("run")  # joins
    assert "val_bpb: 0.800000" in night.call("run")  # shows
    assert trained.read_text() == "idea\n"
    assert "0.100000 better than 0.900000" in night.call() and "keep or discard" in night.call()


def test_a_client_that_ends_what_descends_from_its_command(night, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    night.edit("idea", 0.8)
    command = [sys.executable, "tools/experiment.py", "run", "idea"]
    own = os.environ | {"HOLD": str(hold)}
    with subprocess.Popen(command, cwd=night.folder, env=own, stdout=subprocess.PIPE) as client:
        client.stdout.readline()  # training ...
        parents = {number: parent_of(number) for number, _ in processes_in(night.folder)}
        client.kill()
    runs = set(parents) - {client.pid}
    assert runs and not any(client.pid == parents[number] for number in runs)
    hold.unlink()
    assert "val_bpb: 0.800000" in night.call("run")


def test_the_run_itself_is_killed(night):
    run_idea(night, "idea", 0.8, "--wait", 0.3, HOLD=".")
    night.kill_run(spared="sh")  # the shell that runs train.py tells the code
    night.wait()
    assert "no valid score: exit 137\nnext: if it was the machine, run --repeat; " in night.call()
    night.call("run", "--repeat", "--wait", 0.3, HOLD=".")
    night.kill_run()
    night.wait()
    assert "next: if it was the machine, run; else mend" in night.call()
    assert "no valid score (cut off" in night.call("keep", "idea", code=2)
    assert "val_bpb: 0.800000" in night.call("run")


def test_a_child_that_outlives_the_run_holds_nothing_up(night):
    path = night.folder / "train.py"
    path.write_text(path.read_text() + "\nimport subprocess\nsubprocess.Popen(['sleep', '60'])\n")
    run_idea(night, "a child", 0.8, "--wait", 15)
    assert "next: keep or discard" in night.call()
    night.call("discard", "a child")
    run_idea(night, "without", 0.7)
    night.call("keep", "without")
    night.kill_run()


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("row", ["keep", "discard", "crash"])
def test_killed_after_the_row(night, row, moved):
    """The next command that changes the night moves `best`, or goes back to it."""
    run_idea(night, "idea", 0.8)
    night.add_row(row)
    if moved and row == "keep":
        night.git("tag", "-f", "best")  # killed before the log of best
    elif moved:
        night.git("checkout", "-q", "best", "--", "train.py")  # killed before the reset
    out = night.call()
    assert not night.is_at("start")  # it changes nothing
    if not (moved and row == "keep"):
        assert f"next: run, which completes the {row} of" in out
    night.call("run", code=2)
    assert night.is_at("best") and night.is_at("start") == (row != "keep")
    assert not night.git("status", "--porcelain")
    best = experiment.Log(night.folder / "best.log").block["val_bpb"]
    assert best == ("0.800000" if row == "keep" else "0.900000")


def test_an_edit_after_a_row_is_not_lost(night):
    run_idea(night, "idea", 0.8)
    night.add_row("discard")
    night.edit("next", 0.7)
    assert "has a verdict, and train.py has changed" in night.call("run", "next", code=2)
    assert '"next"' in (night.folder / "train.py").read_text()
    shutil.copy(night.folder / "train.py", night.folder / "next.py")
    night.git("checkout", "-q", "HEAD", "train.py")
    assert "has a row; change train.py first" in night.call("run", code=2)
    shutil.copy(night.folder / "next.py", night.folder / "train.py")
    assert "val_bpb: 0.700000" in night.call("run", "next")


def test_a_touched_train_py_is_no_edit(night):
    run_idea(night, "idea", 0.95)
    path = night.folder / "train.py"
    shutil.copy(path, night.folder / "copy.log")
    (night.folder / "copy.log").replace(path)  # another inode and time
    os.utime(path, (1, 1))
    night.call("discard", "idea")
    assert night.is_at("best") and not night.git("status", "--porcelain")


def test_an_idea_that_broke_the_rules_does_not_come_back(night):
    try_idea(night, "leak", 0.1, "keep")
    night.git("revert", "--no-commit", "HEAD")
    night.call("run", "without the leak")
    night.call("keep", "as before")
    assert night.is_at("best") and night.rows()[-1][1] == "0.900000"


@pytest.mark.parametrize("name", ["index.lock", "refs/tags/best.lock", "HEAD.lock"])
def test_a_lock_that_git_left(night, name):
    run_idea(night, "idea", 0.8)
    lock = night.folder / ".git" / name
    lock.touch()
    verdict = "keep" if name.startswith("refs") else "discard"
    out = night.call(verdict, "idea", code=2)
    assert f"{name}': File exists." in out and "remove the file manually to continue" in out
    lock.unlink()
    night.call("run", code=2)
    assert night.is_at("best") and [row[3] for row in night.rows()] == ["keep", verdict]


def test_a_tag_that_a_fetch_took_away(night):
    best = night.git("rev-parse", "best")
    night.git("tag", "-d", "best")
    assert "git tag best COMMIT, the last keep of results.tsv" in night.call(code=2)
    night.git("tag", "best", best)
    assert "next: change train.py" in night.call()


def limited(size):
    """Returns the beginning of a command by which no file grows beyond `size` bytes."""
    code = (
        "import os, resource, sys; size = int(sys.argv[1]);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size));"
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    return (sys.executable, "-c", code, str(size))


def test_a_full_disk_ends_a_run_and_loses_no_score(night):
    night.edit("idea", 0.8)
    night.git("commit", "-qam", "idea")
    assert "File too large" in night.call("run", code=2, prefix=limited(10))
    out = night.call("run", prefix=limited(200))
    assert "no valid score: cut off: it was killed, or the disk was full\n" in out
    assert "val_bpb: 0.800000" in night.call("run", DATA="cc")
    assert "File too large" in night.call("run", "--repeat", code=2, prefix=limited(10))
    assert experiment.Log(night.folder / "run.log").score == 0.8


def test_a_torn_row_is_told_and_a_full_disk_tears_none(night):
    run_idea(night, "idea", 0.8)
    with open(night.results, "a") as file:
        file.write("abc1234\t0.9")
    before = night.results.read_bytes()
    out = night.call("discard", "idea", code=2, prefix=limited(len(before) + 10))
    assert "left out of results.tsv, not 5 columns: 'abc1234\\t0.9'" in out
    assert "nothing was lost. Mend that, then repeat this." in out
    assert night.results.read_bytes() == before
    night.call("keep", "idea")
    assert night.is_at("best") and [len(row) for row in night.rows()] == [5, 2, 5]


def test_what_people_write_into_results(night):
    """A column of their own, a description that is a column's name, and bytes that are no text."""
    try_idea(night, "val_bpb", 0.95, "discard")
    content = night.results.read_bytes()
    header, _, rest = content.partition(b"\n")
    rows = [line + b"\tmine" for line in rest.splitlines()]
    night.results.write_bytes(b"\n".join([header + b"\tnotes", *rows, b""]))
    try_idea(night, "idea", 0.96, "discard")
    with open(night.results, "ab") as file:
        file.write(b"c0ffee1\t0.97\t1.0\tdiscard\t\xff\n")
    rows = experiment.read_results(night.results)
    assert [row["val_bpb"] for row in rows] == [0.9, 0.95, 0.96, 0.97]
    assert "rows: 1 keep, 3 discard" in night.call()


# ---- Older nights, and other people's shells ----
@pytest.mark.parametrize("name", ["2026-11-25", "2026-11-29"])
def test_an_older_night_goes_on(night, name):
    """Its log may have rows of `again`; its commits are not in the clone."""
    old = (ROOT / "nights" / name / "results.tsv").read_text().rstrip("\n").split("\n")
    night.results.write_text("\n".join(old) + "\n")
    rows = experiment.read_results(night.results)
    to_beat = experiment.score_to_beat(rows)
    out = night.call()
    assert f"score to beat: {to_beat}\n" in out and "next: " in out
    night.edit("idea", to_beat - 0.01)
    assert f"0.010000 better than {to_beat:.6f}" in night.call("run", "idea")
    night.call("keep", "idea")
    assert len(experiment.read_results(night.results)) == len(rows) + 1 and night.is_at("best")


def test_somebody_elses_shell_and_clone(clone):
    """With colours, another language, hooks, a branch `best`, and an editor that ends lines as
    Windows does."""
    shell = {"FORCE_COLOR": "1", "LC_ALL": "C", "LANGUAGE": "de"}
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
        if step.startswith("change"):
            if not left:
                return
            night.edit(*left[0])
            command = ["run", left[0][0]]
        elif step.startswith("keep"):
            score = experiment.Log(night.folder / "run.log").score
            to_beat = experiment.score_to_beat(experiment.read_results(night.results))
            command = ["keep" if score < to_beat else "discard", head]
        elif step.startswith("run"):
            command = ["run"]
        elif step.startswith("if it was the machine"):
            wrong = "exit 1\n" in (night.folder / "run.log").read_text()
            remedy = re.search("the machine, (run(?: --repeat)?)", step)[1].split()
            command = ["crash", head] if wrong else remedy
        else:
            assert step.startswith("train.py has a change"), step
            command = ["run", head]
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
                lock.unlink(missing_ok=True)  # as the tool's sentence asks for
        process.wait()


def check_night(night, ideas, kills, seed):
    play(night, ideas, kills, seed)
    rows = night.rows()
    names = [re.split(r", \d+ tok/s| \(", row[4])[0] for row in rows]
    assert names == ["baseline", *(name for name, _ in ideas)]  # each once, in order
    best = 0.9
    for row, (_, score) in zip(rows[1:], ideas):
        assert (row[3] == "crash") == (score == "1")
        if score != "1":
            verdict = "keep" if score < best else "discard"
            assert (row[1], row[3]) == (f"{score:.6f}", verdict)
            best = min(best, score)
    kept = [row[0] for row in rows if row[3] == "keep"]
    assert night.git("rev-parse", "--short", "refs/tags/best") == kept[-1] and night.is_at("best")


def make_ideas(count, seed):
    """Returns pairs of a name and a score, or "1" for a tenth of them, which crash."""
    rng = random.Random(seed)
    scores = [round(0.9 + rng.uniform(-0.05, 0.05), 6) for _ in range(count)]
    return [(f"idea {i}", "1" if rng.random() < 0.1 else score) for i, score in enumerate(scores)]


def test_a_short_night_with_kills(night):
    check_night(night, make_ideas(3, 1), kills=5, seed=1)


@pytest.mark.faults
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_long_night_with_kills(night, seed):
    check_night(night, make_ideas(20, seed), kills=50, seed=seed)
