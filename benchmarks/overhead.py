"""
Measures what a run costs besides training, with a warm and an empty compiler cache, and how fast
packing, the metric and tokenisation are, each compared with a naive version.

    uv run benchmarks/overhead.py                     # needs a prepared cache, of any profile
    uv run benchmarks/overhead.py --runs 0            # no whole runs

It runs train.py unchanged, with a short budget, cold and warm in turn. Naive packing scans the
whole buffer for each document that it places; if its rows differ, the exit code is 1. The naive
metric is bare forward passes of train.py's model over random rows. Naive tokenisation uses one
thread; both versions tokenise the first shard.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
import prepare
import train
from benchmarks.common import (
    ROOT,
    RunError,
    build,
    print_header,
    print_row,
    run_training,
)

import numpy as np
import torch

BUDGET = 10  # seconds of training per run
STAGES = ("startup", "evaluation", "interpreter and exit", "all but training")


# ---- Whole runs ----
def run_stages(inductor):
    """Runs train.py with its compiler cache in `inductor`. Returns the seconds of all STAGES."""
    run = run_training(ROOT, BUDGET, {"TORCHINDUCTOR_CACHE_DIR": inductor})
    startup = run.record["startup_seconds"]
    evaluation = run.record["eval_seconds"]
    return startup, evaluation, run.outside - startup - evaluation, run.outside


def print_runs(count):
    """Prints medians of cold and warm runs, and their ratio."""
    found = []
    for _ in range(count):
        with tempfile.TemporaryDirectory() as inductor:
            found.append((run_stages(inductor), run_stages(inductor)))
            libraries = sum(path.suffix in (".so", ".cubin") for path in Path(inductor).rglob("*"))
    print_header("seconds", "cold", "warm", "ratio")
    for i, stage in enumerate(STAGES):
        cold, warm = (median(run[i] for run in runs) for runs in zip(*found, strict=True))
        print_row(stage, f"{cold:.1f}", f"{warm:.1f}", f"{cold / warm:.2f}")
    print(f"\na cold run compiles {libraries} libraries\n")


# ---- Parts of prepare.py: {name: a function that runs one and returns its number of tokens} ----
def linear_rows(documents, row_len, buffer_docs=prepare.BUFFER_DOCS):
    """Packs as pack_rows must, but scans the whole buffer for each document."""
    source = iter(documents)
    buffer = []
    while True:
        row = []
        while len(row) < row_len:
            buffer += itertools.islice(source, buffer_docs - len(buffer))
            if not buffer:
                return
            left = row_len - len(row)
            fitting = [i for i, document in enumerate(buffer) if len(document) <= left]
            if fitting:
                chosen = max(fitting, key=lambda i: len(buffer[i]))
            else:
                chosen = min(range(len(buffer)), key=lambda i: len(buffer[i]))
            row.extend(buffer.pop(chosen)[:left])
        yield row


def training_documents():
    """Yields the documents of the run, uint16."""
    for begin, end in itertools.pairwise(prepare._run.ends):
        yield prepare._run.tokens[begin:end]


def packing_ways(count):
    """Returns the ways to pack, and whether their rows agree."""
    T = prepare.MAX_SEQ_LEN
    ways = {"linear scan": linear_rows, "pack_rows": prepare.pack_rows}
    rows = {
        name: list(itertools.islice(pack(training_documents(), T + 1), count))
        for name, pack in ways.items()
    }
    same = all(map(np.array_equal, *rows.values()))
    sources = {name: pack(training_documents(), T + 1) for name, pack in ways.items()}
    batches = prepare.make_dataloader(prepare.Tokenizer.from_directory(), count, T)
    for source in (*sources.values(), batches):
        next(source)  # fills the buffer

    def pack(name):
        return T * sum(1 for _ in itertools.islice(sources[name], count))

    def serve():
        next(batches)
        return T * count

    found = {name: (lambda name=name: pack(name)) for name in ways}
    return found | {"make_dataloader": serve}, same


def metric_ways(count):
    """Returns the ways to score `count` random rows."""
    T = prepare.MAX_SEQ_LEN
    with torch.enable_grad():  # for the warm-up
        subject = build(train)
    model = train.for_evaluation(subject.model, subject.compiled_model).eval()
    rng = np.random.default_rng(0)
    rows = rng.integers(0, prepare.VOCAB_SIZE, (count, T + 1), dtype=np.uint16)
    token_bytes = rng.integers(1, 9, prepare.VOCAB_SIZE, dtype=np.int32)
    batches = np.split(rows, count // prepare.EVAL_BATCH)

    def forward():
        for batch in batches:
            logits = model(torch.from_numpy(batch[:, :-1].astype(np.int64)).to(subject.device))
        logits.flatten()[0].item()  # waits for a GPU
        return count * T

    def all_losses():
        return np.concatenate(
            [prepare.token_losses(model, b[:, :-1], b[:, 1:], token_bytes) for b in batches]
        )

    losses = all_losses()

    def score():
        prepare.score(model, rows, token_bytes, rng=0)
        return count * T

    def probe():
        prepare.probe(model, rows, losses, token_bytes, np.random.default_rng(0))
        return count * T

    return {
        "bare forward passes": forward,
        "losses of all rows": lambda: all_losses().size,
        "probes": probe,
        "score, which is both": score,
    }


def tokenisation_ways(folder):
    shard = prepare.find_shards(prepare.load_manifest()["corpus"])[0]
    tokenizer = prepare.Tokenizer.from_directory()

    def one_thread():
        return sum(map(len, map(tokenizer.encode_document, prepare.read_shard(shard)))) // 2

    def threads():
        prepare.write_tokens([shard], tokenizer, folder)
        return (folder / prepare.TOKENS_FILE).stat().st_size // 2

    return {"one thread": one_thread, "write_tokens": threads}


def print_ways(title, ways, rounds):
    """Runs the ways in turn and prints a row for each; the ratio is its speed over the first's."""
    speeds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begun = perf_counter()
            tokens = way()
            speeds[name].append(tokens / (perf_counter() - begun))
    print_header(title, "thousand tokens/s", "ratio")
    base = median(next(iter(speeds.values())))
    for name, values in speeds.items():
        print_row(name, f"{median(values) / 1e3:.0f}", f"{median(values) / base:.2f}")
    print()


@torch.no_grad()
def print_parts(rows, rounds):
    """Prints a table per part. Exits with 1 if the ways to pack give different rows."""
    prepare.start()
    packing, same = packing_ways(rows)
    print_ways("packing, one thread", packing, rounds)
    print_ways("metric", metric_ways(rows), rounds)
    with tempfile.TemporaryDirectory() as folder:
        print_ways("tokenisation", tokenisation_ways(Path(folder)), rounds)
    print(f"rows identical to the scan's: {'yes' if same else 'NO'}")
    raise SystemExit(0 if same else 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="cold runs, and as many warm ones (3)")
    parser.add_argument(
        "--rows", type=int, default=512, help="rows to pack and to score, a multiple of 16 (512)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{prepare.DEVICE_NAME}, medians\n", flush=True)
    if args.runs:
        try:
            print_runs(args.runs)
        except RunError as failure:
            raise SystemExit(f"error: {failure}") from None
    print_parts(args.rows, args.rounds)


if __name__ == "__main__":
    main()
