"""
Trains settings of the knobs and compares them; this found the small profile's values.

    uv run benchmarks/sweep.py --seconds 60 "" "DEPTH=3" "TOTAL_BATCH_SIZE=2048"
    uv run benchmarks/sweep.py --seconds 300 --seeds 42 43 "" "WINDOW_PATTERN='SSSL'"
    uv run benchmarks/sweep.py --steps 1200 --jobs 2 "" "DEPTH=3 ASPECT_RATIO=64 @1.21"
    uv run benchmarks/sweep.py --random 24 --log /tmp/random.jsonl    # 24 random ideas
    uv run --group tpe benchmarks/sweep.py --tpe 24 --log /tmp/tpe.jsonl    # 24 ideas of TPE

A setting is a list of KNOB=value; "" is train.py unchanged. Each knob is one line substituted in a
copy of train.py. The ratio is val_bpb relative to the first setting's with the same seed.

On a machine whose speed changes, a fixed time measures the machine too. With --steps N a run takes
N optimizer steps, however long they last. A number after an @ multiplies N: how many steps this
setting takes per step of the first one; with equal batches, that is compare.py's ratio. So neither
other programs nor the number of runs at once (--jobs) affect a score.

Random search and TPE are the baselines for a night of an agent's ideas. A random idea draws new
values for one or two knobs of the best setting, from the ranges below, which were written down
before the first run. TPE (arXiv 2304.11127, by optuna) begins with ten such ideas, each a
change to train.py's own values, and then chooses all knobs itself. Lower wins. Each run adds a line
to the log; a search that was cut off continues from there.
"""

import argparse
import ast
import json
import math
import os
import re
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from multiprocessing.pool import ThreadPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import (
    ROOT,
    RunError,
    copy_scripts,
    import_train,
    print_header,
    print_row,
    run_training,
    substitute,
)

import numpy as np

COLUMNS = {  # key of a record: format
    "val_bpb": ".4f",
    "ratio": ".4f",
    "num_steps": "d",
    "tokens_per_second": ".0f",
    "num_params_M": ".2f",
    "startup_seconds": ".0f",
    "integrity": "",
    "seed": "d",
    "setting": "",
}
TIMED = {  # text of train.py: its replacement with --steps
    "progress = elapsed() / TIME_BUDGET": "progress = step / {steps}",
    "while elapsed() < TIME_BUDGET:": "while step < {steps}:",
}
LONG = 6 * 3600  # seconds, a budget that no run by steps reaches


def split(argument):
    """Returns an argument's setting, and the factor of its steps, 1 without an @."""
    knobs = []
    factor = 1.0
    for word in argument.split():
        if not word.startswith("@"):
            knobs.append(word)
        elif re.fullmatch(r"@\d+(\.\d+)?", word):
            factor = float(word[1:])
        else:
            raise SystemExit(f"error: {word}: write a number after the @, such as @1.21.")
    return " ".join(knobs), factor


def run(job, seconds, steps, jobs):
    """Runs a setting; returns the record or the RunError."""
    argument, seed = job
    setting, factor = split(argument)
    environment = {"SEED": seed}
    edits = {}
    if steps:
        own = round(steps * factor)
        edits = {old: new.format(steps=own) for old, new in TIMED.items()}
    if jobs > 1:
        environment["OMP_NUM_THREADS"] = max(1, (os.cpu_count() or 1) // jobs)
    with tempfile.TemporaryDirectory() as folder:
        copy_scripts(folder, setting, edits)
        try:
            return run_training(folder, LONG if steps else seconds, environment).record
        except RunError as failure:
            return failure


def print_sweep(args):
    jobs = [(argument, seed) for argument in args.settings for seed in args.seeds]
    base = {}  # val_bpb of the first setting, by seed
    print_header(*COLUMNS)
    with ThreadPool(args.jobs) as pool:
        work = partial(run, seconds=args.seconds, steps=args.steps, jobs=args.jobs)
        for (argument, seed), record in zip(jobs, pool.imap(work, jobs), strict=True):
            shown = f"`{argument}`" if argument else "none"
            if isinstance(record, RunError):
                print_row(record, *[""] * (len(COLUMNS) - 3), seed, shown)
                continue
            if argument == args.settings[0]:
                base[seed] = record["val_bpb"]
            record["ratio"] = record["val_bpb"] / base.get(seed, math.nan)
            record["setting"] = shown
            print_row(*[f"{record[key]:{form}}" for key, form in COLUMNS.items()])


# ---- Random search and TPE ----
# The small profile's knobs are drawn uniformly, log-uniformly, as powers of two, or from a list.
RANGES = {
    "DEPTH": ("of", 1, 2, 3, 4, 5, 6, 8),
    "ASPECT_RATIO": ("of", 16, 32, 48, 64, 96, 128, 192),
    "SHORT_WINDOW": ("power", 5, 9),
    "MLP_RATIO": ("of", 2, 3, 4, 6, 8),
    "ROPE_BASE": ("log", 1000, 100_000),
    "LOGIT_SOFTCAP": ("of", 0, 8, 15, 30),
    "X0_INIT": ("even", 0, 0.3),
    "TOTAL_BATCH_SIZE": ("power", 10, 14),
    "EMBEDDING_LR": ("log", 0.075, 1.2),
    "UNEMBEDDING_LR": ("log", 0.0005, 0.008),
    "MATRIX_LR": ("log", 0.005, 0.08),
    "SCALAR_LR": ("log", 0.125, 2),
    "WEIGHT_DECAY": ("even", 0, 0.6),
    "MOMENTUM_STEPS": ("log", 50, 1000),
    "WARMUP_RATIO": ("even", 0, 0.1),
    "WARMDOWN_RATIO": ("even", 0.2, 1),
    "FINAL_LR_FRAC": ("even", 0, 0.2),
}
TPE_RANDOM_IDEAS = 10  # TPE learns from these before it chooses any


def positions(knob):
    """Returns the first and last of a knob's positions: the places in a list, the exponents of a
    power of two, or the values themselves."""
    kind, *limits = RANGES[knob]
    return (0, len(limits) - 1) if kind == "of" else tuple(limits)


def as_position(knob, value):
    """Returns the position of a value."""
    kind, *limits = RANGES[knob]
    if kind == "of":
        return limits.index(value)
    return value.bit_length() - 1 if kind == "power" else value


def at_position(knob, position):
    """Returns the value at a position; floats get three significant digits."""
    kind, *limits = RANGES[knob]
    if kind == "of":
        return limits[position]
    return 2**position if kind == "power" else float(f"{position:.3g}")


def draw(knob, rng):
    """Draws a knob's value."""
    kind = RANGES[knob][0]
    low, high = positions(knob)
    if kind in ("of", "power"):
        position = int(rng.integers(low, high + 1))
    elif kind == "log":
        position = math.exp(rng.uniform(math.log(low), math.log(high)))
    else:
        position = rng.uniform(low, high)
    return at_position(knob, position)


def random_idea(best, number):
    """Returns the best {knob: value} with one or two knobs changed."""
    rng = np.random.default_rng([0, number])
    changed = dict(best)
    for knob in rng.choice(list(RANGES), size=rng.integers(1, 3), replace=False):
        changed[str(knob)] = draw(str(knob), rng)
    return changed


def as_setting(knobs):
    """Returns {knob: value} as the text of a setting."""
    return " ".join(f"{knob}={value}" for knob, value in knobs.items())


def as_knobs(setting):
    """Returns the {knob: value} of a setting's text."""
    items = (item.split("=") for item in setting.split())
    return {knob: ast.literal_eval(value) for knob, value in items}


def tpe_idea(lines, as_it_is):
    """Returns the {knob: value} that TPE proposes after the lines of the log; `as_it_is` holds
    train.py's own values. Runs that crashed or were flagged count as failed trials, not as bad
    scores."""
    number = len(lines)
    if number <= TPE_RANDOM_IDEAS:
        return random_idea({}, number)
    import optuna
    from optuna.distributions import FloatDistribution, IntDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {}
    for knob, (kind, *_) in RANGES.items():
        if kind in ("of", "power"):
            space[knob] = IntDistribution(*positions(knob))
        else:
            space[knob] = FloatDistribution(*positions(knob), log=kind == "log")
    # The seed is the idea's number, so a search that was cut off continues with the same ideas.
    sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=1)
    study = optuna.create_study(sampler=sampler)
    for line in lines:
        knobs = as_it_is | as_knobs(line["setting"])
        failed = line["integrity"] != "ok"
        trial = optuna.trial.create_trial(
            params={knob: as_position(knob, value) for knob, value in knobs.items()},
            distributions=space,
            value=None if failed else line["val_bpb"],
            state=optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE,
        )
        study.add_trial(trial)
    proposed = study.ask(space).params
    knobs = {knob: at_position(knob, position) for knob, position in proposed.items()}
    return {knob: value for knob, value in knobs.items() if value != as_it_is[knob]}


def better_of_two(run):
    """Returns the record of `run()`, a Finished; if it is flagged, calls `run` once more and
    returns the record with more steps. Raises RunError."""
    first = run().record
    if first["integrity"] == "ok":
        return first
    return max(first, run().record, key=lambda record: record["num_steps"])


def run_knobs(knobs, seconds):
    """Trains with these knobs. Returns what the log keeps of the record."""
    with tempfile.TemporaryDirectory() as folder:
        copy_scripts(folder, as_setting(knobs))
        try:
            record = better_of_two(lambda: run_training(folder, seconds, {"SEED": 42}))
        except RunError as failure:
            record = {"val_bpb": math.nan, "integrity": str(failure), "num_steps": 0}
    return {key: record[key] for key in ("val_bpb", "integrity", "num_steps")}


def search(log, ideas, seconds, tpe):
    if tpe:
        train = import_train()
        as_it_is = {knob: getattr(train, knob) for knob in RANGES}
    lines = log.read_text().splitlines() if log.exists() else []
    lines = [json.loads(line) for line in lines]
    best = {}
    baseline = lowest = math.nan
    print_header("idea", "val_bpb", "ratio", "kept", "steps", "integrity", "setting")
    for number in range(ideas + 1):
        knobs = {}
        if number:
            knobs = tpe_idea(lines[:number], as_it_is) if tpe else random_idea(best, number)
        if number < len(lines):
            line = lines[number]
            if line["setting"] != as_setting(knobs):
                raise SystemExit(f"error: {log} belongs to another search; name another file.")
        else:
            line = {"setting": as_setting(knobs)} | run_knobs(knobs, seconds)
            if number == 0 and math.isnan(line["val_bpb"]):
                raise SystemExit(f"error: no baseline: {line['integrity']}")
            with open(log, "a") as file:
                file.write(json.dumps(line) + "\n")
            lines.append(line)
        score = line["val_bpb"]
        if number == 0:
            baseline = lowest = score
        kept = score < lowest
        if kept:
            best = knobs
            lowest = score
        print_row(
            number or "baseline",
            f"{score:.6f}",
            f"{score / baseline:.4f}",
            "yes" if kept else "",
            line["num_steps"],
            line["integrity"],
            line["setting"] or "none",
        )
    print(f"\nbest: {as_setting(best) or 'none'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("settings", nargs="*", default=[""])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--steps", type=int, help="optimizer steps per run, instead of seconds")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, with --steps")
    searches = parser.add_mutually_exclusive_group()
    searches.add_argument(
        "--random", type=int, metavar="IDEAS", help="random search; needs --log FILE"
    )
    searches.add_argument(
        "--tpe", type=int, metavar="IDEAS", help="search by TPE; needs --log FILE"
    )
    parser.add_argument("--log", type=Path, help="log of the search")
    args = parser.parse_args()
    if args.random or args.tpe:
        if not args.log:
            parser.error("--random and --tpe need --log FILE")
        if args.tpe and find_spec("optuna") is None:
            parser.error("--tpe needs optuna; begin the command with `uv run --group tpe`")
        search(args.log, args.random or args.tpe, args.seconds, bool(args.tpe))
        return
    if args.jobs > 1 and not args.steps:
        parser.error("--jobs is for --steps: runs that share a machine share their seconds")
    source = (ROOT / "train.py").read_text()
    for argument in args.settings:  # so that a misspelt one cannot end the sweep in its last hour
        setting, _ = split(argument)
        substitute(source, setting)
    print_sweep(args)


if __name__ == "__main__":
    main()
