"""
Where the seconds go that are not training: from the shell's prompt to the summary and back to the prompt, by stage.

    uv run benchmarks/overhead.py             # three warm runs, after one that is not counted
    uv run benchmarks/overhead.py --cold      # and one before them with an empty compiler cache

Whole runs of train.py as it is, with a short budget; a stage ends when the line that follows it is printed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
STAGES = {  # name: how the first line after it begins
    "interpreter, imports, cache check": "device:",
    "attention probe, model": "model:",
    "compilation and warm-up": "run:",
    "fresh weights, first batch, first step": "step     1",
    "training": "---",
    "report": None,
}


def stages(seconds, folder, inductor, script=ROOT / "train.py"):
    """{stage: seconds} of one run; evaluation, which prints nothing, is taken out of training by the report."""
    own = {"AUTORESEARCH_TIME_BUDGET": str(seconds), "AUTORESEARCH_RUNS": folder, "PYTHONUNBUFFERED": "1"}
    own |= {"TORCHINDUCTOR_CACHE_DIR": inductor} if inductor else {}
    found, waiting, begun, report = {}, list(STAGES.items()), perf_counter(), {}
    command = [sys.executable, script]
    with subprocess.Popen(
        command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        for line in run.stdout:
            if waiting[0][1] and line.startswith(waiting[0][1]):
                found[waiting.pop(0)[0]] = perf_counter() - begun
                begun = perf_counter()
            report |= {line.split(": ")[0]: line.split(": ")[1].strip()} if ": " in line else {}
    if run.returncode:
        raise SystemExit(f"train.py ended with {run.returncode}: {line}")
    found[waiting[0][0]] = perf_counter() - begun
    evaluation = float(report["eval_seconds"])
    found["training"] -= evaluation
    return found | {"evaluation": evaluation, "outside training": sum(found.values()) - found["training"] + evaluation}


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10, help="budget of a run (10)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cold = stages(args.seconds, folder, f"{folder}/inductor") if args.cold else None
        warm = [stages(args.seconds, folder, None) for _ in range(args.rounds + 1)][1:]
    print(f"| seconds | warm, median of {args.rounds} |" + " cold |" * args.cold + "\n|---|---|" + "---|" * args.cold)
    for stage in cold or warm[0]:
        if stage != "training":
            values = [median(run[stage] for run in warm), *([cold[stage]] if cold else [])]
            print(f"| {stage} | " + " | ".join(f"{value:.1f}" for value in values) + " |")


if __name__ == "__main__":
    main()
