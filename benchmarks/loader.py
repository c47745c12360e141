"""
How fast tokens are packed and served, by one thread.

    uv run benchmarks/loader.py                          # needs a prepared cache, of any profile
    uv run benchmarks/loader.py --batches 4 --rounds 1   # a quick look

The baseline packs as a first version would: it tokenises each document when it is read, and looks
at every document of the buffer for each place in a row. Rows are compared token by token; where
they differ, the exit code is 1.
"""

import argparse
import itertools
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
import prepare
from benchmarks.common import print_header, print_row, training_documents

import numpy as np
import torch

BASELINE = "linear scan, tokenised on the fly"


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
            longest = None
            shortest = 0
            for i, document in enumerate(buffer):
                if len(document) < len(buffer[shortest]):
                    shortest = i
                fits = len(document) <= left
                if fits and (longest is None or len(document) > len(buffer[longest])):
                    longest = i
            chosen = shortest if longest is None else longest
            row.extend(buffer.pop(chosen)[:left])
        yield row


def first_rows(pack, documents, count, T):
    return list(itertools.islice(pack(documents, T + 1), count))


def time_packing(pack, documents, count, T):
    """Tokens per second."""
    rows = pack(documents, T + 1)
    next(rows)  # fills the buffer
    begun = perf_counter()
    found = sum(1 for _ in itertools.islice(rows, count))  # fewer where the documents run out
    return found * T / (perf_counter() - begun)


def time_loader(tokenizer, B, T, count):
    """Tokens per second that make_dataloader serves in `count` batches."""
    batches = prepare.make_dataloader(tokenizer, B, T)
    next(batches)  # fills the buffer
    begun = perf_counter()
    for _ in range(count):
        next(batches)
    return count * B * T / (perf_counter() - begun)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--rows", type=int, default=128, help="per batch (128)")
    parser.add_argument("--tokens", type=int, default=2048, help="per row (2048)")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    B = args.rows
    T = args.tokens
    few = max(B // 4, 1)  # rows of the slow ways
    many = args.batches * B
    torch.set_num_threads(1)
    manifest = prepare.check_cache()
    tokenizer = prepare.Tokenizer.from_directory()
    _, get_shards = prepare.find_corpus(manifest["options"])
    *shards, _ = get_shards()  # the last is validation

    def on_the_fly():
        for shard in shards:
            yield from map(tokenizer.encode_document, prepare.read_shard(shard))

    shipped = first_rows(prepare.pack_rows, training_documents(), few, T)
    scanned = first_rows(linear_rows, on_the_fly(), few, T)
    same = len(shipped) == few and all(map(np.array_equal, shipped, scanned))
    ways = {
        BASELINE: lambda: time_packing(linear_rows, on_the_fly(), few, T),
        "linear scan, token cache": lambda: time_packing(linear_rows, training_documents(), few, T),
        "pack_rows, token cache": lambda: time_packing(
            prepare.pack_rows, training_documents(), many, T
        ),
        "make_dataloader": lambda: time_loader(tokenizer, B, T, args.batches),
    }
    speeds = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            speeds[name].append(way())
    print(
        f"\n{B} rows of {T} tokens per batch, one thread, median of {args.rounds}; "
        f"rows identical to the scan's: {'yes' if same else 'NO'}\n"
    )
    print_header("packing", "million tokens/s", "ratio")
    base = median(speeds[BASELINE])
    for name, values in speeds.items():
        print_row(name, f"{median(values) / 1e6:.2f}", f"{median(values) / base:.1f}")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
