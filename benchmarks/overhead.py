"""
Measures what a run costs besides training, with a warm and an empty compiler cache, and how fast
packing, the metric and tokenisation are, each compared with a naive version.

    uv run benchmarks/overhead.py                     # needs a prepared cache, of any profile
    uv run benchmarks/overhead.py --runs 0            # no whole runs

It runs train.py unchanged, with a short budget, cold and warm in turn. Naive packing scans the
whole buffer for each document that it places. The naive metric is bare forward passes of train.py's
model over the same random rows. Naive tokenisation uses one thread; both versions tokenise the
first shard.
"""

import argparse
import itertools
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
import prepare
import train
from benchmarks.common import ROOT, RunError, print_header, print_row, run_training

import numpy as np
import torch

BUDGET = 10  # seconds of training per run
STAGES = {  # row of the table: key of a record
    "startup": "startup_seconds",
    "evaluation": "eval_seconds",
    "all but training": "outside_training_seconds",
}


# ---- Whole runs ----
def print_runs(count):
    """Prints medians of runs with an empty compiler cache and of a second run with the same."""
    cold = []
    warm = []
    for _ in range(count):
        with tempfile.TemporaryDirectory() as inductor:
            for runs in (cold, warm):
                runs.append(run_training(ROOT, BUDGET, {"TORCHINDUCTOR_CACHE_DIR": inductor}))
    print_header("seconds", "cold", "warm", "ratio")
    for stage, key in STAGES.items():
        before, after = (median(run[key] for run in runs) for runs in (cold, warm))
        print_row(stage, f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}")
    print()


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
            fitting = [document for document in buffer if len(document) <= left]
            chosen = max(fitting, key=len) if fitting else min(buffer, key=len)
            del buffer[next(i for i, document in enumerate(buffer) if document is chosen)]
            row.extend(chosen[:left])
        yield row


def packing_ways(count):
    """Returns the ways to pack `count` training rows, whose buffers are full."""
    data = prepare.begin_run()

    def pack(rows):
        return prepare.MAX_SEQ_LEN * sum(1 for _ in itertools.islice(rows, count))

    ways = {}
    for name, pack_rows in (("linear scan", linear_rows), ("pack_rows", prepare.pack_rows)):
        documents = (data.tokens[slice(*pair)] for pair in itertools.pairwise(data.ends))
        rows = pack_rows(documents, prepare.MAX_SEQ_LEN + 1)
        next(rows)  # fills the buffer
        ways[name] = partial(pack, rows)
    return ways


def metric_ways(count):
    """Returns the ways to score `count` random rows."""
    T = prepare.MAX_SEQ_LEN
    config = train.derive_config(prepare.VOCAB_SIZE, train.choose_dtype())
    _, attend = train.choose_attention(config)
    model, compiled_model, _ = train.build(config, attend, train.COMPILE)
    model = train.for_evaluation(model, compiled_model).eval()
    rng = np.random.default_rng(0)
    rows = rng.integers(0, prepare.VOCAB_SIZE, (count, T + 1), dtype=np.uint16)
    token_bytes = rng.integers(1, 9, prepare.VOCAB_SIZE, dtype=np.int32)

    @torch.no_grad()
    def forward():
        for batch in np.split(rows[:, :-1].astype(np.int64), count // prepare.EVAL_BATCH):
            logits = model(torch.from_numpy(batch).to(prepare.DEVICE))
        logits.flatten()[0].item()  # waits for a GPU
        return count * T

    def score():
        prepare.score(model, rows, token_bytes, rng=0)
        return count * T

    forward()  # compiles
    return {"bare forward passes": forward, "score": score}


def tokenisation_ways(folder):
    shard = prepare.find_shards(prepare.load_manifest()["corpus"])[0]
    tokenizer = prepare.Tokenizer.from_directory()

    def one_thread():
        return sum(map(len, map(tokenizer.encode_document, prepare.read_shard(shard))))

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


def print_parts(rows, rounds):
    prepare.start()
    print_ways("packing, one thread", packing_ways(rows), rounds)
    print_ways("metric", metric_ways(rows), rounds)
    with tempfile.TemporaryDirectory() as folder:
        print_ways("tokenisation", tokenisation_ways(Path(folder)), rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="cold runs, and as many warm ones (3)")
    args = parser.parse_args()
    print(f"{prepare.DEVICE_NAME}, medians\n", flush=True)
    if args.runs:
        try:
            print_runs(args.runs)
        except RunError as failure:
            raise SystemExit(f"error: {failure}") from None
    print_parts(prepare.EVAL_TOKENS // prepare.MAX_SEQ_LEN, rounds=3)


if __name__ == "__main__":
    main()
