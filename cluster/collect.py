"""
Prints the tables of a sweep: a row for every task, whatever its state, and then a row for every
commit with the mean over its seeds.

    cluster/sweep.sh --collect FOLDER

sweep.sh passes FOLDER and the states that Slurm remembers, as lines "TASK STATE".
"""

import json
import statistics
import sys
from pathlib import Path

TASK_COLUMNS = "task commit seed state exit val_bpb steps tokens/s device integrity".split()
COMMIT_COLUMNS = "commit device attention torch budget data finished flagged mean std".split()

# The keys of a record that must agree, those of the table's columns from `device` to `data`.
CONDITIONS = "device attention torch time_budget data".split()

# The state that an exit code of train.py means; any other code means "failed". SIGTERM comes from
# scancel, or a minute before the time limit.
STATES = {"0": "completed", "143": "cancelled"}


def find_state(exit_code, slurm_state, has_log):
    """Returns a task's state, by its exit code or, if slurm.sbatch left none, by Slurm."""
    if exit_code != "-":
        return STATES.get(exit_code, "failed")
    if slurm_state not in (None, "FAILED"):
        return slurm_state.lower()
    # It ended before slurm.sbatch could write the exit code down, if Slurm ever began it.
    return "killed" if has_log or slurm_state else "cancelled"


def read_task(folder, line, slurm_states):
    """Returns a task's row of the table, and the record of its run or None."""
    number, commit, seed = line.split("\t")
    exit_file = folder / "status" / f"{number}.exit"
    exit_code = exit_file.read_text().strip() if exit_file.exists() else "-"
    has_log = (folder / "log" / f"{number}.log").exists()
    state = find_state(exit_code, slurm_states.get(number), has_log)
    row = dict.fromkeys(TASK_COLUMNS, "-")
    row |= {"task": number, "commit": commit, "seed": seed, "state": state, "exit": exit_code}
    paths = list((folder / "runs" / number).glob("*.json"))
    record = json.loads(paths[0].read_text()) if paths else None
    if record:
        row["val_bpb"] = f"{record['val_bpb']:.6f}"
        row["steps"] = record.get("num_steps", "-")  # a foreign train.py may leave it out
        row["tokens/s"] = f"{record['tokens_per_second']:.0f}"
        row["device"] = record["device"]
        row["integrity"] = record["integrity"]
    return row, record


def commit_rows(tasks):
    """Returns a row for each commit and the conditions that must agree before two scores may be
    averaged; the mean includes flagged runs."""
    groups = {}
    for row, record in tasks:
        if row["state"] == "completed" and record:
            own = [record.get(key, "-") for key in CONDITIONS]
            groups.setdefault((row["commit"], *own), []).append(record)
    rows = []
    for conditions, records in groups.items():
        scores = [record["val_bpb"] for record in records]
        flagged = sum(record["integrity"] != "ok" for record in records)
        deviation = f"{statistics.stdev(scores):.6f}" if len(scores) > 1 else "-"
        mean = f"{statistics.mean(scores):.6f}"
        values = (*conditions, len(records), flagged, mean, deviation)
        rows.append(dict(zip(COMMIT_COLUMNS, values, strict=True)))
    return rows


def show(columns, rows):
    lines = [columns, *([str(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())


def main():
    folder = Path(sys.argv[1])
    slurm_states = dict(line.split() for line in sys.argv[2].splitlines())
    lines = (folder / "tasks.tsv").read_text().splitlines()
    tasks = [read_task(folder, line, slurm_states) for line in lines]
    show(TASK_COLUMNS, [row for row, _ in tasks])
    print()
    show(COMMIT_COLUMNS, commit_rows(tasks))


if __name__ == "__main__":
    main()
