"""
Carries out a night of experiments on train.py. git holds the code, results.tsv the scores.

    uv run tools/experiment.py                  where the night stands, and what to do next
    uv run tools/experiment.py begin nov27      make a branch, the tags start and best, a log
    uv run tools/experiment.py run "an idea"    commit train.py, train it, show its score
    uv run tools/experiment.py keep "an idea, and what was learned"    or discard, or crash
    uv run tools/experiment.py again            train best once more; its new score counts

A run outlives the command that started it; the same command then waits for it. A command that was
killed may be repeated: the next one, whichever it is, completes what it began.
"""

import argparse
import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

RESULTS = Path("results.tsv")
RUN = Path("run.log")  # the run of an idea
AGAIN = Path("again.log")  # a run of best that has no row yet
BEST = Path("best.log")  # the run whose score is to beat
COLUMNS = ["commit", "val_bpb", "memory_gb", "status", "description"]
SHOWN = ("val_bpb", "tokens_per_second", "num_steps", "peak_vram_mb", "curve")
NOTICES = re.compile("run:|width:|rows at a time:|out of memory:|continuing|warning:")
MUST_AGREE = ("profile", "time_budget", "seed", "data", "prepare")
TIME_LIMIT = float(os.environ.get("AUTORESEARCH_TIME_BUDGET") or 300) + 900  # seconds
JUDGE = 'keep, discard or crash "what it was, and what you learned"'


def fail(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


# ---- git ----
def git(*args):
    """Returns what a git command prints. Exits with its first complaint."""
    elsewhere = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # may name another repository
    own = {key: value for key, value in os.environ.items() if key not in elsewhere}
    own |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}  # only write on purpose; in English
    done = subprocess.run(["git", *args], env=own, capture_output=True, text=True)
    if done.returncode:
        complaint = (done.stderr.strip() or "failed").splitlines()[0]
        if "File exists" in complaint:  # a lock that a killed git has left
            complaint += " If no git command is running, delete that file."
        fail(f"git {args[0]}: {complaint}")
    return done.stdout.strip()


def commit_of(name):
    return git("rev-parse", "--short", "--verify", f"{name}^{{commit}}")


def best_commit():
    return commit_of("refs/tags/best")  # a branch may have that name, too


def is_same(commit, other):
    """Whether two hashes, of which one may be shorter, name one commit."""
    return bool(commit and other) and (commit.startswith(other) or other.startswith(commit))


def train_is_changed():
    return bool(git("status", "--porcelain", "--", "train.py"))


# ---- results.tsv ----
def read_results(path=RESULTS):
    """Returns a dictionary per row of results.tsv. A header line replaces COLUMNS; the last
    column may hold tabs. Prints the lines that are left out."""
    columns = COLUMNS
    rows = []
    for line in path.read_text(encoding="utf-8-sig", errors="replace").split("\n"):
        fields = [field.strip() for field in line.split("\t", len(columns) - 1)]
        if "val_bpb" in fields:
            columns = [field.strip() for field in line.split("\t")]
        elif len(fields) == len(columns):
            row = dict.fromkeys(COLUMNS, "") | dict(zip(columns, fields, strict=True))
            rows.append(row | {"status": row["status"].lower()})
        elif line.strip():
            print(f"left out of {path.name}, not {len(columns)} columns: {line[:80]!a}")
    return rows


def append_line(path, line):
    """Appends a line of its own, whatever the file ends with, and whole or not at all."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    size = os.fstat(handle).st_size
    torn = size and os.pread(handle, 1, size - 1) != b"\n"  # the line before was cut off
    content = ("\n" * bool(torn) + line + "\n").encode()
    try:
        if os.write(handle, content) < len(content):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
    except OSError:
        os.ftruncate(handle, size)
        raise
    finally:
        os.close(handle)


def add_row(*fields):
    append_line(RESULTS, "\t".join(" ".join(str(field).split()) for field in fields))


def find_row(rows, commit):
    return next((row for row in reversed(rows) if is_same(row["commit"], commit)), None)


def score_of(row):
    """Returns the score of a row, NaN if it has none."""
    try:
        return float(row["val_bpb"])
    except ValueError:
        return float("nan")


def score_to_beat(rows):
    """Returns the score of the last keep or again, None before the first."""
    scores = [score_of(row) for row in rows if row["status"] in ("keep", "again")]
    return scores[-1] if scores else None


# ---- Runs ----
class Log:
    """What the log of a run says."""

    def __init__(self, path):
        text = path.read_text(errors="replace") if path.exists() else ""
        self.text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # without colours
        header = re.match(r"commit (\w+), attempt (\d+), after (\d+) rows\n", self.text)
        self.commit = header[1] if header else ""
        self.attempt = int(header[2]) if header else 0
        self.rows = int(header[3]) if header else 0  # of results.tsv when it began
        last = re.search(r"^exit (\d+)\n\Z", self.text, re.M)
        self.code = int(last[1]) if last else None
        block = self.text.partition("\n---\n")[2]
        self.block = dict(re.findall(r"^(\w+): (.*)$", block, re.M))
        self.problem = None if self.block.get("integrity") == "ok" else self.find_problem()

    def find_problem(self):
        if self.block.get("integrity"):
            return self.block["integrity"]
        if self.code is None:
            free = shutil.disk_usage(".").free / 2**20
            return f"cut off: it was killed, or the disk was full ({free:.0f} MB are free now)"
        if self.code == 124:
            return f"exit 124, since it took over {TIME_LIMIT:g} s"
        return f"exit {self.code}"

    def is_disturbed(self):
        """Whether the machine, and not the idea, may be to blame for the problem."""
        if not self.problem:
            return False
        flagged = re.match("overtime|startup|evaluation", self.problem)
        return bool(flagged) or self.code in (None, 137, 143)

    def may_be_repeated(self):
        return self.code == 2 or self.is_disturbed() and self.attempt < 2  # 2: set-up or usage

    def memory_gb(self):
        return float(self.block["peak_vram_mb"]) / 1024

    def speed(self):
        return float(self.block["tokens_per_second"])


def lock(handle):
    """Locks an open file until it is closed. Returns False if another process has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a folder on NFS, which has no locks
    return True


def is_running(path):
    """A log stays locked while a process of its run lives."""
    if not path.exists():
        return False
    with open(path, "r+") as file:
        return not lock(file)


def start(path, commit, rows, *command):
    """Starts a command whose output, and last the line `exit CODE`, goes to a log. It survives this
    process. The lock belongs to the open file, which the run has as its standard output."""
    before = Log(path)
    attempt = before.attempt + 1 if is_same(before.commit, commit) else 1
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    if not lock(handle):
        return  # another call was faster: wait for its run
    os.ftruncate(handle, 0)
    header = f"commit {commit}, attempt {attempt}, after {len(rows)} rows\n".encode()
    if shutil.disk_usage(".").free < 2**20 or os.write(handle, header) < len(header):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    shell = ["sh", "-c", '"$@"; printf "\\nexit %s\\n" $?', "sh", "timeout", "-k", "30"]
    own = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    subprocess.Popen(
        [*shell, str(TIME_LIMIT), sys.executable, *command],
        env=own,
        stdin=subprocess.DEVNULL,
        stdout=handle,
        stderr=handle,
        start_new_session=True,
    )
    os.close(handle)
    print(f"training {commit}; to watch it: tail -f {path}", flush=True)


def wait_for(path, seconds):
    """Returns the log of a run that has ended. After `seconds` shows how far it is, and exits."""
    waiting = os.open("tools", os.O_RDONLY)
    alone = lock(waiting)
    if not alone:
        print("another command waits for this run, too: if you started none, another agent works")
        print("in this folder. Stop then, since there must be one at a time.")
    end = time.monotonic() + seconds
    while is_running(path):
        if time.monotonic() > end:
            print("the run's last line:", Log(path).text.strip().rpartition("\n")[2][:200])
            command = "again" if path == AGAIN else "run"
            print(f"next: {command}, which waits for this run")
            raise SystemExit
        time.sleep(0.2)
        alone = alone or lock(waiting)  # the other may have been a short one
    os.close(waiting)
    return Log(path)


def differences(log):
    """Returns what makes a run not comparable with that of the score to beat."""
    best = Log(BEST).block
    pairs = [(key, best.get(key), log.block.get(key)) for key in MUST_AGREE if best]
    return ", ".join(f"{key} {before} -> {now}" for key, before, now in pairs if before != now)


def show(log, rows):
    """Prints what matters of the run of an idea, and how it compares with that of best."""
    best = Log(BEST)
    print(git("log", "-1", '--format=%h "%s"', log.commit))
    lines = [line[:200] for line in log.text.splitlines() if line.strip()]
    for line in filter(NOTICES.match, lines):
        print(line)
    if log.problem:
        print(*lines[-6:], f"no valid score: {log.problem}", sep="\n")
        return
    for key in SHOWN:
        beside = f"; best: {best.block.get(key)}" if best.block else ""
        print(f"{key}: {log.block.get(key)}{beside}")
    changed = differences(log)
    if changed:
        print(f"does not compare with best: {changed}")
        return
    to_beat = score_to_beat(rows)
    if to_beat is None:
        return
    gain = to_beat - float(log.block["val_bpb"])
    word = "better" if gain > 0 else "worse"
    print(f"{abs(gain):.6f} {word} than {to_beat:.6f}, the score to beat")
    faster = log.speed() / best.speed() - 1 if best.block else 0
    if abs(faster) <= 0.1 or (faster > 0) != (gain > 0):  # its speed did not decide
        return
    remedy = "train best `again`"
    if rows[-1]["status"] == "again":  # that is done
        if RUN.stat().st_mtime > BEST.stat().st_mtime:
            return
        remedy = "train the idea again (`run --repeat`)"
    print(f"speed {faster:+.0%}: if the change does not explain it, {remedy} before you judge")


# ---- The night ----
def finish():
    """Completes what a kill interrupted. Returns the rows."""
    if not RESULTS.exists():
        fail('there is no night here; begin one: uv run tools/experiment.py begin "$(date +%b%d)"')
    rows = read_results()
    log = Log(AGAIN)
    if log.commit and not log.problem and not is_running(AGAIN):
        changed = differences(log)
        if changed:
            AGAIN.unlink()
            fail(
                f"best, trained again, does not compare: {changed}; restore what it was, then "
                "`again`."
            )
        later = rows[log.rows :]
        logged = [row for row in later if row["status"] == "again"]
        if not find_row(logged, log.commit):
            text = f"best again: it was {score_to_beat(rows):.6f}, {log.speed():.0f} tok/s"
            score = log.block["val_bpb"]
            add_row(log.commit, score, f"{log.memory_gb():.1f}", "again", text)
        AGAIN.replace(BEST)
        rows = read_results()
    head = commit_of("HEAD")
    if rows and is_same(rows[-1]["commit"], head) and head != best_commit():
        if rows[-1]["status"] in ("keep", "again"):
            git("tag", "-f", "best")
        else:
            git("reset", "-q", "--keep", "refs/tags/best")
    row = find_row(rows, Log(RUN).commit)
    if row and row["status"] == "keep":
        RUN.replace(BEST)
    return rows


def begin(name):
    if RESULTS.exists():
        fail("results.tsv is there: a night is under way. Call this tool without a command.")
    changed = git("status", "--porcelain")
    if changed:
        fail(f"{changed.splitlines()[0]}: not committed; commit or undo it (see git status).")
    for key in ("commit.gpgSign", "tag.gpgSign"):
        git("config", key, "no")  # nobody is there to type a passphrase
    git("config", "core.hooksPath", "/dev/null")
    if not git("config", "--default", "", "--get", "user.email"):
        git("config", "user.name", "autoresearch")
        git("config", "user.email", "autoresearch@localhost")
    branch = f"autoresearch/{name}"
    if git("branch", "--show-current") != branch:
        git("switch", "-q", "-c", branch)
    git("tag", "-f", "start")
    git("tag", "-f", "best")
    for log in (RUN, AGAIN, BEST):
        log.unlink(missing_ok=True)
    unfinished = RESULTS.with_suffix(".log")  # git ignores it
    unfinished.write_text("\t".join(COLUMNS) + "\n")
    unfinished.replace(RESULTS)
    print(f"branch {branch}; next: run, which trains train.py as it is")


def commit_idea(message, rows):
    """Commits train.py, on top of best or in the place of an idea that has no row yet."""
    head = commit_of("HEAD")
    log = Log(RUN)
    if not rows and not (is_same(log.commit, head) and log.problem):
        fail("train.py must first be trained as it is; undo your change, then run.")
    args = ["-m", message] if message else ["--no-edit"]
    if not find_row(rows, head) and head != best_commit():
        args.append("--amend")
    elif not message:
        fail('say in a few words what you try: run "short window 16".')
    git("commit", "-q", *args, "--", "train.py")


def run(message, seconds, repeat):
    rows = finish()
    if is_running(AGAIN):
        fail("best is being trained again; wait for that with `again`.")
    head = commit_of("HEAD")
    if is_running(RUN):
        commit = Log(RUN).commit
        if not is_same(commit, head):
            fail(f"{commit} is being trained, but HEAD is {head}: does another agent work here?")
        if message and train_is_changed():
            fail(f"{head} is still being trained; leave train.py alone and wait with `run`.")
    else:
        if train_is_changed():
            commit_idea(message, rows)
            head = commit_of("HEAD")
        if find_row(rows, head):
            fail(f"HEAD is {head}, which has a row; change train.py, or train best `again`.")
        others = git("diff", "--name-only", "refs/tags/best", "HEAD", "--", ".", ":!train.py")
        if others:
            fail(
                f"{head} changes {others.split()[0]}, too; take that out: git checkout best -- "
                f"{others.split()[0]}; git commit --amend --no-edit"
            )
        log = Log(RUN)
        if repeat or not is_same(log.commit, head) or log.may_be_repeated():
            start(RUN, head, rows, "train.py")
    show(wait_for(RUN, seconds), rows)


def again(seconds):
    rows = finish()
    if is_running(RUN):
        fail("a run is under way; wait for it with `run`.")
    if score_to_beat(rows) is None:
        fail("there is no score to beat yet; train and keep the baseline.")
    if not is_running(AGAIN):
        best = best_commit()
        start(AGAIN, best, rows, "tools/rerun.py", best)
    log = wait_for(AGAIN, seconds)
    if log.problem:
        show(log, rows)
        print("next: again, once an error above is mended")
        raise SystemExit
    before = Log(BEST)
    rows = finish()
    for key in SHOWN:
        print(f"{key} of best: {log.block.get(key)}; it was {before.block.get(key)}")
    idea = Log(RUN)
    if is_same(idea.commit, commit_of("HEAD")) and not idea.problem:
        show(idea, rows)


def judge(status, text):
    rows = finish()
    head = commit_of("HEAD")
    log = Log(RUN)
    if is_running(RUN) or is_running(AGAIN):
        fail("a run is under way; wait for it with `run` or `again`.")
    if find_row(rows, head):
        fail(f"HEAD is {head}, which has a row already; nothing is left to judge.")
    if not is_same(log.commit, head):
        fail(f"HEAD is {head}, which has not been trained; use `run`.")
    if train_is_changed():
        fail("train.py has changed since this run; undo that (git checkout train.py) or `run` it.")
    score = ""
    memory = "0"
    if status == "crash":
        text += f" ({log.problem})" if log.problem else ""
    else:
        if log.problem:
            fail(f"this run has no valid score ({log.problem}); use `run` or `crash`.")
        changed = differences(log)
        if changed:
            fail(
                f"this run does not compare with the score to beat: {changed}; restore what it "
                "was, then `run --repeat`."
            )
        score = log.block["val_bpb"]
        memory = f"{log.memory_gb():.1f}"
        text += f", {log.speed():.0f} tok/s"
    add_row(head, score, memory, status, text)
    finish()
    print(f"{status}: {head} {score} {text}")


def closest_discards(rows):
    """Returns of the last fifteen ideas the six discards that came closest to the score they had to
    beat, closest first."""
    ideas = []
    to_beat = float("nan")
    for row in rows:
        if row["status"] != "again":
            ideas.append((score_of(row) - to_beat, row))
        if row["status"] in ("keep", "again"):
            to_beat = score_of(row)
    discards = [idea for idea in ideas[-15:] if idea[1]["status"] == "discard"]
    return [row["commit"] for _, row in sorted(discards, key=lambda idea: idea[0])[:6]]


def next_step(rows):
    head = commit_of("HEAD")
    if is_running(AGAIN):
        return "again, which waits for the run of best"
    if is_running(RUN):
        return "run, which waits for the run that is under way"
    if not find_row(rows, head):
        log = Log(RUN)
        if not is_same(log.commit, head):
            return f"run, which trains {head}"
        if not log.problem:
            return "restore what it was, then run --repeat" if differences(log) else JUDGE
        if log.code == 2:
            return "do what the error says, then run"
        if log.may_be_repeated():
            return "run, which trains it once more"
        if log.is_disturbed():
            return "run --repeat if the machine was busy, else mend train.py and run, or crash it"
        return 'mend train.py and run, or crash "what it was, and why it failed"'
    if head != best_commit():
        return f"HEAD is {head}, an old commit; git reset --keep best"
    if train_is_changed():
        return 'train.py has a change: run "what it tries", or undo it: git checkout train.py'
    statuses = [row["status"] for row in rows]
    gained = max((i for i, status in enumerate(statuses) if status in ("keep", "again")), default=0)
    if statuses[gained:].count("discard") >= 10:
        return "again, after ten discards in a row"
    ideas = len(statuses) - statuses.count("again") - 1  # without the baseline
    if ideas % 16 == 15 and len(closest_discards(rows)) > 1:  # the sixteenth is the next one
        return f"fifteen ideas are done: try these together: {' '.join(closest_discards(rows))}"
    return 'change train.py, then run "what you try"'


def describe_night(rows):
    """Prints where the night stands, with the idea that waits for a verdict."""
    counts = Counter(row["status"] for row in rows)
    counts = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"branch {git('branch', '--show-current')}; rows: {counts or 'none'}")
    print("best:", git("log", "-1", '--format=%h "%s"', "refs/tags/best"))
    print(f"score to beat: {score_to_beat(rows)}")  # None before the baseline is kept
    head = commit_of("HEAD")
    idea = Log(RUN)
    if not find_row(rows, head) and is_same(idea.commit, head) and not is_running(RUN):
        show(idea, rows)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("begin", help="begin a night").add_argument("name", help="such as nov27")
    commands.add_parser("run", help="train an idea").add_argument("message", nargs="?")
    commands.choices["run"].add_argument("--repeat", action="store_true", help="even if it has run")
    commands.add_parser("again", help="train best once more")
    for name in ("run", "again"):
        commands.choices[name].add_argument(
            "--wait", type=float, default=540, help="seconds until it says how far it is (540)"
        )
    for status in ("keep", "discard", "crash"):
        commands.add_parser(status, help="log, then move or restore best").add_argument(
            "description"
        )
    args = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[1])
    try:
        if args.command == "begin":
            begin(args.name)
            return
        if args.command == "run":
            run(args.message, args.wait, args.repeat)
        elif args.command == "again":
            again(args.wait)
        elif args.command:
            judge(args.command, args.description)
        else:
            describe_night(finish())
        print("next:", next_step(read_results()))
    except OSError as error:
        fail(f"{error}; nothing was lost. Free space, then repeat this.")


if __name__ == "__main__":
    main()
