"""
What the metric costs beside the bare forward passes over the same rows, and what the probes add to it.

    uv run benchmarks/evaluate.py                              # the small profile's rows, train.py's model
    uv run benchmarks/evaluate.py --profile full --rounds 1    # the full profile's 10,240 rows of 2048 tokens

Random rows and weights. On a CPU the full profile takes a model of one narrow layer, or this would last for hours.
"""

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--profile", choices=("small", "full"), default="small")
    parser.add_argument("--rows", type=int, help="instead of the profile's number")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ["AUTORESEARCH_PROFILE"] = args.profile
    import prepare
    import train

    import numpy as np
    import torch

    device, name, dtype, _ = train.choose_device()
    if device.type == "cpu" and args.profile == "full":
        train.DEPTH, train.ASPECT_RATIO, train.HEAD_DIM = 1, 32, 32
    T, V = prepare.MAX_SEQ_LEN, prepare.VOCAB_SIZE
    config, rng = train.derive_config(V), np.random.default_rng(0)
    rung, attend = train.choose_attention(device, dtype, config)
    plain = train.GPT(config, attend).to(device)
    train.initialise(plain, dtype, 0)
    count = args.rows or prepare.EVAL_TOKENS // T
    rows, table = rng.integers(0, V, (count, T + 1), dtype=np.uint16), rng.integers(1, 9, V, dtype=np.int32)
    size = prepare.eval_batch_size(count, args.batch)
    batches, starts = count // size, []

    class Marked(torch.nn.Module):
        """Notes when each batch begins; a GPU is waited for only where the probes begin."""

        def __init__(self):
            super().__init__()
            self.inner = torch.compile(plain, dynamic=False)

        def forward(self, idx):
            if device.type == "cuda" and len(starts) == batches:
                torch.cuda.synchronize()
            starts.append(perf_counter())
            return self.inner(idx)

    model = Marked()

    def bare():
        with torch.no_grad():
            for batch in (rows[start : start + size, :-1] for start in range(0, count, size)):
                logits = model(torch.from_numpy(batch.astype(np.int64)).to(device))
        return logits.flatten()[0].item()  # waits for a GPU

    times = []
    for _ in range(args.rounds + 1):  # the first compiles
        begun = perf_counter()
        bare()
        middle = perf_counter()
        starts.clear()
        prepare.score(model, rows, table, size, rng=0)
        end = perf_counter()
        times.append((middle - begun, starts[batches] - middle, end - starts[batches]))
        starts.clear()
    forward, scoring, probes = (median(column) for column in zip(*times[1:]))
    print(f"\n{name}, {args.profile} profile, {count} rows of {T} tokens in batches of {size}, depth {train.DEPTH}, width "
          f"{config.n_embd}, vocabulary {V}, attention {rung}, median of {args.rounds}\n")  # fmt: skip
    print("| | seconds | tokens/s | ratio |\n|---|---|---|---|")
    print(f"| bare forward passes | {forward:.2f} | {count * T / forward:.0f} | 1 |")
    print(f"| evaluation without probes | {scoring:.2f} | {count * T / scoring:.0f} | {scoring / forward:.3f} |")
    print(f"| probes | {probes:.3f} | | {100 * probes / scoring:.1f} % of the evaluation |")


if __name__ == "__main__":
    main()
