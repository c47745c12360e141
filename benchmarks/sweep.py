"""
Trains settings of the knobs and compares them; this found the small profile's values.

    uv run benchmarks/sweep.py --seconds 60 "" "DEPTH=3" "TOTAL_BATCH_SIZE=2048"
    uv run benchmarks/sweep.py --seconds 300 --seeds 42 43 "" "WINDOW_PATTERN='SSSL'"
    uv run benchmarks/sweep.py --steps 1200 "" "DEPTH=3 ASPECT_RATIO=64 @1.21"
    uv run --group tpe benchmarks/sweep.py --tpe 24 --log /tmp/tpe.jsonl    # 24 ideas of TPE

A setting is a list of KNOB=value; "" is train.py unchanged. Each knob is one line substituted in a
copy of train.py. The ratio is val_bpb relative to the first setting's with the same seed.

On a machine whose speed changes, a fixed time measures the machine too. With --steps N a run takes
N optimizer steps, however long they last. A number after an @ multiplies N: how many steps this
setting takes per step of the first one; with equal batches, that is compare.py's ratio.

TPE (arXiv 2304.11127, by optuna) is the baseline for a night of an agent's ideas. It begins with
ten random ideas, each a change to one or two of train.py's own values within the ranges below,
which were written down before the first run, and then chooses all knobs itself. Each run adds a
line to the log; a search that was cut off continues from there.
"""

import argparse
import ast
import json
import math
import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import (
    ROOT,
    RunError,
    copy_scripts,
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
    "(progress := elapsed() / TIME_BUDGET)": "(progress := step / {steps})",
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


def run(setting, seed, seconds, steps=None):
    """Trains a setting, for seconds or for steps. Returns the record. Raises RunError."""
    edits = {}
    if steps:
        edits = {old: new.format(steps=steps) for old, new in TIMED.items()}
        seconds = LONG
    with tempfile.TemporaryDirectory() as folder:
        copy_scripts(folder, setting, edits)
        return run_training(folder, seconds, {"SEED": seed})


def print_sweep(args):
    base = {}  # val_bpb of the first setting, by seed
    print_header(*COLUMNS)
    for argument in args.settings:
        setting, factor = split(argument)
        shown = f"`{argument}`" if argument else "none"
        for seed in args.seeds:
            steps = round(args.steps * factor) if args.steps else None
            try:
                record = run(setting, seed, args.seconds, steps)
            except RunError as failure:
                print_row(failure, *[""] * (len(COLUMNS) - 3), seed, shown)
                continue
            if argument == args.settings[0]:
                base[seed] = record["val_bpb"]
            record["ratio"] = record["val_bpb"] / base.get(seed, math.nan)
            record["setting"] = shown
            print_row(*[f"{record[key]:{form}}" for key, form in COLUMNS.items()])


# ---- TPE ----
# The small profile's knobs are drawn uniformly, log-uniformly, as powers of two, or from a list.
RANGES = {
    "DEPTH": ("of", 1, 2, 3, 4, 5, 6, 8),
    "ASPECT_RATIO": ("of", 16, 32, 48, 64, 96, 128, 192),
    "SHORT_WINDOW": ("power", 5, 9),
    "MLP_RATIO": ("of", 1, 2, 3, 4, 6),
    "ROPE_BASE": ("log", 1000, 100_000),
    "LOGIT_SOFTCAP": ("of", 0, 8, 15, 30),
    "X0_INIT": ("even", 0, 0.3),
    "TOTAL_BATCH_SIZE": ("power", 10, 14),
    "EMBEDDING_LR": ("log", 0.075, 1.2),
    "UNEMBEDDING_LR": ("log", 0.0005, 0.008),
    "MATRIX_LR": ("log", 0.005, 0.08),
    "SCALAR_LR": ("log", 0.025, 2),  # from 0.125 until the default became 0.1
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


def random_idea(number):
    """Returns the {knob: value} of one or two knobs."""
    rng = np.random.default_rng([0, number])
    knobs = rng.choice(list(RANGES), size=rng.integers(1, 3), replace=False)
    return {str(knob): draw(str(knob), rng) for knob in knobs}


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
        return random_idea(number)
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


def run_idea(setting, seconds):
    """Returns the line of the log for a setting."""
    try:
        record = run(setting, 42, seconds)
    except RunError as failure:
        record = {"val_bpb": math.nan, "integrity": str(failure), "num_steps": 0}
    shown = {key: record[key] for key in ("val_bpb", "integrity", "num_steps")}
    return {"setting": setting} | shown


def search(log, ideas, seconds):
    import prepare
    import train

    if prepare.PROFILE != "small":
        raise SystemExit("error: the ranges are those of `small`; set AUTORESEARCH_PROFILE=small.")
    as_it_is = {knob: getattr(train, knob) for knob in RANGES}
    lines = log.read_text().splitlines() if log.exists() else []
    lines = [json.loads(line) for line in lines]
    print_header("idea", "val_bpb", "ratio", "steps", "integrity", "setting")
    for number in range(ideas + 1):
        setting = as_setting(tpe_idea(lines[:number], as_it_is) if number else {})
        if number == len(lines):
            line = run_idea(setting, seconds)
            if number == 0 and math.isnan(line["val_bpb"]):
                raise SystemExit(f"error: no baseline: {line['integrity']}")
            lines.append(line)
            with open(log, "a") as file:
                file.write(json.dumps(line) + "\n")
        line = lines[number]
        if line["setting"] != setting:
            raise SystemExit(f"error: {log} belongs to another search; name another file.")
        ratio = f"{line['val_bpb'] / lines[0]['val_bpb']:.4f}"
        shown = (line["num_steps"], line["integrity"], setting or "none")
        print_row(number or "baseline", f"{line['val_bpb']:.6f}", ratio, *shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("settings", nargs="*", default=[""])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--steps", type=int, help="optimizer steps per run, instead of seconds")
    parser.add_argument("--tpe", type=int, metavar="IDEAS", help="search by TPE; needs --log FILE")
    parser.add_argument("--log", type=Path, help="log of the search")
    args = parser.parse_args()
    if args.tpe:
        if not args.log:
            parser.error("--tpe needs --log FILE")
        if find_spec("optuna") is None:
            parser.error("--tpe needs optuna; begin the command with `uv run --group tpe`")
        search(args.log, args.tpe, args.seconds)
        return
    source = (ROOT / "train.py").read_text()
    for argument in args.settings:  # so that a misspelt one cannot end the sweep in its last hour
        setting, _ = split(argument)
        substitute(source, setting)
    print_sweep(args)


if __name__ == "__main__":
    main()
