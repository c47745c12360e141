"""
Where the seconds go that are not training, from the start of the process to its end, by stage.

    uv run benchmarks/overhead.py                    # median of three runs, after one not counted
    uv run benchmarks/overhead.py --cold             # and of runs with an empty compiler cache
    uv run benchmarks/overhead.py --edits            # what an edit costs that has to be compiled
    uv run benchmarks/overhead.py --script ../other/train.py --cache /tmp/other
    uv run benchmarks/overhead.py --pair ../before/train.py --cache /tmp/after /tmp/before

Whole runs of train.py as it is, with a short budget; a stage ends with the line that follows it.
The ratio is to the other version, which runs in turn with this one (--pair), or that of a cold run
to a warm one (--cold). The first step counts as training too.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import (
    ROOT,
    RunError,
    copy_scripts,
    last_words,
    print_header,
    print_row,
    run_script,
)

STAGES = {  # name: how the line begins that ends it; before 2026-11-22 the second of two
    "interpreter, imports, cache check": ("run:", "device:"),
    "attention probe, model": ("model:",),
    "compilation and warm-up": ("training:", "run:"),
    "first batch, first step": ("step ",),
    "later steps, evaluation": ("---",),
}
LAST_STAGE = "report, exit"
OUTSIDE = "all but training"
SHOWN = [*STAGES, "evaluation", LAST_STAGE, OUTSIDE]
SHOWN.remove("later steps, evaluation")  # the budget decides about the steps


GAIN = {  # a module with a parameter, as an agent would add one
    "        self.down = Linear(hidden, config.n_embd)\n": (
        "        self.down = Linear(hidden, config.n_embd)\n"
        "        self.gain = nn.Parameter(torch.empty(hidden))\n"
    ),
    "self.down(F.relu(self.up(x)).square())": (
        "self.down(self.gain.to(x.dtype) * F.relu(self.up(x)).square())"
    ),
    "        block.mlp.down.weight.zero_()\n": (
        "        block.mlp.down.weight.zero_()\n        block.mlp.gain.fill_(1)\n"
    ),
}
EDITS = {  # name: a setting of knobs, texts to replace
    "nothing": ("", {}),
    "a learning rate": ("MATRIX_LR=0.05", {}),
    "an activation": ("", {"F.relu(": "F.silu("}),
    "a module": ("", GAIN),
    "a width": ("ASPECT_RATIO=80", {}),
    "a depth": ("DEPTH=5", {}),
}


def stages(seconds, runs, inductor=None, script=ROOT / "train.py", cache=None):
    """{stage: seconds} of one run of `script`, with a budget of `seconds`, its record in `runs`,
    its compiler cache in `inductor`. Raises RunError."""
    script = Path(script).resolve()
    own = {"AUTORESEARCH_TIME_BUDGET": str(seconds), "AUTORESEARCH_RUNS": str(runs)}
    own["PYTHONUNBUFFERED"] = "1"
    if inductor is not None:
        own["TORCHINDUCTOR_CACHE_DIR"] = str(inductor)
    if cache is not None:
        own["AUTORESEARCH_CACHE"] = str(Path(cache).resolve())
    ends = iter(STAGES.items())
    stage, marks = next(ends)
    found = {}
    block = {}
    lines = []
    begun = perf_counter()
    before = begun
    with subprocess.Popen(
        [sys.executable, script],
        cwd=script.parent,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            lines.append(line)
            key, colon, value = line.partition(": ")
            if colon:
                block[key] = value.strip()
            if line.startswith(marks):
                found[stage] = perf_counter() - before
                before = perf_counter()
                stage, marks = next(ends, (LAST_STAGE, ()))
    end = perf_counter()
    if process.returncode:
        raise RunError(f"exit {process.returncode}: {last_words(''.join(lines))}")
    if stage != LAST_STAGE:
        raise RunError(f"no line began with {' or '.join(marks)}, where {stage!r} ends")
    found[LAST_STAGE] = end - before
    found["evaluation"] = float(block["eval_seconds"])
    found[OUTSIDE] = end - begun - float(block["training_seconds"])
    return found


def run_in_turn(sides, rounds):
    """{side: its runs} of {side: a function that makes a run}."""
    found = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            found[side].append(run())
    return found


def print_stages(found):
    """Medians of each side, and the ratio of the first to the second where there are two."""
    sides = list(found)
    ratio = [f"{sides[0]} / {sides[1]}"] if len(sides) == 2 else []
    print_header("seconds", *sides, *ratio)
    for stage in SHOWN:
        medians = [median(run[stage] for run in found[side]) for side in sides]
        if len(medians) == 2:
            ratio = [f"{medians[0] / medians[1]:.2f}"]
        print_row(stage, *[f"{value:.1f}" for value in medians], *ratio)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10, help="budget of a run (10)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--script", type=Path, default=ROOT / "train.py", help="another train.py")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--pair", type=Path, help="a train.py that runs in turn with that")
    other.add_argument("--edits", action="store_true", help="of train.py, of several kinds")
    other.add_argument("--cold", action="store_true", help="with an empty compiler cache too")
    parser.add_argument("--cache", nargs="+", type=Path, default=[], help="of --script, of --pair")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is 1 or more")
    if len(args.cache) > 2:
        parser.error("--cache takes one folder, or two with --pair")
    for script in (args.script, args.pair):
        if script and not (script.is_file() and script.with_name("prepare.py").is_file()):
            parser.error(f"{script} is no file with a prepare.py beside it")
    return args


def kernels_in(inductor):
    return len(list(Path(inductor).rglob("*.so"))) + len(list(Path(inductor).rglob("*.cubin")))


def print_edits(args, folder):
    """A row per edit, each beside the same compiled code: that of train.py as it is."""
    cache = args.cache[0] if args.cache else None
    source = args.script.read_text()
    inductor = Path(folder, "inductor")
    stages(args.seconds, f"{folder}/runs", inductor, args.script, cache)
    print_header("edit", "seconds before training", "all but training", "kernels", "ratio")
    base = None
    for name, (setting, replacements) in EDITS.items():
        if not all(old in source for old in replacements):
            print_row(name, "this train.py has no such text", "", "", "")
            continue
        code = Path(folder, name.replace(" ", "-"))
        code.mkdir()
        copy_scripts(code, setting, replacements, args.script)
        before = kernels_in(inductor)
        found = stages(args.seconds, f"{folder}/runs", inductor, code / "train.py", cache)
        start = sum(found[stage] for stage in list(STAGES)[:3])
        if base is None:
            base = found[OUTSIDE]
        print_row(
            name,
            f"{start:.1f}",
            f"{found[OUTSIDE]:.1f}",
            kernels_in(inductor) - before,
            f"{found[OUTSIDE] / base:.2f}",
        )


def measure(args, folder):
    """{side: its runs}. Raises RunError."""
    cache, pair_cache, *_ = [*args.cache, None, None]
    runs = f"{folder}/runs"

    def run_warm():
        return stages(args.seconds, runs, None, args.script, cache)

    def run_cold():
        with tempfile.TemporaryDirectory(dir=folder) as inductor:
            return stages(args.seconds, runs, inductor, args.script, cache)

    def run_pair():
        return stages(args.seconds, runs, None, args.pair, pair_cache)

    if cache:
        run_script(args.script.with_name("prepare.py"), {"AUTORESEARCH_CACHE": cache.resolve()})
    run_warm()  # compiles
    if args.cold:
        return run_in_turn({"cold": run_cold, "warm": run_warm}, args.rounds)
    if not args.pair:
        return run_in_turn({"warm": run_warm}, args.rounds)
    if pair_cache:
        run_script(args.pair.with_name("prepare.py"), {"AUTORESEARCH_CACHE": pair_cache.resolve()})
    run_pair()
    return run_in_turn({"script": run_warm, "pair": run_pair}, args.rounds)


def main():
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        try:
            if args.edits:
                print_edits(args, folder)
                return
            found = measure(args, folder)
        except RunError as failure:
            raise SystemExit(f"error: {failure}") from None
    print(f"median of {args.rounds}, budget {args.seconds:g} s\n")
    print_stages(found)


if __name__ == "__main__":
    main()
