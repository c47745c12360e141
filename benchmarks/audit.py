"""
What a night gained: its commits trained again in clean copies, at seeds that it never used.

    uv run benchmarks/audit.py CLONE                        # baseline and last keep, three seeds
    uv run benchmarks/audit.py CLONE --keeps --seeds 300    # each keep beside the one before it

CLONE is the folder of the night, with results.tsv. Each run is one of tools/rerun.py there, and a
line of JSON in the folder's audit.jsonl: an audit that was cut off goes on from there, and tries
again what had no score. A gain is what val_bpb fell by since the commit in the row above; the
standard error is that of the mean over the seeds.
"""

import argparse
import json
import math
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import RunError, print_header, print_row, run_training
from prepare import TIME_BUDGET

import numpy as np

SHOWN = ("val_bpb", "num_steps", "tokens_per_second", "integrity")  # of a record


def kept_commits(log):
    """The commits that results.tsv keeps, in their order, the baseline's first."""
    rows = [line.split("\t") for line in log.read_text().splitlines()]
    return list(dict.fromkeys(row[0] for row in rows if len(row) >= 5 and row[3] == "keep"))


def rerun(folder, commit, seed, seconds):
    """The line of audit.jsonl on a new run of the commit at that seed."""
    try:
        record = run_training(folder, seconds, {"SEED": seed}, commit).record
    except RunError as error:
        record = {"val_bpb": math.nan, "num_steps": 0, "integrity": str(error)}
    shown = {key: record.get(key) for key in SHOWN}
    return shown | {"seed": seed, "commit": commit, "seconds": seconds}


class Runs:
    """What a folder's audit.jsonl holds; what it does not hold is trained, and added."""

    def __init__(self, folder, seconds):
        self.folder = folder
        self.seconds = seconds
        self.path = folder / "audit.jsonl"
        self.done = {}
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for line in lines:
            run = json.loads(line)
            if not math.isnan(run["val_bpb"]):
                self.done[run["commit"], run["seed"], run["seconds"]] = run

    def get(self, commit, seed):
        run = self.done.get((commit, seed, self.seconds))
        if run is None:
            run = rerun(self.folder, commit, seed, self.seconds)
            with open(self.path, "a") as file:
                file.write(json.dumps(run) + "\n")
        return run


def train_in_turn(commits, seeds, runs):
    """Trains all commits at one seed, then at the next, and prints a row for each run. Returns
    their val_bpb, [seeds, commits]."""
    print_header("seed", "commit", "val_bpb", "gain", "ratio", "steps", "integrity")
    scores = np.empty((len(seeds), len(commits)))
    for i, seed in enumerate(seeds):
        for j, commit in enumerate(commits):
            run = runs.get(commit, seed)
            score = scores[i, j] = run["val_bpb"]
            gain = ratio = ""
            if j:
                gain = f"{scores[i, j - 1] - score:.6f}"
                ratio = f"{score / scores[i, j - 1]:.4f}"
            columns = (f"{score:.6f}", gain, ratio, run["num_steps"], run["integrity"])
            print_row(seed, commit, *columns)
    print()
    return scores


def mean_gain(differences):
    """The mean of the numbers as text, with its standard error if there is more than one."""
    text = f"{np.mean(differences):.4f}"
    if len(differences) > 1:
        error = np.std(differences, ddof=1) / math.sqrt(len(differences))
        text += f" +- {error:.4f}"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="CLONE")
    parser.add_argument("--keeps", action="store_true", help="all keeps, not only the last")
    parser.add_argument("--seeds", type=int, nargs="+", default=[200, 201, 202])
    parser.add_argument("--seconds", type=float, default=TIME_BUDGET, help="budget of a run")
    args = parser.parse_args()
    log = args.folder / "results.tsv"
    if not log.is_file():
        raise SystemExit(f"error: {log} does not exist; give the folder of a night.")
    commits = kept_commits(log)
    if len(commits) < 2:
        raise SystemExit(f"error: {log} has no keep beside the baseline; there is nothing to show.")
    if not args.keeps:
        commits = [commits[0], commits[-1]]
    scores = train_in_turn(commits, args.seeds, Runs(args.folder, args.seconds))
    gains = scores[:, :-1] - scores[:, 1:]
    if not args.keeps:
        lost = np.count_nonzero(np.isnan(scores))
        if lost:
            raise SystemExit(f"error: {lost} of {scores.size} runs have no score; run this again.")
        print(f"claim: gain {mean_gain(gains[:, 0])}")
        return
    for (before, commit), own in zip(pairwise(commits), gains.T, strict=True):
        print(f"gain of {commit} over {before}: {mean_gain(own)}")
    better = np.count_nonzero(gains.mean(axis=0) > 0)
    print(f"{better} of {len(commits) - 1} are better than the one before")


if __name__ == "__main__":
    main()
