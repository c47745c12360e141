"""
Measures what a change is worth, by running versions in turn.

    uv run benchmarks/compare.py ../before . --cache /tmp/before /tmp/after
    uv run benchmarks/compare.py ../before . --seconds 60 --pairs 7
    uv run benchmarks/compare.py --steps 40 ../before . .:LOGIT_SOFTCAP=0 .:KV_HEADS=1,DEPTH=6

An argument is a folder with a prepare.py and a train.py. Before whole runs, each side prepares its
cache and compiles in a short run that is not counted. Both runs of a pair have the same seed, the
next pair the next seed, and if a run fails, its pair is left out. Ctrl-C prints the table so far.
With --steps an argument may also set knobs, and all arguments take steps in turn in one process,
since the machine's speed may drift by more than a change is worth. Their ratio is the speed
relative to the first argument, the median over the turns.
"""

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import (
    PARTS,
    RunError,
    build,
    import_train,
    print_header,
    print_row,
    run_script,
    run_training,
    set_knobs,
    take_step,
)

SIDES = ("before", "after")
MEASURES = {  # key: its format
    "tokens_per_second": ".0f",
    "num_steps": ".0f",
    "val_bpb": ".4f",
    "startup_seconds": ".1f",
    "eval_seconds": ".1f",
    "outside_training_seconds": ".1f",
    "peak_vram_mb": ".0f",
}
SAME = ("data", "profile", "device", "torch")  # if these differ, scores may too
WARM_SECONDS = 5  # of training in a run that is not counted


# ---- Whole runs ----
def cache_of(path):
    """Returns the environment that selects a cache; None leaves the caller's."""
    return {} if path is None else {"AUTORESEARCH_CACHE": path.resolve()}


def get_ready(folder, cache, seconds):
    try:
        run_script(folder / "prepare.py", cache_of(cache))
        run_training(folder, min(seconds, WARM_SECONDS), cache_of(cache))
    except RunError as failure:
        raise SystemExit(f"error: {folder}: {failure}") from None


def run_pairs(folders, caches, seconds, pairs, seed):
    """Prints a row per run. Yields {side: record} of each pair whose runs both succeeded."""
    print_header("pair", "side", *MEASURES, "integrity")
    for pair in range(pairs):
        records = {}
        for side, folder, cache in zip(SIDES, folders, caches, strict=True):
            try:
                finished = run_training(folder, seconds, {"SEED": seed + pair} | cache_of(cache))
            except RunError as failure:
                print_row(pair + 1, side, failure, *[""] * len(MEASURES))
                continue
            record = finished.record | {"outside_training_seconds": finished.outside}
            records[side] = record
            shown = [f"{record[key]:{form}}" for key, form in MEASURES.items()]
            print_row(pair + 1, side, *shown, record["integrity"])
        if len(records) == len(SIDES):
            yield records


def print_summary(pairs, seconds):
    """Prints medians, their ratio, and the lowest and highest ratio of a pair."""
    print(f"\n{len(pairs)} pairs of {seconds:g} s, {pairs[0]['after']['device']}\n")
    print_header("median of", *SIDES, "ratio", "ratio in a pair: lowest", "highest")
    for key, form in MEASURES.items():
        before = median(pair["before"][key] for pair in pairs)
        after = median(pair["after"][key] for pair in pairs)
        ratios = [pair["after"][key] / pair["before"][key] for pair in pairs]
        shown = [f"{ratio:.3f}" for ratio in (after / before, min(ratios), max(ratios))]
        print_row(key, f"{before:{form}}", f"{after:{form}}", *shown)
    for key in SAME:
        before, after = (pairs[0][side][key] for side in SIDES)
        if before != after:
            print(f"\n{key} differs, {before} and {after}: the scores may not be comparable")


def compare_runs(args):
    for folder, cache in zip(args.folders, args.cache, strict=True):
        get_ready(folder, cache, args.seconds)
    done = []
    try:
        for records in run_pairs(args.folders, args.cache, args.seconds, args.pairs, args.seed):
            done.append(records)
    except KeyboardInterrupt:
        print("\ninterrupted")
    if not done:
        raise SystemExit("error: no pair was completed.")
    print_summary(done, args.seconds)


# ---- Steps ----
def compare_steps(arguments, steps):
    subjects = []
    for argument in arguments:
        folder, _, setting = argument.partition(":")
        train = import_train(Path(folder).resolve())
        set_knobs(train, setting.split(",") if setting else [])
        subjects.append(build(train))
    found = [[] for _ in subjects]  # seconds, in the order of PARTS
    for _ in range(steps):
        for subject, seconds in zip(subjects, found, strict=True):
            seconds.append(take_step(subject))
    print_header("train.py", *(f"{part}, ms" for part in PARTS), "tokens/s", "ratio")
    tokens = [subject.train.TOTAL_BATCH_SIZE for subject in subjects]
    for argument, seconds, own in zip(arguments, found, tokens, strict=True):
        parts = [1000 * median(part) for part in zip(*seconds, strict=True)]
        pairs = zip(found[0], seconds, strict=True)
        ratio = median(base[0] / mine[0] for base, mine in pairs) * own / tokens[0]
        speed = f"{1000 * own / parts[0]:.0f}"
        print_row(argument, *(f"{part:.0f}" for part in parts), speed, f"{ratio:.3f}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER[:KNOB=value,...]")
    parser.add_argument("--steps", type=int, help="compare this many steps, not whole runs")
    parser.add_argument("--seconds", type=float, default=300, help="training time per run (300)")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=42, help="seed of the first pair (42)")
    parser.add_argument(
        "--cache",
        nargs=2,
        type=Path,
        default=[None, None],
        metavar=("BEFORE", "AFTER"),
        help="an AUTORESEARCH_CACHE for each side; default: the usual one for both",
    )
    args = parser.parse_args()
    paths = [Path(argument.partition(":")[0]) for argument in args.folders]
    for folder in paths:
        if not all((folder / name).is_file() for name in ("prepare.py", "train.py")):
            parser.error(f"{folder} does not hold a prepare.py and a train.py")
    if args.steps:
        return args
    if len(paths) != 2 or any(":" in argument for argument in args.folders):
        parser.error("whole runs compare two folders; for knobs give --steps, or use sweep.py")
    args.folders = paths
    before, after = ((folder / "prepare.py").read_bytes() for folder in paths)
    if args.cache[0] == args.cache[1] and before != after:
        parser.error("the two prepare.py differ; give each its own cache: --cache BEFORE AFTER")
    return args


def main():
    args = parse_arguments()
    if args.steps:
        compare_steps(args.folders, args.steps)
    else:
        compare_runs(args)


if __name__ == "__main__":
    main()
