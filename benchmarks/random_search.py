"""
Random search over the knobs of train.py, where lower wins: what a night of an agent's ideas is
compared with.

    uv run benchmarks/random_search.py /tmp/search              # baseline and 24 ideas, or go on
    uv run benchmarks/random_search.py /tmp/search --ideas 40 --seconds 20

An idea draws one or two knobs of the best setting anew, from the ranges below, which were written down
before the first run. Each run is a line of JSON in the folder's search.jsonl; a search that was cut
off goes on from there, with the same ideas. The best setting is printed at the end.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import RunError, copy_scripts, print_header, print_row, run_training

import numpy as np

TOKENS_PER_ROW = 512  # of the small profile, whose knobs these ranges are for

# How a knob is drawn: evenly, evenly in the logarithm, as a power of two, or from a list.
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


def draw(knob, rng):
    """A value of the knob, at most three digits of it."""
    kind, *limits = RANGES[knob]
    if kind == "of":
        return limits[rng.integers(len(limits))]
    low, high = limits
    if kind == "power":
        return 2 ** int(rng.integers(low, high + 1))
    if kind == "log":
        return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")
    return float(f"{rng.uniform(low, high):.3g}")


def next_idea(best, number, seed):
    """The best {knob: value} with one or two knobs changed."""
    rng = np.random.default_rng([seed, number])
    changed = dict(best)
    for knob in rng.choice(list(RANGES), size=rng.integers(1, 3), replace=False):
        changed[str(knob)] = draw(str(knob), rng)
    return changed


def as_setting(knobs):
    """What common.substitute takes. The rows at a time follow from the batch."""
    items = [f"{knob}={value}" for knob, value in knobs.items()]
    if "TOTAL_BATCH_SIZE" in knobs:
        items.append(f"DEVICE_BATCH_SIZE={min(8, knobs['TOTAL_BATCH_SIZE'] // TOKENS_PER_ROW)}")
    return " ".join(items)


def better_of_two(run):
    """The record of what `run()` returns, Finished; if it is flagged, `run` is called once more, and
    the record with more steps counts. Raises RunError."""
    first = run().record
    if first["integrity"] == "ok":
        return first
    return max(first, run().record, key=lambda record: record["num_steps"])


def run(knobs, seconds):
    """What a run gave."""
    with tempfile.TemporaryDirectory() as folder:
        copy_scripts(folder, as_setting(knobs))
        try:
            record = better_of_two(lambda: run_training(folder, seconds, {"SEED": 42}))
        except RunError as failure:
            record = {"val_bpb": None, "integrity": str(failure), "num_steps": 0}
    return {key: record[key] for key in ("val_bpb", "integrity", "num_steps")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ideas", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the ideas (0)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    log = args.folder / "search.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    best = {}
    baseline = lowest = math.nan
    print_header("idea", "val_bpb", "ratio", "kept", "steps", "integrity", "setting")
    for number in range(args.ideas + 1):
        knobs = next_idea(best, number, args.seed) if number else {}
        if lines:
            line = json.loads(lines.pop(0))
            if line["setting"] != as_setting(knobs):
                raise SystemExit(f"error: {log} is of another search; give another folder.")
        else:
            line = {"setting": as_setting(knobs)} | run(knobs, args.seconds)
            if number == 0 and line["val_bpb"] is None:
                raise SystemExit(f"error: no baseline: {line['integrity']}")
            with open(log, "a") as file:
                file.write(json.dumps(line) + "\n")
        score = math.nan if line["val_bpb"] is None else line["val_bpb"]
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


if __name__ == "__main__":
    main()
