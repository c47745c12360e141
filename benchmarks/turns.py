"""
Steps of several train.py in turn, in one process: what a change does to the speed of a step.

    uv run benchmarks/turns.py ../before .
    uv run benchmarks/turns.py . .:LOGIT_SOFTCAP=0 .:KV_HEADS=1,DEPTH=6 --steps 100

An argument is a folder with a prepare.py and a train.py, and settings of its knobs. The speed of a
shared machine changes from one run to the next, often by more than a change is worth. Two steps
that follow each other meet the same machine: the ratio is the median over such pairs, beside the
first argument. The tokens are random, a few of them frequent, as in a text. No loader and no cache
are needed. benchmarks/pairs.py compares whole runs.
"""

import argparse
import ast
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import print_header, print_row, random_tokens

import torch

UNCOUNTED = 4  # steps before the first that counts: they compile
PARTS = ("step", "forward", "backward", "update")


@dataclass
class Subject:
    name: str
    train: object  # the module
    model: object  # compiled
    optimizer: object
    rows: int
    micro_batches: int
    device: torch.device
    seconds: list = field(default_factory=list)  # per step, in the order of PARTS


def import_train(folder):
    """The train.py of a folder, on the prepare.py beside it."""
    for module in ("prepare", "train"):
        sys.modules.pop(module, None)
    sys.path.insert(0, str(folder))
    try:
        import train
    finally:
        sys.path.pop(0)
    return train


def build(argument):
    folder, _, settings = argument.partition(":")
    if not Path(folder, "train.py").is_file():
        raise SystemExit(f"error: {folder} holds no train.py.")
    train = import_train(Path(folder).resolve())
    prepare = sys.modules["prepare"]
    for setting in filter(None, settings.split(",")):
        knob, _, value = setting.partition("=")
        if not hasattr(train, knob):
            raise SystemExit(f"error: train.py has no knob {knob}; a setting is KNOB=value.")
        setattr(train, knob, ast.literal_eval(value))
    # Older versions, back to commit b1815b6, have other names for some of this.
    device = prepare.DEVICE if hasattr(prepare, "DEVICE") else prepare.training_device()
    if device.type == "cpu":
        prepare.keep_memory()
    dtype = train.choose_dtype(device)
    if isinstance(dtype, tuple):
        dtype, _ = dtype
    config = train.derive_config(prepare.VOCAB_SIZE)
    _, attend = train.choose_attention(device, dtype, config)
    model = train.GPT(config, attend).to(device)
    train.initialise(model, dtype, 0)

    def compiler(function):
        return torch.compile(function, dynamic=False) if train.COMPILE else function

    extra = []
    if device.type == "cuda":
        is_old = hasattr(train, "uncompiled")
        extra = [compiler if is_old else compiler(train.muon_update)]
    optimizer = train.MuonAdamW(train.parameter_groups(model), dtype, *extra)
    train.set_schedules(optimizer, 0.0, 0)
    rows = train.DEVICE_BATCH_SIZE
    steps = train.accumulation_steps(rows)
    return Subject(argument, train, compiler(model), optimizer, rows, steps, device)


def now(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()


def take_step(subject):
    """One step as in train_step; returns its seconds in the order of PARTS."""
    device = subject.device
    vocab_size = subject.model.config.vocab_size
    forward = 0.0
    backward = 0.0
    for _ in range(subject.micro_batches):
        shape = (2, subject.rows, subject.train.MAX_SEQ_LEN)
        inputs, targets = random_tokens(vocab_size, shape, device)
        begun = now(device)
        loss = subject.model(inputs, targets) / subject.micro_batches
        middle = now(device)
        loss.backward()
        forward += middle - begun
        backward += now(device) - middle
    begun = now(device)
    subject.optimizer.step()
    update = now(device) - begun
    return forward + backward + update, forward, backward, update


def print_table(subjects):
    print_header("train.py", *(f"{part}, ms" for part in PARTS), "tokens/s", "speed")
    first = subjects[0]
    tokens = [subject.train.TOTAL_BATCH_SIZE for subject in subjects]
    for subject, own in zip(subjects, tokens, strict=True):
        parts = [1000 * median(part) for part in zip(*subject.seconds, strict=True)]
        pairs = zip(first.seconds, subject.seconds, strict=True)
        ratio = median(base[0] / mine[0] for base, mine in pairs) * own / tokens[0]
        speed = f"{1000 * own / parts[0]:.0f}"
        print_row(subject.name, *(f"{part:.0f}" for part in parts), speed, f"{ratio:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("subjects", nargs="+", metavar="FOLDER[:KNOB=value,...]")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    subjects = []
    for argument in args.subjects:
        subject = build(argument)
        for _ in range(UNCOUNTED):  # before the next import, which may change torch's settings
            take_step(subject)
        subjects.append(subject)
    for _ in range(args.steps):
        for subject in subjects:
            subject.seconds.append(take_step(subject))
    print_table(subjects)


if __name__ == "__main__":
    main()
