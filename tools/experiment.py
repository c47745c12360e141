"""
Carries out a night of experiments on train.py. git holds the code, results.tsv the verdicts.

    uv run tools/experiment.py                  where the night stands, and what to do next
    uv run tools/experiment.py begin nov27      make a branch, the tags start and best, a log
    uv run tools/experiment.py run "an idea"    commit train.py, train it, show its score
    uv run tools/experiment.py keep "what was learned"    or discard, or crash

Only commands with a name change anything, one at a time. A run outlives the command that started
it. What a kill can leave, and the command that goes on from there:

    a branch without results.tsv                    begin
    HEAD, a commit after best, without a run        run
    run.log without its last line, `exit CODE`      run, which waits for it or trains again
    run.log of HEAD, with no row since it began     keep, discard or crash
    a row, but `best` or HEAD has not moved         run, keep, discard or crash
"""

import argparse
import contextlib
import errno
import fcntl
import functools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

RESULTS = Path("results.tsv")
RUN = Path("run.log")  # the run of HEAD
BEST = Path("best.log")  # the run whose score is to beat
COLUMNS = ["commit", "val_bpb", "memory_gb", "status", "description"]
SHOWN = """
    val_bpb tokens_per_second num_steps startup_seconds eval_seconds peak_vram_mb attention curve
""".split()
NOTICES = re.compile("width:|out of memory:|continuing|warning:")
EXIT = re.compile(r"^exit (\d+)\n\Z", re.M)  # the last line of a run that has ended
MUST_AGREE = ("profile", "time_budget", "seed", "data", "prepare", "device", "threads", "torch")
TIME_LIMIT = float(os.environ.get("AUTORESEARCH_TIME_BUDGET") or 300) + 900  # seconds
SAVE = (
    "save your edit: git diff HEAD train.py > edit.log; git checkout HEAD train.py. Then `run`, or "
    "judge the run, and put the edit back: git apply -3 edit.log"
)
MOVE = "restore that and `run --repeat`; if you cannot, crash it, `run --repeat` best and keep that"
FEW_TOKENS = 5  # million
FAR = 0.3  # factors e of tokens, beyond which runs do not compare
FIRST_CODE = 12  # ideas, before the first that turns only knobs; later one in KNOB_SHARE may
KNOB_SHARE = 4
COMBINE_AFTER = 15  # ideas
AUTHOR = ("user.name=autoresearch", "user.email=autoresearch@localhost")  # of the commits


def fail(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


# ---- git ----
def git(*args, missing=None):
    """Returns what a git command prints; if it fails, `missing`, or exits with its complaint."""
    # git writes only on purpose, and in English; nobody is there to type a passphrase.
    own = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    settings = ("commit.gpgSign=no", "tag.gpgSign=no", "core.hooksPath=/dev/null", *AUTHOR)
    command = ["git", *(part for setting in settings for part in ("-c", setting)), *args]
    done = subprocess.run(command, env=own, capture_output=True, text=True, errors="replace")
    if not done.returncode:
        return done.stdout.strip()
    if missing is not None:
        return missing
    complaint = " ".join((done.stderr + done.stdout).split())[:600]
    return fail(f"git {args[0]}: {complaint}")


def commit_of(name, missing=None):
    return git("rev-parse", "--verify", f"{name}^{{commit}}", missing=missing)[:7]


def best_commit():
    best = commit_of("refs/tags/best", missing="")  # a branch may have that name, too
    return best or fail("the tag best is gone: git tag best COMMIT, the last keep of results.tsv.")


def describe(commit):
    is_baseline = commit == commit_of("refs/tags/start", missing="")
    subject = "baseline" if is_baseline else git("log", "-1", "--format=%s", commit)
    return f'{commit} "{subject[:100]}"'


def train_differs(commit):
    """Whether train.py has another content than in a commit."""
    return bool(git("diff", "--name-only", commit, "--", "train.py"))


@functools.cache
def code_of(commit):
    """Returns train.py of a commit without its block of knobs; "" if the commit is gone."""
    text = git("show", f"{commit}:./train.py", missing="")
    return re.sub(r"^# ---- Knobs.*?(?=^# ---- )", "", text, flags=re.S | re.M)


# ---- results.tsv ----
def read_results(path=RESULTS):
    """Returns a dictionary per row, whatever follows the five columns. Prints what is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8-sig", errors="replace").split("\n"):
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) >= len(COLUMNS) and fields[0] != COLUMNS[0]:
            known = {"commit": fields[0][:7], "status": fields[3].lower()}
            rows.append(dict(zip(COLUMNS, fields)) | known | {"val_bpb": score_of(fields[1])})
        elif line.strip() and fields[0] != COLUMNS[0]:
            print(f"left out of {path.name}, not {len(COLUMNS)} columns: {line[:80]!a}")
    return rows


def append_line(path, line):
    """Appends a line of its own, whatever the file ends with, and whole or not at all."""
    with open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        torn = file.read() not in (b"", b"\n")  # the line before was cut off
        content = ("\n" * torn + line + "\n").encode()
        if file.write(content) < len(content):
            file.truncate(size)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))


def add_row(*fields):
    append_line(RESULTS, "\t".join(" ".join(str(field).split()) for field in fields))


def find_row(rows, commit):
    return next((row for row in reversed(rows) if row["commit"] == commit), None)


def score_of(text):
    """Returns a score, NaN if the text is none."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan


def sets_score(row):
    return row["status"] in ("keep", "again")  # older nights trained best `again`


def score_to_beat(rows):
    """Returns the score of the last keep, None before the first."""
    scores = [row["val_bpb"] for row in rows if sets_score(row)]
    return scores[-1] if scores else None


def ideas_of(rows):
    """Returns the rows of ideas, each once: what follows the first keep, which is the baseline, but
    for runs of best."""
    baseline = next((i for i, row in enumerate(rows) if sets_score(row)), len(rows))
    known = {row["commit"] for row in rows[: baseline + 1]}
    first = {}
    for row in rows:
        if row["commit"] not in known:
            first.setdefault(row["commit"], row)
    return [row for row in first.values() if row["status"] != "again"]


# ---- Runs ----
class Log:
    """What the log of a run says."""

    def __init__(self, path):
        text = path.read_text(errors="replace") if path.exists() else ""
        self.text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # without colours
        header = re.match(r"commit (\w+), after (\d+) rows, at (\d+)\n", self.text)
        self.commit = header[1] if header else ""
        self.rows_before = int(header[2]) if header else 0  # of results.tsv
        self.began = int(header[3]) if header else 0
        last = EXIT.search(self.text)
        self.code = int(last[1]) if last else None
        block = self.text.rpartition("\nevaluating on ")[2].partition("\n---\n")[2]
        lines = re.findall(r"^(\w+): (.*)$", block, re.M)
        self.block = dict(reversed(lines))  # the first of a key counts: train.py may print later
        self.score = score_of(self.block.get("val_bpb"))
        self.problem = self.find_problem()

    def find_problem(self):
        """Returns why the run has no valid score, None if it has one."""
        integrity = self.block.get("integrity")
        if integrity == "ok":
            return None if math.isfinite(self.score) else "val_bpb is no number"
        if integrity:
            return integrity
        if self.code is None:
            return "cut off: it was killed, or the disk was full"
        return f"exit {self.code}"

    def is_of(self, commit, rows):
        """Whether it is the run of a commit and has no verdict yet."""
        return self.commit == commit and not find_row(rows[self.rows_before :], commit)

    def number(self, key):
        return score_of(self.block.get(key))

    def progress(self):
        """Returns pairs (per cent of the time budget, loss)."""
        lines = re.findall(r"^step +\d+ +(\d+)% loss ([\d.]+)", self.text, re.M)
        return [(int(share), float(loss)) for share, loss in lines]


def lock(handle, kind=fcntl.LOCK_EX):
    """Locks an open file until it is closed. Returns False if another process has the lock."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a folder on NFS, which has no locks
    return True


def is_running():
    """Whether the log is locked and lacks its last line; a child of the run may keep the lock."""
    if not RUN.exists():
        return False
    with open(RUN, errors="replace") as file:  # not parsed whole, five times per second
        return not EXIT.search(file.read()[-20:]) and not lock(file, fcntl.LOCK_SH)


def start(commit, rows):
    """Trains train.py. Its output, and last the line `exit CODE`, goes to RUN. The run survives
    this process. The lock belongs to the open file, which the run has as its standard output."""
    new = RUN.with_suffix(".new.log")  # the old one stays until this one is sure
    new.write_text(f"commit {commit}, after {len(rows)} rows, at {time.time():.0f}\n")
    handle = os.open(new, os.O_WRONLY | os.O_APPEND)
    lock(handle)
    new.replace(RUN)
    # The first shell ends at once: an agent's client may end all that descends from its command.
    shell = ["sh", "-c", '("$@"; printf "\\nexit %s\\n" $?) &', "sh"]
    limit = ["timeout", "-k", "30", str(TIME_LIMIT)] if shutil.which("timeout") else []
    streams = {"stdin": subprocess.DEVNULL, "stdout": handle, "stderr": handle}
    command = [*shell, *limit, sys.executable, "train.py"]
    subprocess.run(command, start_new_session=True, check=True, **streams)
    os.close(handle)
    print(f"training {commit}", flush=True)


def wait(seconds):
    """Returns the log of the run once that has ended. After `seconds` exits."""
    end = time.monotonic() + seconds
    while is_running():
        if time.monotonic() > end:
            show_progress()
            print("next: run, which waits for this run")
            raise SystemExit
        time.sleep(0.2)
    return Log(RUN)


def show_progress():
    """Prints how far the run is, and what best's loss was there."""
    log = Log(RUN)
    minutes, seconds = divmod(int(time.time() - log.began), 60)
    line = f"{minutes}:{seconds:02d} elapsed, not training yet"
    if "\nevaluating on " in log.text:
        line = f"{minutes}:{seconds:02d} elapsed, evaluating"
    elif log.progress():
        share, loss = log.progress()[-1]
        line = f"{minutes}:{seconds:02d} elapsed, {share} % of the training, loss {loss:.4f}"
        before = [loss for at, loss in Log(BEST).progress() if at <= share]
        line += f"; best had {before[-1]:.4f} here" if before else ""
    print(line)


def differences(log):
    """Returns what makes a run not comparable with that of the score to beat."""
    best = Log(BEST).block
    pairs = [(key, best[key], log.block.get(key)) for key in MUST_AGREE if key in best]
    return ", ".join(f"{key} {before} -> {now}" for key, before, now in pairs if before != now)


def is_elsewhere(log):
    """Whether an idea's run cannot be judged; a new run of best sets the score to beat anew."""
    return bool(differences(log)) and log.commit != best_commit()


def tokens_ratio(log):
    """Returns how many times the tokens of best's run a run saw, NaN if that is unknown."""
    return log.number("total_tokens_M") / Log(BEST).number("total_tokens_M")


def is_far(log, ratio=1.0):
    """Whether the machine was so much faster or slower in an idea's run than in best's that they
    do not compare. `ratio` is the speed of the idea's steps over that of best's."""
    machine = tokens_ratio(log) / ratio
    return machine > 0 and abs(math.log(machine)) > FAR and log.commit != best_commit()


def loss_per_e(tokens):
    """Returns the bits per byte that a factor e of tokens is worth in a run of so many million. On
    two cores 0.18 to 0.35 were measured below 4 million, 0.12 and 0.21 from 4 to 5, and 0.05 to
    0.145 above. Chinchilla's law (arXiv 2203.15556) gives `full` 0.13."""
    return 0.19 if tokens < FEW_TOKENS else 0.12


def compare(log, best, to_beat, ratio):
    """Prints how two runs compare, as they are and as if the machine had been as fast."""

    def versus(score):
        return f"{score:.6f}, {abs(to_beat - score):.6f} {'better' if score < to_beat else 'worse'}"

    print(f"{versus(log.score)} than {to_beat:.6f}, the score to beat")
    tokens = tokens_ratio(log)
    times = f"{ratio} times " if ratio != 1 else ""
    line = f"at {times}best's number of tokens:"
    if is_far(log, ratio):
        print(f"{line} unknown, since it saw {tokens:.2f} times as many")
        print("if that was the machine, `run --repeat`; if it stays as it is, crash this run,")
        print("`run --repeat` best, keep that, and apply this idea again")
    elif tokens > 0:
        per_e = loss_per_e(best.number("total_tokens_M"))
        flops = log.number("flops_per_token") / best.number("flops_per_token") - 1
        work = f" (FLOPs per token: {flops:+.0%})" if abs(flops) > 0.005 else ""
        unless = "" if times else ", if it costs no time"
        print(f"{line} {versus(log.score + per_e * math.log(tokens / ratio))}{unless}{work}")


def show(log, rows, ratio=1.0):
    """Prints what matters of a run, and how it compares with that of best."""
    best = Log(BEST)
    kind = ""
    if log.commit != best_commit():
        kind = "; knobs alone" if is_knob(log.commit) else "; code"
    print(describe(log.commit) + kind)
    lines = [line[:200] for line in log.text.splitlines() if line.strip() and line[:5] != "exit "]
    for line in filter(NOTICES.match, lines):
        print(line)
    if "integrity" not in log.block:
        print(*lines[-6:], sep="\n")
    for key in filter(log.block.get, SHOWN):
        beside = f"; best: {best.block.get(key)}" if best.block else ""
        if key != "val_bpb" or not log.problem:
            print(f"{key}: {log.block[key]}{beside}")
    if log.problem:
        print(f"no valid score: {log.problem}")
        return
    changed = differences(log)
    if changed:
        print(f"does not compare with best: {changed}")
    elif score_to_beat(rows) is not None and log.commit != best_commit():
        compare(log, best, score_to_beat(rows), ratio)


# ---- The night ----
def is_knob(commit):
    """Whether a commit changes only knobs of train.py."""
    return code_of(commit) == code_of(f"{commit}^") != ""


@contextlib.contextmanager
def changing():
    """Keeps other commands from changing the night. Completes what a kill interrupted, and yields
    the rows."""
    handle = os.open("tools", os.O_RDONLY)
    if not lock(handle):
        fail("another command is changing this night at this moment; repeat this.")
    try:
        rows = read_results()
        complete(rows)
        yield rows
    finally:
        os.close(handle)


def complete(rows):
    """Moves `best` to a kept commit, or goes back to it from another that has a row."""
    head = commit_of("HEAD")
    if rows and rows[-1]["commit"] == head and head != best_commit():
        if sets_score(rows[-1]):
            git("tag", "-f", "best")
        else:
            go_back(head)
    log = Log(RUN)
    row = find_row(rows[log.rows_before :], log.commit)
    if row and row["status"] == "keep":
        RUN.replace(BEST)


def go_back(head):
    if train_differs("HEAD") and train_differs("refs/tags/best"):
        fail(f"{head} has a verdict, and train.py has changed since; {SAVE}")
    git("checkout", "-q", "refs/tags/best", "--", "train.py")  # first: by HEAD a kill is noticed
    git("reset", "-q", "refs/tags/best")


def begin(name):
    if RESULTS.exists():
        fail("results.tsv is there: a night is under way. Call this tool without a command.")
    if git("rev-parse", "--git-dir") != git("rev-parse", "--git-common-dir"):
        fail("this is a worktree, which shares the tag best with others; make a clone.")
    changed = git("status", "--porcelain", "--untracked-files=no")
    if changed:
        fail(f"{changed.splitlines()[0]}: not committed; commit or undo it (see git status).")
    branch = f"autoresearch/{name}"
    git("check-ref-format", "--branch", branch)
    git("branch", branch, missing="")  # a begin that was killed has made it
    if commit_of(f"refs/heads/{branch}") != commit_of("HEAD"):
        fail(f"branch {branch} is there, at another commit; choose another name.")
    git("switch", "-q", branch)
    git("tag", "-f", "start")
    git("tag", "-f", "best")
    for log in (RUN, BEST):
        log.unlink(missing_ok=True)
    add_row(*COLUMNS)  # last, since it says that the night has begun
    print(f"branch {branch}; next: run, which trains train.py as it is")


def commit_idea(message, rows):
    """Commits train.py after best, or in the place of a commit after it that has no score."""
    head = commit_of("HEAD")
    log = Log(RUN)
    if log.is_of(head, rows) and not log.problem:
        fail(f"{head} has a score and no verdict; {SAVE}")
    if not rows and (log.commit != head or not log.problem):
        fail("train.py must first be trained as it is; undo your change, then run.")
    args = ["-m", message] if message else ["--no-edit"]
    if head != best_commit():
        args.append("--amend")
    elif not message:
        fail('say in a few words what you try: run "short window 16".')
    git("commit", "-q", *args, "--", "train.py")


def is_astray(head, rows):
    """Whether HEAD is neither best nor a new commit after it."""
    best = best_commit()
    if head == best:
        return False
    return bool(find_row(rows, head)) or commit_of("HEAD^", missing="") != best


def prepare_run(message, rows, repeat):
    """Commits train.py and starts its run, unless that is under way or has ended."""
    head = commit_of("HEAD")
    running = is_running()
    log = Log(RUN)  # after that, since a run may end at this moment
    if running:
        if log.commit != head:
            fail(f"{log.commit} is being trained, but HEAD is {head}: does another agent work?")
        if message and train_differs("HEAD"):
            fail(f"{head} is still being trained; {SAVE}")
        return
    if is_astray(head, rows):
        fail(f"HEAD is {head}, which does not follow best; `git reset --soft best`, then run.")
    if train_differs("HEAD"):
        commit_idea(message, rows)
        head = commit_of("HEAD")
    if not log.is_of(head, rows):
        if find_row(rows, head) and not repeat:
            fail(f"HEAD is {head}, which has a row; change train.py first, or `run --repeat` best.")
        start(head, rows)
    elif log.problem and (repeat or log.code in (None, 2)):
        start(head, rows)  # with code 2 it was not set up
    elif repeat and (is_elsewhere(log) or is_far(log)):
        start(head, rows)
    elif repeat:
        print("this run has ended and waits for a verdict; it is not repeated")


def run(message, seconds, repeat, ratio):
    if ratio <= 0:
        fail("--ratio is above 0; take the one that benchmarks/compare.py prints.")
    with changing() as rows:
        prepare_run(message, rows, repeat)
    show(wait(seconds), rows, ratio)


def judge(status, text):
    with changing() as rows:
        head = commit_of("HEAD")
        if is_running():
            fail("a run is under way; wait for it with `run`.")
        log = Log(RUN)
        if not log.is_of(head, rows):
            state = "has a row already" if find_row(rows, head) else "has not been trained"
            fail(f"HEAD is {head}, which {state}; next: {next_step(rows)}.")
        if train_differs("HEAD"):
            fail(f"train.py has changed since this run; {SAVE}")
        if status == "discard" and score_to_beat(rows) is None:
            fail("nothing is there to go back to; keep this run, whose score is then to be beaten.")
        subject = git("log", "-1", "--format=%s")
        if head != best_commit() and not text.startswith(subject):
            text = f"{subject}: {text}"
        score, memory = "", "0"
        if status == "crash":
            text += f" ({log.problem or f'val_bpb {log.score:.6f}'})"
        elif log.problem:
            fail(f"this run has no valid score ({log.problem}); mend it and `run`, or `crash` it.")
        elif is_elsewhere(log):
            fail(f"this run does not compare with best: {differences(log)}; {MOVE}.")
        else:
            score = log.block["val_bpb"]
            memory = f"{log.number('peak_vram_mb') / 1024:.1f}"
            text += f", {log.block.get('tokens_per_second')} tok/s"
        add_row(head, score, memory, status, text)
        complete(read_results())
    print(f"{status}: {head} {text}")


def due_combination(rows):
    """Returns of the last fifteen ideas the discards that came closest to the score they had to
    beat, closest first; none if a combination is among these ideas."""
    ideas = ideas_of(rows)[-COMBINE_AFTER:]
    done = any(idea["description"].lower().startswith("combination") for idea in ideas)
    if done or len(ideas) < COMBINE_AFTER:
        return []
    discards = []
    for idea in ideas:
        if idea["status"] == "discard":
            to_beat = score_to_beat(rows[: rows.index(idea)]) or math.nan
            discards.append((idea["val_bpb"] - to_beat, idea["commit"]))
    return [commit for _, commit in sorted(discards)[:6]]


def count_ideas(rows):
    """Returns how many ideas were code and how many knobs, and what the next one may be."""
    commits = [row["commit"] for row in ideas_of(rows)]
    knobs = sum(is_knob(commit) for commit in commits)
    total = len(commits)
    allowed = total >= FIRST_CODE and KNOB_SHARE * (knobs + 1) <= total + 1
    following = "code, or a knob of a part that was kept" if allowed else "code"
    return f"ideas {total}: {total - knobs} code, {knobs} knobs; next one: {following}"


def next_step(rows):
    head = commit_of("HEAD")
    log = Log(RUN)
    if is_running():
        return "run, which waits for the run that is under way"
    if log.is_of(head, rows) and not log.problem:
        if train_differs("HEAD"):
            return SAVE
        if head == best_commit():
            return 'keep "baseline", which makes this the score to beat'
        return MOVE if is_elsewhere(log) else 'keep or discard "what you learned"'
    if log.is_of(head, rows):
        if log.code == 2:
            return "do what the error says, then run"
        again = "run" if log.code is None else "run --repeat"
        return f'if it was the machine, {again}; else mend train.py and run, or crash "why"'
    if head != best_commit():
        if rows and rows[-1]["commit"] == head:
            return f"run, which completes the {rows[-1]['status']} of {head}"
        if is_astray(head, rows):
            return f"git reset --soft best, since HEAD, {head}, does not follow it"
        return f"run, which trains {head}"
    if not rows:
        return f"run, which trains {head} as it is"
    if train_differs("HEAD"):
        return 'train.py has a change: run "what it tries", or git checkout HEAD train.py'
    if score_to_beat(rows) is None:
        return "run --repeat, which trains best again, since no run of it was kept"
    return 'change train.py, then run "what you try"'


def describe_night(branch, rows):
    """Prints where the night stands, with the run that is under way or waits for a verdict."""
    counts = Counter(row["status"] for row in rows)
    counts = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"branch {branch}; rows: {counts or 'none'}")
    print("best:", describe(best_commit()))
    print(f"score to beat: {score_to_beat(rows)}")  # None before the baseline is kept
    for i, row in list(enumerate(rows))[-5:]:
        gain = (score_to_beat(rows[:i]) or math.nan) - row["val_bpb"]
        gain = f"{gain:+.4f}" if math.isfinite(gain) else "none"
        print(f"  {row['commit']} {row['status']:7} {gain:7} {row['description'][:120]}")
    ideas = ideas_of(rows)
    kept = [i for i, idea in enumerate(ideas, 1) if idea["status"] == "keep"]
    since = len(ideas) - max(kept, default=0)
    ends = [row["commit"] for row in ideas[:1] + ideas[-1:]]
    made = [int(git("log", "-1", "--format=%ct", commit, missing="0")) for commit in ends]
    hours = (made[-1] - made[0]) / 3600 if made else 0
    pace = f"; per hour: {(len(ideas) - 1) / hours:.1f}" if hours > 0 else ""
    print(f"ideas since the last keep: {since}{pace}")
    if is_running():
        show_progress()
    elif Log(RUN).is_of(commit_of("HEAD"), rows):
        show(Log(RUN), rows)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("begin").add_argument("text", metavar="NAME")
    train = commands.add_parser("run")
    train.add_argument("text", nargs="?", help="the idea in a few words")
    train.add_argument(
        "--repeat", action="store_true", help="train best anew, or an idea without a fair score"
    )
    train.add_argument("--wait", type=float, default=540, help="at most so many seconds (540)")
    train.add_argument("--ratio", type=float, default=1.0, help="what benchmarks/compare.py prints")
    for verdict in ("keep", "discard", "crash"):
        commands.add_parser(verdict).add_argument("text", help="what was learned")
    args = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    os.chdir(Path(__file__).resolve().parents[1])
    try:
        if args.command == "begin":
            begin(args.text)
            return
        if not RESULTS.exists():
            fail("there is no night here; uv run tools/experiment.py begin NAME begins one.")
        branch = git("branch", "--show-current")
        if not branch.startswith("autoresearch/"):
            fail(f"this is branch {branch or 'of no name'}, not the night's; git switch to it.")
        if args.command == "run":
            run(args.text, args.wait, args.repeat, args.ratio)
        elif args.command:
            judge(args.command, args.text)
        rows = read_results()
        if not args.command:
            describe_night(branch, rows)
        print(f"next: {next_step(rows)}\n{count_ideas(rows)}")
        closest = due_combination(rows)
        if len(closest) > 1:
            print(f'due: apply {" ".join(closest)} to best, then run "combination of ..."')
    except OSError as error:
        fail(f"{error}; nothing was lost. Mend that, then repeat this.")


if __name__ == "__main__":
    main()
