"""What several benchmarks share: whole runs in a folder, changed knobs, tokens, tables."""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
SPARE_SECONDS = 1200  # beside its training, after which a run counts as hung


# ---- Whole runs ----
class RunError(Exception):
    """A process that did not end as it should; the message is the line in which it says why."""


@dataclass
class Finished:
    """A run of train.py that has a score."""

    record: dict  # the JSON that the run wrote
    seconds: float  # from the start of the process to its end

    @property
    def outside(self):
        """Seconds that were not training."""
        return self.seconds - self.record["training_seconds"]


def last_words(output):
    """The line of a process's output that tells why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("error:", "FAIL", "integrity:"))]
    if told:
        return told[-1]
    return lines[-1] if lines else "it said nothing"


def run_script(script, environment, limit=None, arguments=()):
    """Runs a script in its folder, for `limit` seconds at most. Returns its seconds and its output.
    Raises RunError."""
    script = Path(script).resolve()
    merged = os.environ | {name: str(value) for name, value in environment.items()}
    # Into a file: a pipe stays open for as long as any child of a killed process lives.
    with tempfile.TemporaryFile() as log:
        begun = perf_counter()
        command = [sys.executable, script, *arguments]
        process = subprocess.Popen(command, cwd=script.parent, env=merged, stdout=log, stderr=log)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            raise RunError(f"it had not ended after {limit:.0f} s") from None
        finally:
            process.terminate()  # which tools/rerun.py passes on
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
        seconds = perf_counter() - begun
        log.seek(0)
        output = log.read().decode(errors="replace")
    if process.returncode != 0:
        raise RunError(f"exit {process.returncode}: {last_words(output)}")
    return seconds, output


def run_training(folder, budget, environment=None):
    """Runs the train.py of a folder for `budget` seconds of training; its record goes into no folder of runs. Returns it Finished. Raises RunError."""
    with tempfile.TemporaryDirectory() as runs:
        own = {"AUTORESEARCH_TIME_BUDGET": budget, "AUTORESEARCH_RUNS": runs}
        own |= environment or {}
        seconds, output = run_script(Path(folder, "train.py"), own, budget + SPARE_SECONDS)
        records = list(Path(runs).glob("*.json"))
        if len(records) != 1:
            raise RunError(f"{len(records)} records: {last_words(output)}")
        return Finished(json.loads(records[0].read_text()), seconds)


# ---- Knobs ----
def substitute(source, setting):
    """The source of train.py with the knobs of a setting, "KNOB=value KNOB=value", changed as an
    agent changes them: each in its own line."""
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


def copy_scripts(folder, setting="", edits=None, script=ROOT / "train.py"):
    """Copies a train.py and the prepare.py beside it into a folder, with the knobs changed and then
    the texts that are keys of `edits` replaced by their values."""
    folder = Path(folder)
    source = substitute(script.read_text(), setting)
    for old, new in (edits or {}).items():
        if old not in source:
            raise SystemExit(f"error: train.py no longer holds {old!r}; adapt the benchmark.")
        source = source.replace(old, new)
    (folder / "train.py").write_text(source)
    (folder / "prepare.py").write_bytes(script.with_name("prepare.py").read_bytes())


# ---- Tokens ----
def training_documents():
    """Yields those that were prepared, uint16, in the order of the shards."""
    import prepare

    import numpy as np

    tokens = np.memmap(prepare.ROOT / prepare.TOKENS_FILE, dtype="<u2", mode="r").view(np.ndarray)
    for begin, end in pairwise(np.load(prepare.ROOT / prepare.ENDS_FILE)):
        yield tokens[begin:end]


def random_tokens(vocab_size, shape, device):
    """int64 of that shape. Token i has a share of about 1 / (i + 1) (Zipf's law): as in a text a few
    are frequent, and where a token repeats, the gradient of its embedding takes longer to add up."""
    import torch

    return torch.rand(shape, device=device).mul(math.log(vocab_size)).exp().long() - 1


# ---- Tables ----
def print_row(*columns):
    print("| " + " | ".join(str(column) for column in columns) + " |", flush=True)


def print_header(*columns):
    print_row(*columns)
    print("|" + "---|" * len(columns), flush=True)
