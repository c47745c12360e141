"""
Prints the tables of a sweep: a row for every task, whatever its state, and then a row for every
commit with the mean over its seeds.

    cluster/sweep.sh --collect FOLDER

sweep.sh passes FOLDER and the states that Slurm remembers, as lines "TASK STATE".
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

TASK_COLUMNS = "task commit seed state exit val_bpb steps tokens/s device integrity".split()
COMMIT_COLUMNS = "commit device attention torch budget data finished flagged mean std".split()

# The state that an exit code of train.py means; any other code means "failed".
STATES = {
    "0": "completed",
    "130": "cancelled",  # SIGINT
    "143": "cancelled",  # SIGTERM: from scancel, or a minute before the time limit
}


@dataclass
class Task:
    number: str
    commit: str
    seed: str
    exit_code: str | None  # None if slurm.sbatch left none
    state: str
    record: dict | None  # None if the run wrote none


def find_state(exit_code, slurm_state, has_log):
    """Returns a task's state, by its exit code or, if slurm.sbatch left none, by Slurm."""
    if exit_code is not None:
        return STATES.get(exit_code, "failed")
    if slurm_state == "FAILED":
        return "killed"  # before slurm.sbatch could write the exit code down
    if slurm_state is not None:
        return slurm_state.lower()
    # Slurm has forgotten the task.
    if has_log:
        return "killed"
    return "cancelled"  # before it began


def read_task(folder, number, commit, seed, slurm_state):
    exit_file = folder / "status" / f"{number}.exit"
    exit_code = exit_file.read_text().strip() if exit_file.exists() else None
    has_log = (folder / "log" / f"{number}.log").exists()
    record_files = list((folder / "runs" / number).glob("*.json"))
    return Task(
        number=number,
        commit=commit,
        seed=seed,
        exit_code=exit_code,
        state=find_state(exit_code, slurm_state, has_log),
        record=json.loads(record_files[0].read_text()) if record_files else None,
    )


def read_tasks(folder, slurm_states):
    tasks = []
    for line in (folder / "tasks.tsv").read_text().splitlines():
        number, commit, seed = line.split("\t")
        tasks.append(read_task(folder, number, commit, seed, slurm_states.get(number)))
    return tasks


def task_row(task):
    row = dict.fromkeys(TASK_COLUMNS, "-")
    row["task"] = task.number
    row["commit"] = task.commit
    row["seed"] = task.seed
    row["state"] = task.state
    if task.exit_code is not None:
        row["exit"] = task.exit_code
    if task.record is not None:
        row["val_bpb"] = f"{task.record['val_bpb']:.6f}"
        row["steps"] = task.record["num_steps"]
        row["tokens/s"] = f"{task.record['tokens_per_second']:.0f}"
        row["device"] = task.record["device"]
        row["integrity"] = task.record["integrity"]
    return row


def conditions(task):
    """Returns what must agree before two scores may be averaged."""
    return {
        "commit": task.commit,
        "device": task.record["device"],
        "attention": task.record["attention"],
        "torch": task.record["torch"],
        "budget": f"{task.record['time_budget']:g} s",
        "data": task.record["data"],
    }


def commit_row(group):
    """Returns the row for tasks whose conditions agree; the mean includes flagged runs."""
    scores = [task.record["val_bpb"] for task in group]
    flagged = [task for task in group if task.record["integrity"] != "ok"]
    row = conditions(group[0])
    row["finished"] = len(group)
    row["flagged"] = len(flagged)
    row["mean"] = f"{statistics.mean(scores):.6f}"
    row["std"] = f"{statistics.stdev(scores):.6f}" if len(scores) > 1 else "-"
    return row


def commit_rows(tasks):
    groups = {}
    for task in tasks:
        if task.state == "completed" and task.record is not None:
            key = tuple(conditions(task).values())
            groups.setdefault(key, []).append(task)
    return [commit_row(group) for group in groups.values()]


def show(columns, rows):
    lines = [columns]
    for row in rows:
        lines.append([str(row[column]) for column in columns])
    widths = [max(len(cell) for cell in column) for column in zip(*lines)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths)]
        print("  ".join(cells).rstrip())


def main():
    folder = Path(sys.argv[1])
    slurm_states = dict(line.split() for line in sys.argv[2].splitlines())
    tasks = read_tasks(folder, slurm_states)
    show(TASK_COLUMNS, [task_row(task) for task in tasks])
    print()
    show(COMMIT_COLUMNS, commit_rows(tasks))


if __name__ == "__main__":
    main()
