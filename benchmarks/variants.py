"""
What becomes of the score when the model, the loss or the loop is honest, mistaken or out to fool it: a row a variant.

    uv run benchmarks/variants.py

The models are those of tests/test_integrity.py, 32 channels wide with random weights, on 64 rows of made-up tokens. The
runs are real ones, of train.py with a tiny model and the edit that the row names, two seconds of training each.
"""

import copy
import math
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import prepare  # noqa: E402
from tests import common, conftest  # noqa: E402
from tests import test_end_to_end as runs  # noqa: E402
from tests import test_integrity as suite  # noqa: E402

import torch  # noqa: E402

EVALUATE = runs.EVALUATE
LOADER = "batches = prepare.make_dataloader(tokenizer, rows, MAX_SEQ_LEN)"
ROWS = "prepare.ROOT / 'val' / 'rows.bin'"
# For 5 s: batches of its own, or after the last step of training.
OWN = "iter(lambda: (*torch.randint(99, (2, rows, MAX_SEQ_LEN)), 0), None)"
TRAIN_ON = "    until = monotonic() + 5\n    while monotonic() < until:\n        train_step(callable_model, optimizer, {}, 1)\n"
EDITS = {  # name: (text of train.py, its replacement)
    "none": ("", ""),
    "F.cross_entropy patched to 0": (EVALUATE, "    F.cross_entropy = lambda *a, **k: torch.zeros(())\n" + EVALUATE),
    "time patched to stand still": ("    steps, loss =", "    import time\n    time.time = time.monotonic = lambda: 0.0\n    steps, loss ="),
    "evaluates twice": (EVALUATE, "    prepare.evaluate_bpb(callable_model, tokenizer, rows)\n" + EVALUATE),
    "trains after the last batch": (EVALUATE, TRAIN_ON.format("batches") + EVALUATE),
    "trains before the first batch": ("    batches = prepare", "    set_schedules(optimizer, 0, 0)\n" + TRAIN_ON.format(OWN) + "    batches = prepare"),
    "a loader of its own": (LOADER, f"batches = {OWN}"),
    'split="val"': (LOADER, LOADER.replace(")", ', split="val")')),
    "validation rows cut by one": (EVALUATE, f"    os.truncate({ROWS}, os.path.getsize({ROWS}) - 1026)\n" + EVALUATE),
    "a byte of validation changed": (EVALUATE, f"    ({ROWS}).write_bytes(b'x' + ({ROWS}).read_bytes()[1:])\n" + EVALUATE),
    "token bytes doubled": (EVALUATE, "    tokenizer.token_bytes *= 2\n" + EVALUATE),
    "a leak only in evaluation": ("x = x0 = norm(self.wte(idx))", "x = self.wte(idx)\n        x = x0 = norm(x if self.training else x + x.roll(-1, 1))"),
    "NaN weights at the end": (EVALUATE, "    model.lm_head.weight.data.fill_(math.nan)\n" + EVALUATE),
}  # fmt: skip


def scored(model, rows, batch_size=32):
    """(score or nan, what the probes said)."""
    try:
        bpb, probes = prepare.score(copy.deepcopy(model), *rows, batch_size, rng=0)
        return bpb, "probes " + " ".join(f"{change.max():.1g}" for change in probes.values())
    except prepare.IntegrityError as error:
        return float("nan"), str(error)


def by_definition(model, rows):
    """Bits per byte from a log-softmax in fp64, all rows at once."""
    inputs, targets = (
        torch.from_numpy(rows[0][:, :-1].astype("int64")),
        torch.from_numpy(rows[0][:, 1:].astype("int64")),
    )
    with torch.no_grad():
        nats = -model.eval()(inputs).double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    length = torch.from_numpy(rows[1])[targets]
    return (nats * (length > 0)).sum().item() / math.log(2) / length.sum().item()


def models(rows):
    print("| variant | kind | score | by definition | what was said |\n|---|---|---|---|---|")
    identical, exact = 0, 5  # digits; below, a variant rounds and is its own twin
    honest = {name: (model, twin if digits >= exact else None) for name, (model, twin, digits) in suite.HONEST.items()}
    honest |= {
        "compiled": (torch.compile(suite.Tiny(), backend="aot_eager"), suite.Tiny()),
        "EMA weights": (suite.average_of(suite.Tiny(0), suite.Tiny(1)), None),
        "padded vocabulary": (suite.padded(), None),
    } | {f"batch size {size}": (suite.Tiny(), None, size) for size in (7, 96, 10**6)}
    for name, (model, twin, *size) in honest.items():
        (bpb, said), other = scored(model, rows, *size), by_definition(copy.deepcopy(twin or model), rows)
        identical += f"{bpb:.6f}" == f"{other:.6f}"
        print(f"| {name} | honest | {bpb:.6f} | {other:.6f} | {said} |")
    plain = by_definition(suite.Tiny(), rows)
    for name, tamper in suite.LOSSES.items():
        print(f"| loss: {name} | neutralised | {scored(suite.with_loss(tamper), rows)[0]:.6f} | {plain:.6f} | |")
    for name, (model, _) in suite.REFUSED.items():
        print(f"| {name} | refused | {scored(model, rows)[0]:.6f} | | {scored(model, rows)[1]} |")
    misses = {"targets from the stack": suite.variant(forward=suite.in_stack), "a table of the rows": suite.with_table(rows[0])}  # fmt: skip
    for name, model in misses.items():
        print("| {} | known miss | {:.6f} | | {} |".format(name, *scored(model, rows)))
    print(f"\n{identical} of {len(honest)} honest variants have the identical score to six decimals.\n")


def edited_runs(folder):
    """The edits one after another; a cache that one of them spoils is mended for the next."""
    corpus = common.make_corpus(folder / "corpus")
    print("| edit of train.py | exit | val_bpb | training s | start-up s | what was said |\n|---|---|---|---|---|---|")
    for i, (name, edit) in enumerate(EDITS.items()):
        assert common.run_script(ROOT / "prepare.py", "--data-dir", corpus).returncode == 0
        done = common.train(common.edited(folder / str(i), [edit]))
        found = dict(re.findall(r"^(val_bpb|training_seconds|startup_seconds|integrity): (.*)", done.stdout, re.M))
        said = found.get("integrity") or done.output.strip().splitlines()[-1]
        numbers = " | ".join(found.get(key, "") for key in ("val_bpb", "training_seconds", "startup_seconds"))
        print(f"| {name} | {done.returncode} | {numbers} | {said} |", flush=True)
    best = [min(done.records, key=lambda record: record["val_bpb"]) for done in runs.smuggled(folder / "smuggled")]
    first, night, clean = (f"{record['val_bpb']:.4f} after {record['num_steps']} steps" for record in best)
    print(
        f"\nA run that saves its weights: {first}; the next, which loads them: {night}; in a clean worktree: {clean}."
    )


def main():
    folder = Path(tempfile.mkdtemp(prefix="autoresearch-variants-"))
    models(conftest.make_rows())
    edited_runs(folder)
    for path in (folder, common.CACHE):
        shutil.rmtree(path)


if __name__ == "__main__":
    main()
