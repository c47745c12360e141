"""
Measures what a change is worth, by running versions in turn.

    uv run benchmarks/compare.py ../before . --cache /tmp/before /tmp/after
    uv run benchmarks/compare.py ../before . --seconds 60 --pairs 7
    uv run benchmarks/compare.py --steps 40 best . .:LOGIT_SOFTCAP=0 .:KV_HEADS=1,DEPTH=6

An argument is a folder with a prepare.py and a train.py, or a commit that has them. Before whole
runs, each side prepares its cache and compiles in a short run that is not counted. Both runs of a
pair have the same seed, the next pair the next seed and the other order. A pair is left out if a
run fails or is not `integrity: ok`. Ctrl-C prints the table so far.
With --steps an argument may also set knobs, and all arguments take steps on random tokens in turn
in one process, since the machine's speed may drift by more than a change is worth. `ratio` is the
speed relative to the first argument, the median over the turns, of which half lie between the
quartiles. It may differ from the ratio of the medians beside it, and is the one to trust.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import (
    RunError,
    copy_scripts,
    print_header,
    print_row,
    run_script,
    run_training,
)

SCRIPTS = ("prepare.py", "train.py")
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
WARM_SECONDS = 5  # of training in a run that is not counted
FIRST_SEED = 42


def find_folder(name, place):
    """Returns the folder of that name, or `place` with the scripts of the commit of that name."""
    if Path(name).is_dir():
        return Path(name)
    place.mkdir()
    for script in SCRIPTS:
        shown = subprocess.run(["git", "show", f"{name}:./{script}"], capture_output=True)
        if shown.returncode == 0:
            Path(place, script).write_bytes(shown.stdout)
    return place


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


def run_pairs(folders, caches, seconds, pairs):
    """Prints a row per run. Yields {side: record} of each pair whose runs are both `ok`."""
    print_header("pair", "side", *MEASURES, "integrity")
    for pair in range(pairs):
        records = {}
        turn = list(zip(SIDES, folders, caches, strict=True))
        for side, folder, cache in turn if pair % 2 == 0 else turn[::-1]:
            try:
                own = {"SEED": FIRST_SEED + pair} | cache_of(cache)
                record = run_training(folder, seconds, own)
            except RunError as failure:
                print_row(pair + 1, side, failure, *[""] * len(MEASURES))
                continue
            if record["integrity"] == "ok":
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


def compare_runs(args):
    for folder, cache in zip(args.folders, args.cache, strict=True):
        get_ready(folder, cache, args.seconds)
    done = []
    try:
        for records in run_pairs(args.folders, args.cache, args.seconds, args.pairs):
            done.append(records)
    except KeyboardInterrupt:
        print("\ninterrupted")
    if not done:
        raise SystemExit("error: no pair was completed.")
    print_summary(done, args.seconds)


# ---- Steps ----
def import_train(folder):
    """Imports a folder's train.py and the prepare.py next to it."""
    for module in ("prepare", "train"):
        sys.modules.pop(module, None)
    sys.path.insert(0, str(folder))
    try:
        import train
    finally:
        sys.path.pop(0)
    return train


def build(train):
    """Builds what a run of this train.py has when its training begins, without a cache. Returns the
    tokens of a step and a function that takes one."""
    import torch

    prepare = sys.modules["prepare"]
    torch.set_float32_matmul_precision("high")
    device = prepare.DEVICE
    if device.type == "cpu":
        train.tune_cpu()
    config = train.derive_config(prepare.VOCAB_SIZE, train.choose_dtype())
    _, attend = train.choose_attention(config)
    parts = (config, attend, train.COMPILE and train.can_compile())
    rows = train.warm_up(*parts)
    _, compiled_model, optimizer = train.build(*parts)
    train.set_schedules(optimizer, 0.0, 0)
    # The frequency of token i falls as about 1 / (i + 1) (Zipf's law). As in text, a few are
    # frequent, and the gradient of a repeated token's embedding takes longer to sum up.
    shape = (2, rows, train.MAX_SEQ_LEN)
    drawn = torch.rand(shape, device=device).mul(math.log(prepare.VOCAB_SIZE)).exp().long() - 1
    batches = [(*drawn, 0)] * train.accumulation_steps(rows)

    def take_step():
        """Returns the seconds of a step; reading the loss waits for a GPU."""
        begun = perf_counter()
        train.train_step(compiled_model, optimizer, batches).item()
        return perf_counter() - begun

    return train.TOTAL_BATCH_SIZE, take_step


def compare_steps(args, place):
    subjects = []
    for argument, folder, setting in zip(args.subjects, args.folders, args.settings, strict=True):
        copy = Path(tempfile.mkdtemp(dir=place))
        copy_scripts(copy, setting, folder=folder)
        subjects.append(build(import_train(copy)))
        print(f"{argument} is ready", flush=True)
    turns = [[take_step() for _, take_step in subjects] for _ in range(args.steps)]
    print_header("train.py", "step, ms", "tokens/s", "ratio", "quartiles")
    first = subjects[0][0]
    for i, (argument, (tokens, _)) in enumerate(zip(args.subjects, subjects, strict=True)):
        seconds = median(turn[i] for turn in turns)
        ratios = [turn[0] / turn[i] * tokens / first for turn in turns]
        low, ratio, high = quantiles(ratios, n=4, method="inclusive")
        speed = (f"{1000 * seconds:.0f}", f"{tokens / seconds:.0f}", f"{ratio:.3f}")
        print_row(argument, *speed, f"{low:.3f} to {high:.3f}")


def parse_arguments(place):
    """Returns the arguments, with a folder and a setting for each. Commits go below `place`."""
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("subjects", nargs="+", metavar="FOLDER_OR_COMMIT[:KNOB=value,...]")
    parser.add_argument("--steps", type=int, help="compare this many steps (2 or more) in turn")
    parser.add_argument("--seconds", type=float, default=300, help="training time per run (300)")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--cache",
        nargs=2,
        type=Path,
        default=[None, None],
        metavar=("BEFORE", "AFTER"),
        help="an AUTORESEARCH_CACHE for each side; default: the usual one for both",
    )
    args = parser.parse_args()
    if args.steps == 1:
        parser.error("a single step has no quartiles; take --steps 2 or more")
    names = [subject.partition(":")[0] for subject in args.subjects]
    args.settings = [subject.partition(":")[2].replace(",", " ") for subject in args.subjects]
    args.folders = [find_folder(name, Path(place, str(i))) for i, name in enumerate(names)]
    for name, folder in zip(names, args.folders, strict=True):
        if not all((folder / script).is_file() for script in SCRIPTS):
            parser.error(f"{name} is no folder or commit that holds a prepare.py and a train.py")
    if args.steps:
        return args
    if len(names) != 2 or any(args.settings):
        parser.error("whole runs compare two folders; for knobs give --steps, or use sweep.py")
    before, after = ((folder / "prepare.py").read_bytes() for folder in args.folders)
    if args.cache[0] == args.cache[1] and before != after:
        parser.error("the two prepare.py differ; give each its own cache: --cache BEFORE AFTER")
    return args


def main():
    with tempfile.TemporaryDirectory() as place:
        args = parse_arguments(place)
        if args.steps:
            compare_steps(args, place)
        else:
            compare_runs(args)


if __name__ == "__main__":
    main()
