"""
Settings of the knobs one after another, best first: how the small profile's values were found.

    uv run benchmarks/sweep.py --seconds 60 "" "DEPTH=3" "TOTAL_BATCH_SIZE=2048 DEVICE_BATCH_SIZE=4"
    uv run benchmarks/sweep.py --seconds 300 --seeds 42 43 "" "WINDOW_PATTERN='SSSL'"
    uv run benchmarks/sweep.py --steps 1200 --jobs 2 "" "DEPTH=3 ASPECT_RATIO=64 @1.21"

A setting is a list of KNOB=value, "" for train.py as it is. Each is a one-line substitution in a
copy of train.py. The ratio is that of val_bpb to the first setting's at the same seed.

On a machine whose speed moves, a fixed time measures the machine too. With --steps each run takes
so many optimizer steps, however long they take, times the number after the @: how many steps the
setting takes while the first one takes one, as benchmarks/turns.py measures it. So it matters
neither what else computes nor how many runs go on at once, --jobs.
"""

import argparse
import math
import os
import re
import sys
import tempfile
from functools import partial
from multiprocessing.pool import ThreadPool
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

COLUMNS = {  # key of a record: how it is printed
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


TIMED = {  # text of train.py: the same by steps
    "progress = min(elapsed() / TIME_BUDGET, 1.0)": "progress = step / {steps}",
    "int((TIME_BUDGET - elapsed()) / seconds)": "{steps} - step",
}
LONG = 6 * 3600  # seconds, a budget that no run by steps reaches


def split(argument):
    """(setting, its steps while the first setting takes one) of an argument."""
    knobs = []
    factor = 1.0
    for word in argument.split():
        if not word.startswith("@"):
            knobs.append(word)
        elif re.fullmatch(r"@\d+(\.\d+)?", word):
            factor = float(word[1:])
        else:
            raise SystemExit(f"error: {word}: after the @ stands a number, such as @1.21.")
    return " ".join(knobs), factor


def run(job, seconds, steps, jobs):
    """The record of a run at a seed, or the RunError."""
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


def print_record(record):
    print_row(*[f"{record[key]:{form}}" for key, form in COLUMNS.items()])


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("settings", nargs="*", default=[""])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--steps", type=int, help="of optimization, instead of seconds")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, with --steps")
    args = parser.parse_args()
    if args.jobs > 1 and not args.steps:
        parser.error("--jobs is for --steps: runs that share a machine share their seconds")
    source = (ROOT / "train.py").read_text()
    for argument in args.settings:  # a misspelt one shall not end the sweep in its last hour
        setting, _ = split(argument)
        substitute(source, setting)
    jobs = [(argument, seed) for argument in args.settings for seed in args.seeds]
    records = []
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
            records.append(record)
            print_record(record)
    print("\nbest first\n")
    print_header(*COLUMNS)
    for record in sorted(records, key=lambda record: record["val_bpb"]):
        print_record(record)


if __name__ == "__main__":
    main()
