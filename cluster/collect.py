"""
The table of a sweep: a row for every task, whatever became of it, and the mean over the seeds of each commit.

    cluster/sweep.sh --collect FOLDER

Called with FOLDER and what Slurm remembers, lines "TASK STATE". A task's state is told by the exit code that
slurm.sbatch left (130 and 143 are signals: cancelled, or out of time; 142 is AUTORESEARCH_WALL_LIMIT). Where it left
none, Slurm tells; where Slurm has forgotten, a task without a log was cancelled before it began, one with a log killed.
"""

import json
import statistics
import sys
from pathlib import Path

COLUMNS = "task commit seed state exit val_bpb steps tokens/s device integrity".split()
SUMMARY = "commit device attention torch budget data finished flagged mean std".split()
# Of an exit code; any other has failed.
STATES = {"0": "completed", "130": "cancelled", "142": "timeout", "143": "cancelled"}


def read_task(folder, task, commit, seed, known):
    """(row of the table, record of the run or None)"""
    exit_file = folder / "status" / f"{task}.exit"
    code = exit_file.read_text().strip() if exit_file.exists() else "-"
    if code != "-":
        state = STATES.get(code, "failed")
    elif known and known != "FAILED":
        state = known.lower()
    else:
        state = "killed" if known or (folder / "log" / f"{task}.log").exists() else "cancelled"
    record = next((json.loads(path.read_text()) for path in (folder / "runs" / task).glob("*.json")), None)
    shown = ["-"] * 5
    if record:
        shown = [f"{record['val_bpb']:.6f}", record["num_steps"], f"{record['tokens_per_second']:.0f}"]
        shown += [record["device"], record["integrity"]]
    return [task, commit, seed, state, code, *shown], record if state == "completed" else None


def summarise(records):
    """A row a commit, and another one where and on what it ran differs: such runs are not compared."""
    groups = {}
    for commit, record in records:
        where = record["device"], record["attention"], record["torch"]
        key = commit, *where, f"{record['time_budget']:g} s", record["data"]
        groups.setdefault(key, []).append(record)
    for key, group in groups.items():
        scores = [record["val_bpb"] for record in group]
        flagged = sum(record["integrity"] != "ok" for record in group)
        std = f"{statistics.stdev(scores):.6f}" if len(scores) > 1 else "-"
        yield [*key, len(scores), flagged, f"{statistics.mean(scores):.6f}", std]


def show(rows):
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows)]
    for row in rows:
        print("  ".join(f"{cell!s:{width}}" for cell, width in zip(row, widths)).rstrip())


def main():
    folder, known = Path(sys.argv[1]), dict(line.split() for line in sys.argv[2].splitlines())
    tasks = [line.split("\t") for line in (folder / "tasks.tsv").read_text().splitlines()]
    found = [read_task(folder, *task, known.get(task[0])) for task in tasks]
    show([COLUMNS, *(row for row, _ in found)])
    print()
    show([SUMMARY, *summarise([(row[1], record) for row, record in found if record])])


if __name__ == "__main__":
    main()
