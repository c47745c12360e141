"""
Whole runs of two checkouts in turn, before, after, before, after: what a change is worth.

    uv run benchmarks/pairs.py ../before . --cache /tmp/before /tmp/after
    uv run benchmarks/pairs.py ../before . --cache /tmp/before /tmp/after --seconds 60 --pairs 7

The arguments are folders with a prepare.py and a train.py. Each cache is prepared first by the
prepare.py that uses it, and a short run of each, which is not counted, compiles. The runs of a pair
have the same seed, the first --seed, the next one more. A run that fails leaves out its pair.
Ctrl-C prints the table of what there is.
"""

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import RunError, print_header, print_row, run_script, run_training

SIDES = ("before", "after")
MEASURES = {  # key: how it is printed
    "tokens_per_second": ".0f",
    "num_steps": ".0f",
    "val_bpb": ".4f",
    "startup_seconds": ".1f",
    "eval_seconds": ".1f",
    "outside_training_seconds": ".1f",
    "peak_vram_mb": ".0f",
}
SAME = ("data", "profile", "device", "torch")  # where these differ, so may the score
WARM_SECONDS = 5  # of training in the runs that are not counted


def measure(folder, cache, seconds, seed):
    """The record of a run, with the seconds of the process that were not training. Raises
    RunError."""
    environment = {"SEED": seed} | cache_of(cache)
    finished = run_training(folder, seconds, environment)
    return finished.record | {"outside_training_seconds": finished.outside}


def cache_of(path):
    """The environment that selects a cache; None leaves the caller's."""
    return {} if path is None else {"AUTORESEARCH_CACHE": Path(path).resolve()}


def get_ready(folder, cache, seconds):
    """Prepares the cache and compiles. Ends the process where that fails."""
    try:
        run_script(folder / "prepare.py", cache_of(cache))
        run_training(folder, min(seconds, WARM_SECONDS), cache_of(cache))
    except RunError as failure:
        raise SystemExit(f"error: {folder}: {failure}") from None


def run_pairs(folders, caches, seconds, pairs, seed):
    """Yields {side: record} of each pair of which both runs ended well; prints a row per run."""
    print_header("pair", "side", *MEASURES, "integrity")
    for pair in range(pairs):
        records = {}
        for side, folder, cache in zip(SIDES, folders, caches, strict=True):
            try:
                record = measure(folder, cache, seconds, seed + pair)
            except RunError as failure:
                print_row(pair + 1, side, failure, *[""] * len(MEASURES))
                continue
            records[side] = record
            shown = [f"{record[key]:{form}}" for key, form in MEASURES.items()]
            print_row(pair + 1, side, *shown, record["integrity"])
        if len(records) == len(SIDES):
            yield records


def print_summary(pairs, seconds):
    """Medians, their ratio, and the lowest and the highest ratio of a pair."""
    print(f"\n{len(pairs)} pairs of {seconds:g} s, {pairs[0]['after']['device']}\n")
    print_header("median of", *SIDES, "ratio", "ratio in a pair: lowest", "highest")
    for key, form in MEASURES.items():
        before = median(pair["before"][key] for pair in pairs)
        after = median(pair["after"][key] for pair in pairs)
        ratios = [pair["after"][key] / pair["before"][key] for pair in pairs]
        shown = [f"{ratio:.3f}" for ratio in (after / before, min(ratios), max(ratios))]
        print_row(key, f"{before:{form}}", f"{after:{form}}", *shown)
    for key in SAME:
        before = pairs[0]["before"][key]
        after = pairs[0]["after"][key]
        if before != after:
            print(f"\n{key} differs, {before} and {after}: the scores may not be comparable")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="of training per run (300)")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=42, help="of the first pair (42)")
    parser.add_argument(
        "--cache",
        nargs=2,
        type=Path,
        default=[None, None],
        metavar=("BEFORE", "AFTER"),
        help="an AUTORESEARCH_CACHE for each side; default: the usual one for both",
    )
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error("--pairs is 1 or more")
    for folder in (args.before, args.after):
        for name in ("prepare.py", "train.py"):
            if not (folder / name).is_file():
                parser.error(f"{folder} holds no {name}")
    rulers = [(folder / "prepare.py").read_bytes() for folder in (args.before, args.after)]
    if args.cache[0] == args.cache[1] and rulers[0] != rulers[1]:
        parser.error("the two prepare.py differ: give each its own by --cache BEFORE AFTER")
    return args


def main():
    args = parse_arguments()
    folders = [args.before, args.after]
    for folder, cache in zip(folders, args.cache, strict=True):
        get_ready(folder, cache, args.seconds)
    done = []
    try:
        for records in run_pairs(folders, args.cache, args.seconds, args.pairs, args.seed):
            done.append(records)
    except KeyboardInterrupt:
        print("\ninterrupted")
    if not done:
        raise SystemExit("error: no pair was completed.")
    print_summary(done, args.seconds)


if __name__ == "__main__":
    main()
