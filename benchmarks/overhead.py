"""
Where the seconds go that are not training, from the start of the process to its end, by stage.

    uv run benchmarks/overhead.py                    # median of three runs, after one not counted
    uv run benchmarks/overhead.py --cold             # and of runs with an empty compiler cache

Whole runs of train.py as it is, with a short budget; a stage ends with the line that follows it.
The ratio is that of a cold run to a warm one, in turn. The first step counts as training too.
benchmarks/compare.py shows two versions.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import (
    ROOT,
    RunError,
    last_words,
    print_header,
    print_row,
)

STAGES = {  # name: how the line begins that ends it
    "interpreter, imports, cache check": "run:",
    "attention probe, model": "model:",
    "compilation and warm-up": "training:",
    "first batch, first step": "step ",
    "later steps, evaluation": "---",
}
LAST_STAGE = "report, exit"
OUTSIDE = "all but training"
SHOWN = [*STAGES, "evaluation", LAST_STAGE, OUTSIDE]
SHOWN.remove("later steps, evaluation")  # the budget decides about the steps


def stages(seconds, runs, inductor=None, script=ROOT / "train.py"):
    """{stage: seconds} of one run of `script`, with a budget of `seconds`, its record in `runs`,
    its compiler cache in `inductor`. Raises RunError."""
    own = {"AUTORESEARCH_TIME_BUDGET": str(seconds), "AUTORESEARCH_RUNS": str(runs)}
    own["PYTHONUNBUFFERED"] = "1"
    if inductor is not None:
        own["TORCHINDUCTOR_CACHE_DIR"] = str(inductor)
    ends = iter(STAGES.items())
    stage, mark = next(ends)
    found = {}
    block = {}
    lines = []
    begun = perf_counter()
    before = begun
    with subprocess.Popen(
        [sys.executable, script],
        cwd=script.parent,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            lines.append(line)
            key, colon, value = line.partition(": ")
            if colon:
                block[key] = value.strip()
            if mark and line.startswith(mark):
                found[stage] = perf_counter() - before
                before = perf_counter()
                stage, mark = next(ends, (LAST_STAGE, ""))
    end = perf_counter()
    if process.returncode:
        raise RunError(f"exit {process.returncode}: {last_words(''.join(lines))}")
    if stage != LAST_STAGE:
        raise RunError(f"no line began with {mark}, where {stage!r} ends")
    found[LAST_STAGE] = end - before
    found["evaluation"] = float(block["eval_seconds"])
    found[OUTSIDE] = end - begun - float(block["training_seconds"])
    return found


def print_stages(found):
    """Medians of {side: its runs}, and the ratio of the first to the second where there are two."""
    sides = list(found)
    ratio = [f"{sides[0]} / {sides[1]}"] if len(sides) == 2 else []
    print_header("seconds", *sides, *ratio)
    for stage in SHOWN:
        medians = [median(run[stage] for run in found[side]) for side in sides]
        if len(medians) == 2:
            ratio = [f"{medians[0] / medians[1]:.2f}"]
        print_row(stage, *[f"{value:.1f}" for value in medians], *ratio)


def measure(seconds, rounds, cold, folder):
    """{side: its runs}, and how many libraries a cold run compiles. Raises RunError."""
    runs = folder / "runs"
    stages(seconds, runs)  # compiles
    found = {"cold": [], "warm": []} if cold else {"warm": []}
    compiled = 0
    for _ in range(rounds):
        if cold:
            with tempfile.TemporaryDirectory(dir=folder) as inductor:
                found["cold"].append(stages(seconds, runs, inductor))
                files = [path.suffix for path in Path(inductor).rglob("*")]
                compiled = files.count(".so") + files.count(".cubin")
        found["warm"].append(stages(seconds, runs))
    return found, compiled


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10, help="budget of a run (10)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="with an empty compiler cache too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found, compiled = measure(args.seconds, args.rounds, args.cold, Path(folder))
        except RunError as failure:
            raise SystemExit(f"error: {failure}") from None
    print(f"median of {args.rounds}, budget {args.seconds:g} s\n")
    print_stages(found)
    if args.cold:
        print(f"\na cold run compiles {compiled} libraries")


if __name__ == "__main__":
    main()
