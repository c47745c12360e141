"""
How fast tokens are packed and served in one thread, and how fast they are made at preparation by all cores.

    uv run benchmarks/loader.py                        # needs a prepared cache, of either profile
    uv run benchmarks/loader.py --batches 4 --rounds 1 # a quick look

The baseline packs as a first version would: it looks at every document of the buffer for each place in a row, and
tokenises each document when it is read. Rows are compared token by token.
"""

import argparse
import itertools
import multiprocessing
import os
import resource
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import prepare  # noqa: E402

import numpy as np  # noqa: E402


def linear_rows(documents, row_len, buffer_docs=prepare.BUFFER_DOCS):
    """What pack_rows means, by a scan of the whole buffer for each document."""
    source, buffer = iter(documents), []
    while True:
        row = []
        while len(row) < row_len:
            buffer += itertools.islice(source, buffer_docs - len(buffer))
            if not buffer:
                return
            left, best = row_len - len(row), None
            for i, document in enumerate(buffer):
                if len(document) <= left and (best is None or len(document) > len(buffer[best])):
                    best = i
            if best is None:
                best = min(range(len(buffer)), key=lambda i: len(buffer[i]))
            row.extend(buffer.pop(best)[:left])
        yield row


def served(B, T, batches):
    """Seconds that make_dataloader takes."""
    loader = prepare.make_dataloader(None, B, T)
    next(loader)  # fills the buffer
    begun = perf_counter()
    for _ in range(batches):
        next(loader)
    return perf_counter() - begun


def packed(pack, documents, rows, T):
    """(seconds, rows)."""
    generator = pack(documents, T + 1)
    first, begun = next(generator), perf_counter()
    result = [first, *itertools.islice(generator, rows)]
    return perf_counter() - begun, result


def tokenised(shards, processes):
    """(seconds, tokens) of write_tokens over the shards."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(prepare.ROOT / "tokenizer", shard, Path(folder, f"{i}.bin")) for i, shard in enumerate(shards)]
        begun = perf_counter()
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            pool.map(prepare.write_tokens, jobs, chunksize=1)
        return perf_counter() - begun, sum(flat.stat().st_size for *_, flat in jobs) // 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--rows", type=int, default=128, help="B (128)")
    parser.add_argument("--tokens", type=int, default=2048, help="T (2048)")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    B, T = args.rows, args.tokens
    manifest, tokenizer = prepare.check_cache(), prepare.Tokenizer.from_directory()
    flats = [prepare.ROOT / name for name in manifest["files"] if name.startswith("tokens/") and name.endswith(".bin")]
    shards = [prepare.ROOT / name for name in manifest["corpus"]][:-1]

    def cached():
        return itertools.chain.from_iterable(map(prepare.read_tokens, flats))

    def on_the_fly():
        for text in itertools.chain.from_iterable(map(prepare.read_shard, shards)):
            yield np.array(tokenizer.encode(text, prepend=tokenizer.get_bos_token_id()), dtype=np.uint16)

    import torch

    torch.set_num_threads(1)
    few = max(B // 4, 1)  # rows of the slow ways
    fast, same = packed(prepare.pack_rows, cached(), few, T)[1], None
    for pack, documents in ((linear_rows, cached()), (linear_rows, on_the_fly()), (prepare.pack_rows, on_the_fly())):
        same = all(map(np.array_equal, fast, packed(pack, documents, few, T)[1])) and same is not False
    ways = {
        "linear scan, tokenised on the fly": lambda: few / packed(linear_rows, on_the_fly(), few, T)[0],
        "linear scan, token cache": lambda: few / packed(linear_rows, cached(), few, T)[0],
        "pack_rows, token cache": lambda: (
            args.batches * B / packed(prepare.pack_rows, cached(), args.batches * B, T)[0]
        ),
        "make_dataloader": lambda: args.batches * B / served(B, T, args.batches),
    }
    rates = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            rates[name].append(way() * T)
    print(f"\nB = {B}, T = {T}, one thread, median of {args.rounds}; rows identical to the scan's: {'yes' if same else 'NO'}\n")  # fmt: skip
    print("| | million tokens/s | ratio |\n|---|---|---|")
    base = median(rates["linear scan, tokenised on the fly"])
    for name, values in rates.items():
        print(f"| {name} | {median(values) / 1e6:.1f} | {median(values) / base:.1f} |")
    print("\n| tokenisation | million tokens/s | ratio | peak memory of a process, MB |\n|---|---|---|---|")
    for processes in dict.fromkeys((1, os.cpu_count() or 1)):
        results = [tokenised(shards, processes) for _ in range(max(1, args.rounds // 2))]
        rate = median(tokens / seconds for seconds, tokens in results)
        base = rate if processes == 1 else base
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
        print(f"| {processes} processes | {rate / 1e6:.1f} | {rate / base:.2f} | {peak:.0f} |")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
