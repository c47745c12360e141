"""
Measures a night's gain by training its commits again, in clean copies, with fresh seeds.

    uv run tools/audit.py .                        # baseline and best, three seeds
    uv run tools/audit.py . --keeps --seeds 300    # each keep against the one before it

Each run calls tools/rerun.py in the night's folder and adds a line to audit.jsonl there. Every
second seed takes the commits in reverse, so that a machine whose speed drifts favours none of them.
An audit that was cut off goes on from these lines, says so, and repeats runs without a score.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
import prepare  # before tools.experiment, since it has a sentence for a wrong budget
from tools.experiment import append_line, fail, read_results

import numpy as np

SECONDS = prepare.TIME_BUDGET
SHOWN = ("val_bpb", "num_steps", "tokens_per_second", "data", "integrity")  # keys of a record


def kept_commits(log):
    """Returns the kept commits of a log in order, from the baseline's to that of `best`."""
    kept = [row["commit"] for row in read_results(log) if row["status"] in ("keep", "again")]
    return list(dict.fromkeys(kept))


def rerun(folder, commit, seed):
    """Trains a commit. Returns its line of audit.jsonl, in which a missing score is NaN."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "tools/rerun.py", commit]
        environment = os.environ | {"SEED": str(seed), "AUTORESEARCH_RUNS": runs}
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        record = {"val_bpb": math.nan, "num_steps": 0}
        record["integrity"] = f"exit {done.returncode}: {done.stdout.strip()[-160:]}"
        for path in Path(runs).glob("*.json"):
            record = json.loads(path.read_text())
    shown = {key: record.get(key) for key in SHOWN}
    ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return shown | {"seed": seed, "commit": commit, "seconds": SECONDS, "ended": ended}


def load(path):
    """Returns {(commit, seed): line} of the runs in audit.jsonl with this budget that are `ok`.
    Prints the lines that are left out."""
    runs = {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            run = json.loads(line)
            if run["seconds"] == SECONDS and run["integrity"] == "ok":
                runs[run["commit"], run["seed"]] = run
        except (ValueError, TypeError, KeyError):  # half a line, or not a run
            print(f"left out of {path.name}: {line[:80]!a}")
    return runs


def train_in_turn(folder, commits, seeds):
    """Prints a row for each run. Returns their val_bpb, [seeds, commits]."""
    path = folder / "audit.jsonl"
    done = load(path)
    texts = {run.get("data") for run in done.values()} - {None}  # older lines have none
    if done:
        print(f"{len(done)} runs are from an earlier audit. If the machine may have changed since,")
        print(f"move {path.name} away, and all are made anew, in turn.\n")
    scores = np.full((len(seeds), len(commits)), math.nan)
    print("| seed | commit | val_bpb | steps | integrity | ended |\n|---|---|---|---|---|---|")
    for i, seed in enumerate(seeds):
        turn = list(enumerate(commits))
        for j, commit in turn if i % 2 == 0 else turn[::-1]:
            run = done.get((commit, seed))
            if run is None:
                run = rerun(folder, commit, seed)
                if run["data"] and texts - {run["data"]}:
                    fail(
                        f"audit.jsonl holds runs on another text ({', '.join(sorted(texts))}) than "
                        f"{run['data']}, which is prepared now; prepare that text again, or move "
                        "audit.jsonl away."
                    )
                texts |= {run["data"]} - {None}
                append_line(path, json.dumps(run))
            if run["integrity"] == "ok":
                scores[i, j] = run["val_bpb"]
            columns = [seed, commit, f"{run['val_bpb']:.6f}", run["num_steps"], run["integrity"]]
            columns.append(run.get("ended", "earlier"))
            print("|", " | ".join(str(column) for column in columns), "|", flush=True)
    print()
    return scores


def mean_gain(gains):
    """Returns the mean as text, with its standard error if there is more than one seed."""
    text = f"{np.mean(gains):.4f}"
    if len(gains) > 1:
        text += f" +- {np.std(gains, ddof=1) / math.sqrt(len(gains)):.4f}"
    return text


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="CLONE", help="the folder of the night")
    parser.add_argument("--keeps", action="store_true", help="audit all keeps, not only the last")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[200, 201, 202], help="(200 201 202)"
    )
    args = parser.parse_args()
    log = args.folder / "results.tsv"
    if not log.is_file():
        fail(f"{log} does not exist; give the folder of a night.")
    commits = kept_commits(log)
    if len(commits) < 2:
        fail(f"{log} has no keep but the baseline; there is nothing to show.")
    if not args.keeps:
        commits = [commits[0], commits[-1]]
    scores = train_in_turn(args.folder, commits, args.seeds)
    gains = scores[:, :-1] - scores[:, 1:]
    for (before, commit), own in zip(pairwise(commits), gains.T, strict=True):
        print(f"gain of {commit} over {before}: {mean_gain(own)}")
    lost = np.count_nonzero(np.isnan(scores))
    if lost:
        raise SystemExit(
            f"error: {lost} of {scores.size} runs have no score that counts; run this again."
        )
    if args.keeps:
        better = np.count_nonzero(gains.mean(axis=0) > 0)
        print(f"{better} of {len(commits) - 1} are better than the one before")


if __name__ == "__main__":
    main()
