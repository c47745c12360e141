"""Code that the benchmarks share: whole runs, changed knobs, tables."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
SPARE_SECONDS = 1200  # a run this much longer than its training has hung


# ---- Whole runs ----
class RunError(Exception):
    """A process ended badly; the message is the line in which it says why."""


def last_words(output):
    """Returns the line of a process's output that says why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("error:", "FAIL", "integrity:"))]
    return (told or lines or ["it printed nothing"])[-1]


def run_script(script, environment, limit=None):
    """Runs a script in its folder, for `limit` seconds at most. Returns its seconds and its output.
    Raises RunError."""
    script = Path(script).resolve()
    merged = os.environ | {name: str(value) for name, value in environment.items()}
    # Output goes to a file: a pipe stays open as long as any child of a killed process lives.
    with tempfile.TemporaryFile() as log:
        begun = perf_counter()
        where = {"cwd": script.parent, "env": merged, "stdout": log, "stderr": log}
        try:
            code = subprocess.run([sys.executable, script], timeout=limit, **where).returncode
        except subprocess.TimeoutExpired:
            raise RunError(f"it had not ended after {limit:.0f} s") from None
        seconds = perf_counter() - begun
        log.seek(0)
        output = log.read().decode(errors="replace")
    if code != 0:
        raise RunError(f"exit {code}: {last_words(output)}")
    return seconds, output


def run_training(folder, budget, environment):
    """Runs a folder's train.py for `budget` seconds of training, with a runs folder of its own.
    Returns its record, with the seconds of the whole process outside training. Raises RunError."""
    with tempfile.TemporaryDirectory() as runs:
        own = {"AUTORESEARCH_TIME_BUDGET": budget, "AUTORESEARCH_RUNS": runs} | environment
        seconds, output = run_script(Path(folder, "train.py"), own, budget + SPARE_SECONDS)
        records = list(Path(runs).glob("*.json"))
        if len(records) != 1:
            raise RunError(f"{len(records)} records: {last_words(output)}")
        record = json.loads(records[0].read_text())
    return record | {"outside_training_seconds": seconds - record["training_seconds"]}


# ---- Knobs ----
def substitute(source, setting):
    """Returns the source of train.py with the knobs of a setting, "KNOB=value KNOB=value", changed
    as an agent does it, each in its own line."""
    for item in setting.split():
        name, _, value = item.partition("=")
        line = re.compile(rf"^({re.escape(name)} *=).*?( *#.*)?$", re.M)
        match = line.search(source)
        if not name or not value or match is None:
            raise SystemExit(f"error: {item}: a setting is KNOB=value, with a knob of train.py.")
        before, comment = match.groups(default="")
        changed = f"{before} {value}{comment}"
        source = source[: match.start()] + changed + source[match.end() :]
    return source


def copy_scripts(target, setting, edits=None, folder=ROOT):
    """Copies a folder's train.py and prepare.py, changes the knobs, and then replaces the keys of
    `edits` with their values."""
    source = substitute(Path(folder, "train.py").read_text(), setting)
    for old, new in (edits or {}).items():
        if old not in source:
            raise SystemExit(f"error: train.py no longer holds {old!r}; adapt the benchmark.")
        source = source.replace(old, new)
    Path(target, "train.py").write_text(source)
    Path(target, "prepare.py").write_bytes(Path(folder, "prepare.py").read_bytes())


# ---- Tables ----
def print_row(*columns):
    print("| " + " | ".join(str(column) for column in columns) + " |", flush=True)


def print_header(*columns):
    print_row(*columns)
    print("|" + "---|" * len(columns), flush=True)
