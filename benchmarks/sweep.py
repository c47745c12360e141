"""
Settings of the knobs one after another, best first: how the small profile's values were found.

    uv run benchmarks/sweep.py --seconds 60 "" "DEPTH=3" "TOTAL_BATCH_SIZE=2048 DEVICE_BATCH_SIZE=4"
    uv run benchmarks/sweep.py --seconds 300 --seeds 42 43 "" "WINDOW_PATTERN='SSSL'"

A setting is a list of KNOB=value, "" for train.py as it is. Each is a one-line substitution in a
copy of train.py. The ratio is that of val_bpb to the first setting's at the same seed.
"""

import argparse
import math
import sys
import tempfile
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


def run(setting, seconds, seed):
    """The record of a run. Raises RunError."""
    with tempfile.TemporaryDirectory() as folder:
        copy_scripts(folder, setting)
        return run_training(folder, seconds, {"SEED": seed}).record


def print_record(record):
    print_row(*[f"{record[key]:{form}}" for key, form in COLUMNS.items()])


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("settings", nargs="*", default=[""])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    args = parser.parse_args()
    source = (ROOT / "train.py").read_text()
    for setting in args.settings:
        substitute(source, setting)  # a misspelt one shall not end the sweep in its last hour
    records = []
    base = {}  # val_bpb of the first setting, by seed
    print_header(*COLUMNS)
    for setting in args.settings:
        for seed in args.seeds:
            shown = f"`{setting}`" if setting else "none"
            try:
                record = run(setting, args.seconds, seed)
            except RunError as failure:
                print_row(failure, *[""] * (len(COLUMNS) - 3), seed, shown)
                continue
            if setting == args.settings[0]:
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
