"""
Seconds per stage of a preparation from an empty cache, and how many cores each keeps busy.

    uv run benchmarks/preparation.py                                   # the embedded corpus
    uv run benchmarks/preparation.py --data-dir ../texts --profile full

The cache is a temporary folder. A stage that is not listed takes no time worth listing. The ratio
is the stage's share of the whole; MB/s are of the shards as they lie on the disk.
"""

import argparse
import os
import resource
import sys
import tempfile
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import print_header, print_row

STAGES = {  # function of prepare.py: what it does
    "python_corpus": "collect the embedded corpus",
    "check_shards": "look into each shard",
    "train_tokenizer": "train the tokenizer",
    "write_all_tokens": "tokenise",
    "write_rows": "pack the validation rows",
    "fingerprints": "hash all files",
}


def cpu_seconds():
    """Of this process and of the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def watch(prepare, found):
    """Adds to found, {stage: [seconds, CPU seconds]}, whatever calls of the stages take."""

    def watched(name, function):
        def call(*args, **kwargs):
            begun = perf_counter(), cpu_seconds()
            try:
                return function(*args, **kwargs)
            finally:
                taken = found.setdefault(name, [0.0, 0.0])
                taken[0] += perf_counter() - begun[0]
                taken[1] += cpu_seconds() - begun[1]

        return call

    for name in STAGES:
        setattr(prepare, name, watched(name, getattr(prepare, name)))


def measure(args, cache):
    os.environ["AUTORESEARCH_CACHE"] = cache
    os.environ["AUTORESEARCH_PROFILE"] = args.profile
    import prepare

    found = {}
    recipe = prepare.recipe()  # of the functions as they are
    watch(prepare, found)
    prepare.recipe = lambda: recipe
    sys.argv = ["prepare.py", *(["--data-dir", args.data_dir] if args.data_dir else [])]
    begun = perf_counter()
    prepare.main()
    whole = perf_counter() - begun
    manifest = prepare.load_manifest()
    megabytes = sum(size for size, _ in manifest["corpus"].values()) / 1e6
    tokens = sum(manifest["files"][flat][0] // 2 for flat in manifest["tokens"].values())
    peaks = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print()
    print_header("stage", "seconds", "ratio", "cores", "MB/s")
    for name, (seconds, cpu) in found.items():
        print_row(
            STAGES[name],
            f"{seconds:.1f}",
            f"{seconds / whole:.2f}",
            f"{cpu / seconds:.1f}",
            f"{megabytes / seconds:.0f}",
        )
    print_row("all", f"{whole:.1f}", "1.00", "", f"{megabytes / whole:.0f}")
    print(
        f"\n{args.profile} profile, {len(manifest['corpus'])} shards of {megabytes:.0f} MB in all, "
        f"{tokens / 1e6:.1f} M tokens, {os.cpu_count()} cores; peak memory "
        f"{peaks[0].ru_maxrss / 1024:.0f} MB, of the largest child {peaks[1].ru_maxrss / 1024:.0f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--data-dir", metavar="DIR", help="parquet files, the last is validation")
    parser.add_argument("--profile", choices=("small", "medium", "full"), default="small")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        measure(args, cache)


if __name__ == "__main__":
    main()
