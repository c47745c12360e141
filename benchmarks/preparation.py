"""
How fast a text becomes tokens: by threads, as prepare.py does it, or by a process per core.

    uv run benchmarks/preparation.py DIR              # parquet files, as --data-dir takes them
    uv run benchmarks/preparation.py DIR --rounds 5

The two run in turn, with a tokenizer that is trained on the same files, all but the last. A process
encodes a whole shard; that it starts and imports what it needs is not counted.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
import prepare
from benchmarks.common import print_header, print_row


def by_threads(shards, folder):
    """Returns the number of tokens."""
    prepare.write_tokens(shards, prepare.Tokenizer.from_directory(folder), folder)
    return (folder / prepare.TOKENS_FILE).stat().st_size // 2


def encode_shard(shard, folder):
    """What a process does with a shard; returns the number of tokens."""
    tokenizer = prepare.Tokenizer.from_directory(folder)
    with open(folder / f"{shard.stem}.u16", "wb") as file:
        for text in prepare.read_shard(shard):
            file.write(tokenizer.encode_document(text))
        return file.tell() // 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    options = {"data_dir": args.folder, "corpus": None, "num_shards": None}
    _, get_shards = prepare.find_corpus(options)
    *shards, _ = get_shards()
    context = multiprocessing.get_context("spawn")
    cores = os.cpu_count() or 1
    ready = context.Barrier(cores + 1)
    with (
        tempfile.TemporaryDirectory() as folder,
        context.Pool(cores, initializer=ready.wait) as pool,
    ):
        folder = Path(folder)
        prepare.train_tokenizer(shards, folder)
        ready.wait()
        encode = partial(encode_shard, folder=folder)
        ways = {
            "threads": lambda: by_threads(shards, folder),
            f"{cores} processes": lambda: sum(pool.imap_unordered(encode, shards)),
        }
        speeds = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                begun = perf_counter()
                tokens = way()
                speeds[name].append(tokens / (perf_counter() - begun))
    print(f"\n{tokens / 1e6:.1f} M tokens, {cores} cores, median of {args.rounds}\n")
    print_header("tokenisation", "million tokens/s", "ratio")
    base = median(speeds["threads"])
    for name, values in speeds.items():
        print_row(name, f"{median(values) / 1e6:.2f}", f"{median(values) / base:.2f}")


if __name__ == "__main__":
    main()
