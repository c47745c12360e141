"""Code that the benchmarks share: whole runs, changed knobs, steps in this process, tables."""

import ast
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
SPARE_SECONDS = 1200  # a run this much longer than its training has hung


# ---- Whole runs ----
class RunError(Exception):
    """A process ended badly; the message is the line in which it says why."""


@dataclass
class Finished:
    """A run of train.py that has a score."""

    record: dict  # the JSON that the run wrote
    seconds: float  # from the start of the process to its end

    @property
    def outside(self):
        """Returns the seconds that were not training."""
        return self.seconds - self.record["training_seconds"]


def last_words(output):
    """Returns the line of a process's output that says why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("error:", "FAIL", "integrity:"))]
    if told:
        return told[-1]
    return lines[-1] if lines else "it printed nothing"


def run_script(script, environment, limit=None):
    """Runs a script in its folder, for `limit` seconds at most. Returns its seconds and its output.
    Raises RunError."""
    script = Path(script).resolve()
    merged = os.environ | {name: str(value) for name, value in environment.items()}
    # Output goes to a file: a pipe stays open as long as any child of a killed process lives.
    with tempfile.TemporaryFile() as log:
        begun = perf_counter()
        command = [sys.executable, script]
        process = subprocess.Popen(command, cwd=script.parent, env=merged, stdout=log, stderr=log)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            raise RunError(f"it had not ended after {limit:.0f} s") from None
        finally:
            process.terminate()  # tools/rerun.py passes it on
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
    """Runs a folder's train.py for `budget` seconds of training, with a runs folder of its own.
    Returns a Finished. Raises RunError."""
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


def copy_scripts(folder, setting="", edits=None, script=ROOT / "train.py"):
    """Copies a train.py and the prepare.py next to it into a folder, changes the knobs, and then
    replaces the keys of `edits` with their values."""
    folder = Path(folder)
    source = substitute(script.read_text(), setting)
    for old, new in (edits or {}).items():
        if old not in source:
            raise SystemExit(f"error: train.py no longer holds {old!r}; adapt the benchmark.")
        source = source.replace(old, new)
    (folder / "train.py").write_text(source)
    (folder / "prepare.py").write_bytes(script.with_name("prepare.py").read_bytes())


# ---- Steps in this process ----
def random_tokens(vocab_size, shape, device):
    """Draws tokens; the frequency of token i falls as about 1 / (i + 1) (Zipf's law). As in text, a
    few are frequent, and the gradient of a repeated token's embedding takes longer to sum up."""
    import torch

    return torch.rand(shape, device=device).mul(math.log(vocab_size)).exp().long() - 1


PARTS = ("step", "forward", "backward", "update")


@dataclass
class Subject:
    """Holds what a run of train.py has built when its training begins."""

    train: object  # the module
    device: object
    model: object
    compiled_model: object
    optimizer: object
    attention: str
    rows: int
    micro_batches: int
    batch: tuple  # inputs, targets [rows, T] of random tokens


def import_train(folder=ROOT):
    """Imports a folder's train.py and the prepare.py next to it."""
    for module in ("prepare", "train"):
        sys.modules.pop(module, None)
    sys.path.insert(0, str(folder))
    try:
        import train
    finally:
        sys.path.pop(0)
    return train


def set_knobs(train, setting):
    """Changes knobs of the module; `setting` is a list of "KNOB=value"."""
    for item in setting:
        name, _, value = item.partition("=")
        if not hasattr(train, name):
            raise SystemExit(f"error: train.py has no knob {name}; a setting is KNOB=value.")
        try:
            setattr(train, name, ast.literal_eval(value))
        except (SyntaxError, ValueError):
            raise SystemExit(f"error: {item}: the value must be a Python literal.") from None


def build(train, dtype=None):
    """Builds the Subject of a train.py that was just imported, without a loader or a cache."""
    import torch

    prepare = sys.modules["prepare"]
    torch.set_float32_matmul_precision("high")
    device = prepare.DEVICE
    if device.type == "cpu":
        train.tune_cpu()
    config = train.derive_config(prepare.VOCAB_SIZE, dtype or train.choose_dtype(device))
    attention, attend = train.choose_attention(device, config)
    parts = (config, attend, train.COMPILE and train.can_compile(device))
    rows = train.warm_up(*parts)
    model, compiled_model, optimizer = train.build(*parts)
    train.set_schedules(optimizer, 0.0, 0)
    tokens = random_tokens(prepare.VOCAB_SIZE, (2, rows, train.MAX_SEQ_LEN), device)
    return Subject(
        train=train,
        device=device,
        model=model,
        compiled_model=compiled_model,
        optimizer=optimizer,
        attention=attention,
        rows=rows,
        micro_batches=train.accumulation_steps(rows),
        batch=tuple(tokens),
    )


def update_and_clear(subject):
    """Ends a step as train_step does, but for the scale that only fp16 has."""
    subject.optimizer.step()
    subject.model.zero_grad(set_to_none=True)


def take_step(subject):
    """Takes a step as train_step does. Returns its seconds in the order of PARTS."""
    import torch

    def now():
        if subject.device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    forward = 0.0
    backward = 0.0
    for _ in range(subject.micro_batches):
        begun = now()
        loss = subject.compiled_model(*subject.batch) / subject.micro_batches
        middle = now()
        loss.backward()
        forward += middle - begun
        backward += now() - middle
    begun = now()
    update_and_clear(subject)
    update = now() - begun
    return forward + backward + update, forward, backward, update


# ---- Tables ----
def print_row(*columns):
    print("| " + " | ".join(str(column) for column in columns) + " |", flush=True)


def print_header(*columns):
    print_row(*columns)
    print("|" + "---|" * len(columns), flush=True)
