"""
Tries knob settings one after another and prints a table, best first: the way the small profile's values were found.

    uv run benchmarks/sweep.py --seconds 60 "" "DEPTH=3" "TOTAL_BATCH_SIZE=4096 DEVICE_BATCH_SIZE=8"
    uv run benchmarks/sweep.py --seconds 300 --seeds 42 43 "" "WINDOW_PATTERN='SSSL'"

A setting is a list of KNOB=value, "" for train.py as it is. Each is a one-line substitution in a copy of train.py.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def last_words(stdout, stderr):
    """The line that tells why a run has no score."""
    lines = [line for line in (*stderr.splitlines(), *stdout.splitlines()) if line.strip()]
    told = [line for line in lines if line.startswith(("error:", "FAIL", "integrity:"))]
    return (told or lines or ["it said nothing"])[-1]


def substitute(source, setting):
    for name, _, value in (item.partition("=") for item in setting.split()):
        source, count = re.subn(rf"^({name}\s*=).*?(\s*#.*)?$", rf"\1 {value}\2", source, count=1, flags=re.M)
        if count != 1:
            raise SystemExit(f"train.py has no knob {name}; a setting is KNOB=VALUE.")
    return source


def run(setting, seconds, seed):
    """The run's JSON record, or the last line it printed."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("prepare.py", "train.py"):
            shutil.copy(ROOT / name, folder)
        train = Path(folder, "train.py")
        train.write_text(substitute(train.read_text(), setting))
        runs = {"AUTORESEARCH_RUNS": f"{folder}/runs", "AUTORESEARCH_TIME_BUDGET": str(seconds), "SEED": str(seed)}
        command = [sys.executable, train]
        done = subprocess.run(command, env=os.environ | runs, capture_output=True, text=True, cwd=folder)
        records = list(Path(folder, "runs").glob("*.json"))
        return json.loads(records[0].read_text()) if records else last_words(done.stdout, done.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("settings", nargs="*", default=[""])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    args = parser.parse_args()
    rows = []
    for setting in args.settings:
        for seed in args.seeds:
            record = run(setting, args.seconds, seed)
            if isinstance(record, str):
                print(f"{setting or '(as it is)'}, seed {seed}: {record}", flush=True)
                continue
            keys = ("val_bpb", "num_steps", "tokens_per_second", "num_params_M", "startup_seconds", "integrity")
            rows.append([record[key] for key in keys] + [seed, setting or "(as it is)"])
            print("| {:.4f} | {} | {:.0f} | {:.2f} | {:.0f} | {} | {} | {} |".format(*rows[-1]), flush=True)
    print("\n| val_bpb | steps | tokens/s | M parameters | start-up s | integrity | seed | setting |\n|" + "---|" * 8)
    for row in sorted(rows, key=lambda row: row[0]):
        print("| {:.4f} | {} | {:.0f} | {:.2f} | {:.0f} | {} | {} | {} |".format(*row))


if __name__ == "__main__":
    main()
