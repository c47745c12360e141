"""
What the parts of the ruler take, each beside the plain way: packing, the metric, tokenisation.

    uv run benchmarks/ruler.py                          # needs a prepared cache, of any profile
    uv run benchmarks/ruler.py --rows 16 --rounds 1     # a quick look

Packing's plain way looks at every document of the buffer for each place in a row; where its rows
differ, the exit code is 1. The metric's are bare forward passes of train.py's model over random
rows. Tokenisation's is one thread, on the first shard.
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
from benchmarks.common import build, print_header, print_row, training_documents

import numpy as np
import torch


def linear_rows(documents, row_len, buffer_docs=prepare.BUFFER_DOCS):
    """The definition of pack_rows, by a scan of the whole buffer for each document."""
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


def packing_ways(count):
    """{name: a function that packs and returns the number of tokens}, and whether rows agree."""
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
    """The same of the metric, over `count` random rows."""
    T = prepare.MAX_SEQ_LEN
    with torch.enable_grad():  # for the warm-up
        subject = build(train)
    model = train.for_evaluation(subject.model, subject.compiled_model).eval()
    size = prepare.largest_divisor(count, prepare.EVAL_BATCH)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, prepare.VOCAB_SIZE, (count, T + 1), dtype=np.uint16)
    token_bytes = rng.integers(1, 9, prepare.VOCAB_SIZE, dtype=np.int32)
    batches = np.split(rows, count // size)

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
        prepare.score(model, rows, token_bytes, size, rng=0)
        return count * T

    def probe():
        prepare.probe(model, rows, losses, size, token_bytes, np.random.default_rng(0))
        return count * T

    return {
        "bare forward passes": forward,
        "losses of all rows": lambda: all_losses().size,
        "probes": probe,
        "score, which is both": score,
    }


def tokenisation_ways(folder):
    _, get_shards = prepare.find_corpus(prepare.check_cache()["options"])
    shard = get_shards()[0]
    tokenizer = prepare.Tokenizer.from_directory()

    def one_thread():
        return sum(map(len, map(tokenizer.encode_document, prepare.read_shard(shard)))) // 2

    def threads():
        prepare.write_tokens([shard], tokenizer, folder)
        return (folder / prepare.TOKENS_FILE).stat().st_size // 2

    return {"one thread": one_thread, "write_tokens": threads}


def print_ways(title, ways, rounds):
    """A row per way, all of them in turn; the ratio is the speed beside the first."""
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
def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--rows", type=int, default=512, help="packed, scored (512)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    prepare.start()
    packing, same = packing_ways(args.rows)
    print(f"{prepare.DEVICE_NAME}, {args.rows} rows, median of {args.rounds}\n")
    print_ways("packing, one thread", packing, args.rounds)
    print_ways("metric", metric_ways(args.rows), args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        print_ways("tokenisation", tokenisation_ways(Path(folder)), args.rounds)
    print(f"rows identical to the scan's: {'yes' if same else 'NO'}")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
